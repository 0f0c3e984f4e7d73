"""Routers: DeepSeek-V3's against transformers, ties, capacity, biases, rows that fill up."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.data.row_lengths import RowLengths
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.model.inputs import AuxiliaryLosses, ModelInputs
from hpctrain.model.mixtures.mixture import Mixture
from hpctrain.model.mixtures.router import RoutedTokens, Router
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.replication import Replications
from tests.engines import alone, make_buckets

SHAPE = ModelShape(
    family="llama",
    layers=1,
    hidden=16,
    heads=2,
    key_value_heads=2,
    mlp=24,
    vocabulary=31,
    sequence=12,
    tied=False,
    experts=ExpertsTable(count=8, per_token=3, mlp=24, balance_loss=0.0),
)


def shape_with(**keys: Any) -> ModelShape:
    """Return the shape with other keys of [model.experts]."""
    assert SHAPE.experts is not None
    return replace(SHAPE, experts=ExpertsTable(**{**dict(SHAPE.experts), **keys}))


def make_router(world: Any, **keys: Any) -> Router:
    """A router with random weights, whose gradient is there."""
    router = Router("blocks.0.feed_forward.router", shape_with(**keys), alone(world))
    give_memory(router, world)
    return router


def give_memory(module: torch.nn.Module, world: Any) -> None:
    parameters = [p for p in module.parameters() if isinstance(p, Parameter)]
    torch.manual_seed(1)
    make_buckets(
        [[[p] for p in parameters]], Replications.of_one_rank(alone(world).tensor), torch.float32, 10_000
    )
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)


def inputs_of(
    batch: int, auxiliary_losses: AuxiliaryLosses | None = None, lengths: list[int] | None = None
) -> ModelInputs:
    tokens = torch.zeros(SHAPE.sequence, batch, dtype=torch.int64)
    positions, fields = torch.arange(SHAPE.sequence), {"tokens": tokens.t()}
    known = None if lengths is None else RowLengths(torch.tensor(lengths))
    return ModelInputs(
        fields, positions, auxiliary_losses=auxiliary_losses or AuxiliaryLosses(), lengths=known
    )


def tokens_of(inputs: ModelInputs) -> RoutedTokens:
    return RoutedTokens.of(inputs, slice(0, inputs.tokens.numel()))


def tokens_at(tokens: RoutedTokens) -> tuple[Tensor, Tensor]:
    return tokens.samples, tokens.positions


def rows_of(inputs: ModelInputs, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(inputs.tokens.numel(), SHAPE.hidden, generator=generator)


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (2, 1)])
def test_deepseeks_mixture(groups: int, chosen: int, world: Any) -> None:
    transformers = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = transformers.DeepseekV3Config(
        hidden_size=16,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=groups,
        topk_group=chosen,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    theirs = transformers.DeepseekV3MoE(config)
    shape = shape_with(
        router="sigmoid",
        router_groups=groups,
        router_groups_per_token=chosen,
        router_scale=2.5,
        shared=2,
        balance="bias",
    )
    ours = Mixture("blocks.0.feed_forward", shape, alone(world))
    give_memory(ours, world)
    assert ours.shared is not None and ours.router.bias is not None
    ours.router.bias.copy_(torch.randn(8) * 0.2)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.gate.e_score_correction_bias.copy_(ours.router.bias)
        theirs.experts.gate_up_proj.copy_(ours.experts.gate_up.flatten(1, 2))
        theirs.experts.down_proj.copy_(ours.experts.down)
        gate, up = ours.shared.up.weights
        theirs.shared_experts.gate_proj.weight.copy_(gate)
        theirs.shared_experts.up_proj.weight.copy_(up)
        theirs.shared_experts.down_proj.weight.copy_(ours.shared.down.weights[0])
    inputs = inputs_of(3)
    x = rows_of(inputs).view(SHAPE.sequence, 3, -1)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = ours(mine, inputs, ParameterResidency()), theirs(other)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(expected)
    output.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.router.weight.gradient, theirs.gate.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.experts.gate_up.gradient.flatten(1, 2), theirs.experts.gate_up_proj.grad, rtol=1e-4, atol=1e-5
    )


def test_equal_probabilities_are_chosen_in_the_order_of_the_experts(world: Any) -> None:
    router = make_router(world)
    scores = torch.tensor([[0.1, 0.3, 0.3, 0.1, 0.3, 0.3, 0.0, 0.3]]).repeat(50, 1)
    assert router.choose(scores).tolist() == [[1, 2, 4]] * 50
    assert router.choose(torch.zeros(4, 8)).tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("lengths", [(12, 12, 12), (5, 12, 0)])
def test_the_last_tokens_by_sample_and_position_are_dropped(lengths: tuple[int, ...], world: Any) -> None:
    router = make_router(world, capacity=0.6)
    inputs = inputs_of(3, lengths=[*lengths])
    tokens = tokens_of(inputs)
    routing = router(rows_of(inputs), tokens, inputs)
    assert routing.accepted_choices is not None
    rows = {(int(b), int(s)): row for row, (b, s) in enumerate(zip(*tokens_at(tokens), strict=True))}
    most = ceil(0.6 * sum(lengths) * 3 / 8)
    counts_before = [0] * 8
    expected = torch.zeros_like(routing.accepted_choices)
    for sample, length in enumerate(lengths):
        for position in range(length):
            row = rows.pop((sample, position))
            for slot, expert in enumerate(routing.experts[row].tolist()):
                counts_before[expert] += 1
                expected[row, slot] = counts_before[expert] <= most
    assert not rows and torch.equal(routing.accepted_choices, expected)
    assert not expected.all() and max(counts_before) > most


@pytest.mark.parametrize("keys", [{}, {"shared": 1}, {"capacity": 0.6}])
def test_padding_goes_to_no_expert(keys: dict[str, Any], world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter what padding is: real tokens have the same results and gradients beside zeros."""
    mixture = Mixture("blocks.0.feed_forward", shape_with(**keys), alone(world))
    give_memory(mixture, world)
    sent, made = [], Dispatch.__init__

    def noting(dispatch: Dispatch, choices: Tensor, *given: Any) -> None:
        sent.append(len(choices))
        made(dispatch, choices, *given)

    monkeypatch.setattr(Dispatch, "__init__", noting)
    inputs = inputs_of(3, lengths=[12, 7, 0])
    assert inputs.padding is not None
    x = rows_of(inputs).view(SHAPE.sequence, 3, -1)
    results = []
    for padding in (0.0, 100.0):
        leaf = x.masked_fill(inputs.padding.unsqueeze(2), padding).requires_grad_()
        output = mixture(leaf, inputs, ParameterResidency())
        routed = output if mixture.shared is None else output - mixture.shared(leaf)
        assert not routed[inputs.padding].any()
        output.masked_fill(inputs.padding.unsqueeze(2), 0.0).square().sum().backward()
        assert leaf.grad is not None and not leaf.grad[inputs.padding].any()
        results.append((output[~inputs.padding], leaf.grad))
    assert sent == [19, 19]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_micro_batch_of_padding_alone(world: Any) -> None:
    keys = {"balance_loss": 1.0, "router_z_loss": 0.1, "capacity": 1.0}
    for over in ("micro_batch", "sequence"):
        mixture = Mixture("blocks.0.feed_forward", shape_with(balance_over=over, **keys), alone(world))
        give_memory(mixture, world)
        inputs = inputs_of(2, AuxiliaryLosses(torch.tensor(1.0)), lengths=[0, 0])
        x = rows_of(inputs).view(SHAPE.sequence, 2, -1).requires_grad_()
        output = mixture(x, inputs, ParameterResidency())
        output.sum().backward()
        assert x.grad is not None and not output.any() and not x.grad.any()
        assert [float(value) for value in inputs.auxiliary_losses._values.values()] == [0.0, 0.0]
        assert not any(p.gradient.any() for p in mixture.parameters() if isinstance(p, Parameter))


