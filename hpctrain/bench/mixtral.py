"""transformers' Mixtral of a deck's sizes, as a peer: its experts in a loop, or as grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpctrain.bench.torch_model import loss_of
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape

MIXTRAL_RIVALS = {"transformers-eager": "eager", "transformers-grouped": "grouped_mm"}
"""How each computes its experts, as transformers calls it."""

DIFFERENT = {
    "family": "llama",
    "router": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "shared_experts": 0,
    "expert_every": 1,
    "dense_first": 0,
    "query_key_norm": "none",
    "capacity": None,
    "dropout": 0.0,
}
"""What Mixtral has, where a shape may have something else."""


def mixtral(shape: ModelShape, experts: str) -> Any:
    """MixtralForCausalLM of these sizes in fp32; HpctrainError where it has no such model."""
    import transformers

    if not shape.experts:
        raise HpctrainError("--against transformers: needs a mixture of experts (model.experts)")
    for key, value in DIFFERENT.items():
        if getattr(shape, key) != value:
            told = f"{getattr(shape, key)!r} is not Mixtral's ({value!r})"
            raise HpctrainError(f"--against transformers: model.{key} = {told}")
    config = transformers.MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=shape.norm_epsilon,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        tie_word_embeddings=shape.tied,
        output_router_logits=bool(shape.balance_loss),
        router_aux_loss_coef=shape.balance_loss * shape.experts_per_token,
        use_cache=False,
        pad_token_id=None,
        eos_token_id=None,
    )
    config._experts_implementation = experts
    return transformers.MixtralForCausalLM(config)


def mixtral_step(rival: str, deck: Deck, world: World) -> Callable[[], None]:
    """One optimizer step of the deck's global batch by transformers' Mixtral and torch's AdamW, on one rank.

    Clipping, and weights in fp32 where products are in another format, are left out, to its advantage.
    """
    if world.size > 1:
        raise HpctrainError(f"--against {rival}: needs one rank; there are {world.size}")
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    torch.manual_seed(deck.run.seed)
    model = mixtral(shape, MIXTRAL_RIVALS[rival]).to(Precision.of(deck).storage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    micro = deck.batch.micro_size
    count = deck.batch.global_size // micro
    tokens = torch.randint(shape.vocabulary, (count, micro, shape.sequence + 1))

    def step() -> None:
        for batch in tokens:
            output = model(batch[:, :-1])
            loss = loss_of(output.logits, batch[:, 1:])
            if shape.balance_loss:
                # Without labels transformers computes the balance loss, but adds it to nothing.
                loss = loss + model.router_aux_loss_coef * output.aux_loss
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
