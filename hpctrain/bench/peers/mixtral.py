"""Peer that trains Mixtral of transformers in the sizes of a deck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.bench.peers.torch_model import mean_loss
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining
from hpctrain.deck.families import CHOICES, FAMILIES
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape

MIXTRAL_PEERS = {"transformers-eager": "eager", "transformers-grouped": "grouped_mm"}
"""Implementation of the experts in transformers, by the name of the peer."""

EXPERT_KEYS: dict[str, object] = {
    "router": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "shared": 0,
    "every": 1,
    "dense_first": 0,
    "capacity": None,
}
"""Keys of [model.experts] that must have these values, as in Mixtral."""

SHAPE_KEYS: dict[str, object] = {
    "dropout": 0.0,
    "rope_scaling": None,
    "attention_scale": None,
    "embedding_multiplier": 1.0,
    **{name: getattr(FAMILIES["llama"].defaults, name) for name in CHOICES if name != "activation"},
}
"""Keys of [model] that must have these values, as in Mixtral."""


def mixtral(shape: ModelShape, experts: str) -> Any:
    """Return MixtralForCausalLM in fp32.

    Args:
        shape: Sizes of the model.
        experts: Implementation of the experts, of MIXTRAL_PEERS.

    Raises:
        HpctrainError: Mixtral has no model of this shape.
    """
    import transformers

    table = shape.experts
    if table is None:
        raise HpctrainError("--against transformers: requires a mixture of experts (model.experts)")
    for owner, values, place in ((table, EXPERT_KEYS, "model.experts"), (shape, SHAPE_KEYS, "model")):
        for key, value in values.items():
            if getattr(owner, key) != value:
                text = f"{getattr(owner, key)!r}: must be {value!r}, as in Mixtral"
                raise HpctrainError(f"--against transformers: {place}.{key} = {text}")
    base = {"rope_theta": shape.rope_base}
    rotary: dict[str, Any] = {**base, "rope_parameters": {**base, "rope_type": "default"}}  # for two versions
    config = transformers.MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=table.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=shape.norm_epsilon,
        **rotary,
        num_local_experts=table.count,
        num_experts_per_tok=table.per_token,
        tie_word_embeddings=shape.tied,
        output_router_logits=bool(table.balance_loss),
        # In Mixtral the load fractions add up to the experts per token, and losses of layers are averaged. In
        # hpctrain the fractions add up to 1, and losses of layers are added.
        router_aux_loss_coef=table.balance_loss * shape.layers / table.per_token,
        use_cache=False,
        pad_token_id=None,
        eos_token_id=None,
    )
    config._experts_implementation = experts
    return transformers.MixtralForCausalLM(config)


def peer(name: str, deck: Deck, peer_rank: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """Return a function that trains one step with AdamW of torch, on one rank.

    The initial weights are those of transformers. Gradients are not clipped, and there are no fp32 master
    weights for 16-bit formats, which saves time.
    """
    training = TorchTraining(deck)
    torch.manual_seed(deck.run.seed)
    model = mixtral(training.shape, MIXTRAL_PEERS[name]).to(training.storage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        total = torch.zeros(())
        for micro in training.micro_batches():
            output = model(micro.tokens)
            loss = mean_loss(output.logits, micro.targets) / training.count
            total += loss.detach()
            if model.config.output_router_logits:
                # Without labels transformers computes the balance loss, but does not add it to the loss.
                loss = loss + model.router_aux_loss_coef * output.aux_loss / training.count
            loss.backward()
        training.steps += 1
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