@pytest.mark.parametrize("lengths", [None, [12, 5]])
@pytest.mark.parametrize("over", ["micro_batch", "sequence"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_balance_and_z_losses_by_their_formulas(
    lengths: list[int] | None, over: str, router: str, world: Any
) -> None:
    module = make_router(world, balance_loss=0.7, balance_over=over, router=router, router_z_loss=0.2)
    scale = 3.0
    inputs = inputs_of(2, AuxiliaryLosses(torch.tensor(scale)), lengths)
    rows = rows_of(inputs)
    leaf = rows.clone().requires_grad_()
    routing = module(leaf, tokens_of(inputs), inputs)
    direction = torch.randn(routing.weights.shape, generator=torch.Generator().manual_seed(2))
    routing.weights.backward(direction)

    other = rows.clone().requires_grad_()
    samples, positions = torch.arange(24) % 2, torch.arange(24) // 2
    real = positions < torch.tensor(lengths or [12, 12])[samples]
    logits, samples = other[real] @ module.weight.detach().t(), samples[real]
    scores = logits.softmax(1) if router == "softmax" else logits.sigmoid()
    weights = scores.gather(1, routing.experts)
    weights = weights / weights.sum(1, keepdim=True)
    probabilities = scores / scores.sum(1, keepdim=True)
    chosen = torch.zeros(len(logits), 8).scatter_(1, routing.experts, 1.0)
    sets = [samples >= 0] if over == "micro_batch" else [samples == 0, samples == 1]
    balance = sum(
        (8 * chosen[rows].mean(0) / 3 * probabilities[rows].mean(0)).sum() * len(chosen[rows])
        for rows in sets
    )
    z = (logits.exp().sum(1).log() ** 2).sum()
    ((weights * direction).sum() + scale * (0.7 * balance + 0.2 * z)).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-5)
    for name, expected in (("balance_loss", balance), ("router_z_loss", z)):
        (value,) = (each for (term, _), each in inputs.auxiliary_losses._values.items() if term == name)
        torch.testing.assert_close(value.double(), expected.detach().double(), rtol=1e-5, atol=0)


def test_the_bias_follows_the_counts_and_does_not_weigh(world: Any) -> None:
    router = make_router(world, balance="bias", balance_rate=0.25)
    assert router.bias is not None
    counts = torch.tensor([4, 0, 2, 2, 8, 0, 0, 0, 0, 0], dtype=torch.float64)
    router.after_update({router.statistic_name: counts})
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.0, -0.25, 0.25, 0.25, 0.25]
    inputs = inputs_of(2)
    routing = router(rows_of(inputs), tokens_of(inputs), inputs)
    scores = (rows_of(inputs) @ router.weight.detach().t()).softmax(1)
    expected = (scores + router.bias).argsort(stable=True, dim=1, descending=True)[:, :3]
    assert torch.equal(routing.experts, expected)
    plain = scores.gather(1, expected)
    torch.testing.assert_close(routing.weights.detach(), plain / plain.sum(1, keepdim=True))
    assert {kind for kind, _, _ in router.state()} == {"router/bias"}


