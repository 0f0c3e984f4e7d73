"""Modules of multi-token prediction: against autograd in plain torch, on layouts, and their memory.

Tests of objective/multi_token.py beside model/transformer.py.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.plan.memory import plan_memory
from hpctrain.train.miniature import miniature
from hpctrain.train.verify import compare
from tests.engines import LLAMA, small_deck, trainer

MODULES = (*LLAMA, "model.mtp_layers=2", "objective.mtp_weight=0.4")
HEADS, KEY_VALUE_HEADS, SIZE, LAYERS, DEPTHS, WEIGHT = 8, 2, 4, 2, 2, 0.4


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys [b, heads, s, d] with halves rotated by their positions."""
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def block(weights: dict[str, Tensor], index: int, x: Tensor, mask: Tensor) -> Tensor:
    def of(name: str) -> Tensor:
        return weights[f"blocks.{index}.{name}.weight"]

    def heads(name: str, of_layer: int) -> Tensor:
        projected = functional.linear(normed, of(f"attention.{name}")).unflatten(-1, (of_layer, SIZE))
        return projected.transpose(1, 2).repeat_interleave(HEADS // of_layer, 1)

    normed = norm(x, of("attention_norm"))
    query, key = rotated(heads("query", HEADS)), rotated(heads("key", KEY_VALUE_HEADS))
    scores = (query @ key.mT / SIZE**0.5).masked_fill(~mask, -torch.inf)
    mixed = (scores.softmax(-1) @ heads("value", KEY_VALUE_HEADS)).transpose(1, 2).flatten(2)
    x = x + functional.linear(mixed, of("attention.output"))
    normed = norm(x, of("feed_forward_norm"))
    gate, up = (functional.linear(normed, of(f"feed_forward.{name}")) for name in ("gate", "up"))
    return x + functional.linear(functional.silu(gate) * up, of("feed_forward.down"))


def losses(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, places: Tensor) -> list[Tensor]:
    """Sums of the losses of depths 0 to 2 of sequences [b, s] with places of tokens in their documents."""
    table, length = weights["embedding.tokens.weight"], tokens.shape[1]
    head = weights.get("head.weight", table)
    position = torch.arange(length)
    begin = position - places
    mask = ((position[:, None] >= position) & (begin[:, :, None] == begin[:, None]))[:, None]
    x = functional.embedding(tokens, table)
    for index in range(LAYERS):
        x = block(weights, index, x, mask)
    hidden = norm(x, weights["final_norm.weight"])
    found = []
    for depth in range(DEPTHS + 1):
        if depth:
            at, used = f"blocks.{LAYERS + depth - 1}", length - depth
            embedded = functional.embedding(tokens[:, depth:], table)
            parts = (
                norm(embedded, weights[f"{at}.embedding_norm.weight"]),
                norm(hidden[:, :used], weights[f"{at}.hidden_norm.weight"]),
            )
            x = functional.linear(torch.cat(parts, -1), weights[f"{at}.projection.weight"])
            x = block(weights, LAYERS + depth - 1, x, mask[:, :, :used, :used])
            hidden = norm(x, weights[f"{at}.final_norm.weight"])
        wanted = targets[:, depth:].clone()
        wanted[begin[:, depth:] != begin[:, : length - depth]] = -1
        logits = functional.linear(hidden, head).flatten(0, 1)
        found.append(functional.cross_entropy(logits, wanted.flatten(), ignore_index=-1, reduction="sum"))
    return found


DEEPSEEK = (
    *("model.family=deepseek-v3", "model.mlp=48", "model.head_size=12", "model.latent.key_value_rank=10"),
    *("model.latent.rotary_size=4", "model.latent.value_size=6", "model.experts.count=4"),
    *("model.experts.shared=1", "model.experts.mlp=16", "model.experts.dense_first=1"),
    *("model.experts.router_groups=2", "model.experts.router_groups_per_token=1", "model.mtp_layers=1"),
)
CASES: dict[str, tuple[str, ...]] = {
    "data": (*MODULES, "layout.zero=1", "data.document_mask=true"),
    "zero": (*MODULES, "layout.zero=3", "memory.recompute=full"),
    "tied-zero": (*MODULES, "model.tied=true", "layout.zero=2"),
    "tensor": (*MODULES, "layout.tensor=2", "model.tied=true", "memory.recompute=selective"),
    "sequence": (*MODULES, "layout.tensor=2", "layout.sequence_parallel=true", "data.document_mask=true"),
    "experts": (*DEEPSEEK, "layout.expert=2", "layout.zero=3"),
    "experts-tensor": (*DEEPSEEK, "layout.tensor=2", "layout.sequence_parallel=true"),
}
"""Decks on 2 ranks, by name."""


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", CASES)
def test_first_steps_are_those_of_one_rank(world: World, name: str) -> None:
    deck = small_deck("batch.global_size=4", *CASES[name])
    for difference in compare(miniature(deck), world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.sampled(4)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("tensor", ["plain", "sequence"])
def test_activations_are_those_that_are_kept(world: World, recompute: str, compute: str, tensor: str) -> None:
    split = (f"layout.tensor={world.size}", f"layout.sequence_parallel={str(tensor == 'sequence').lower()}")
    layout = split if world.size > 1 else ()
    more = (f"memory.recompute={recompute}", f"precision.compute={compute}", "batch.global_size=16")
    deck = small_deck(*MODULES, *layout, *more)
    training = trainer(world, deck)
    (planned,) = plan_memory(deck, world.size, 61, schedule=training.engine.schedule).stages
    training.train(1)
    training.engine.close()
    assert training.activations.bytes == pytest.approx(planned.memory.activation, rel=0.01)


def test_an_evaluation_reports_the_loss_of_the_next_token(world: World) -> None:
    plain, training = (trainer(world, small_deck(*LLAMA, *more)) for more in ((), MODULES))
    weights = plain.parameters()
    assert training.parameters().keys() > weights.keys()
    expected, found = (each.step.evaluate(each.step.batches, 4) for each in (plain, training))
    assert found == expected and "mtp_loss" not in found


def test_count() -> None:
    plain, shape = (ModelShape.of(small_deck(*LLAMA, *more), 61) for more in ((), MODULES))
    blocks = (count(shape).parameters - count(plain).parameters) // 2
    attention, feed_forward = 32 * 32 * 2 + 2 * 32 * 8, 3 * 32 * 48
    matrices = attention + feed_forward + 32 * 64
    assert blocks == matrices + 5 * 32
    flops, of_plain = model_flops(shape), model_flops(plain)
    for_logits, core = 61 * 32, of_plain.core_forward / 2
    added = flops.flops_per_token - of_plain.flops_per_token
    assert added == 3 * 2 * (2 * (matrices + for_logits) + core)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("layout.pipeline=2",), "layout.pipeline = 2: the modules use both the embedding"),
        (("layout.context=2",), "layout.context = 2: a rank does not have the tokens"),
        (("precision.compute=fp8",), 'precision.compute = "fp8"'),
        (("objective.kind=reward",), 'objective.kind = "next-token" or "sft"'),
        (("model.positions=learned",), 'model.positions = "rotary" or "none"'),
        (("model.mtp_layers=17",), "16"),
        (('model.frozen=["embedding.*"]',), "model.frozen"),
        (("model.mtp_layers=0",), "has no effect"),
    ],
)
def test_wrong_decks_are_refused(more: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError, match=re.escape(told)):
        small_deck(*MODULES, *more)