def test_over_the_step_shares_are_those_of_the_step_before(world: Any) -> None:
    router = make_router(world, balance_loss=1.0, balance_over="step")
    counts = torch.tensor([4, 0, 2, 2, 8, 0, 0, 0, 3, 1.5], dtype=torch.float64)
    inputs = inputs_of(2)
    router(rows_of(inputs), tokens_of(inputs), inputs)
    (value,) = inputs.auxiliary_losses._values.values()
    assert float(value) == 0.0
    router.after_update({router.statistic_name: counts})
    inputs = inputs_of(2)
    router(rows_of(inputs), tokens_of(inputs), inputs)
    (value,) = inputs.auxiliary_losses._values.values()
    scores = (rows_of(inputs) @ router.weight.detach().t()).softmax(1)
    expected = 8 * (scores * (counts[:8] / 16).float()).sum()
    torch.testing.assert_close(value, expected)


def test_sigmoids_that_are_all_zero_leave_losses_finite(world: Any) -> None:
    router = make_router(world, router="sigmoid", balance_loss=1.0)
    with torch.no_grad():
        router.weight.fill_(-300.0)
    inputs = inputs_of(2, AuxiliaryLosses(torch.tensor(1.0)))
    rows = rows_of(inputs).abs().requires_grad_()
    routing = router(rows, tokens_of(inputs), inputs)
    routing.weights.sum().backward()
    (value,) = inputs.auxiliary_losses._values.values()
    assert bool(value.isfinite()) and bool(rows.grad.isfinite().all())