@pytest.mark.parametrize("more", [(), ("model.tied=true",), ("data.document_mask=true",)])
def test_loss_and_gradients_are_those_of_autograd(world: World, more: tuple[str, ...]) -> None:
    deck = small_deck(*MODULES, "batch.global_size=2", "optimizer.clip=0", *more)
    training = trainer(world, deck)
    weights = {name: each.clone().requires_grad_() for name, each in training.parameters().items()}
    (micro,) = training.step.batches.step(0, 2, 0, 1, 2)
    tokens, targets = micro.fields["tokens"], micro.fields["targets"]
    documents = micro.documents
    assert (documents is None) == ("data.document_mask=true" not in more)
    places = torch.arange(32).expand(2, -1) if documents is None else documents.places
    main, *further = losses(weights, tokens, targets, places)
    predicted = int((targets >= 0).sum())
    loss = (main + WEIGHT * sum(further) / DEPTHS) / predicted
    loss.backward()
    (result,) = training.train(1)
    assert result.loss == pytest.approx(float(main.detach()) / predicted, rel=1e-5)
    assert result.figures["mtp_loss"] == pytest.approx(
        float(sum(each.detach() for each in further)) / DEPTHS / predicted, rel=1e-5
    )
    gradients = training.gradients()
    assert gradients.keys() == weights.keys()
    for name, found in gradients.items():
        torch.testing.assert_close(found, weights[name].grad, rtol=1e-5, atol=1e-5, msg=name)
