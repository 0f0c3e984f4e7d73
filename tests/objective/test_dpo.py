"""Direct preference optimization against plain torch, written from the papers, on whole and split logits.

Tests of objective/dpo.py and objective/log_probabilities.py.
"""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.dpo import DirectPreference
from hpctrain.objective.log_probabilities import log_probabilities
from hpctrain.parallel import vocabulary
from tests.objective.test_next_token import HIDDEN, SEQUENCE, VOCABULARY, head

PAIRS = 3
BETA = 0.3


def by_torch(
    logits: Tensor, reference: Tensor, targets: Tensor, form: str, smoothing: float
) -> tuple[Tensor, list[float]]:
    """Return the sum of the pairs' losses of logits [s, b, V], and rewards of chosen and rejected answers."""
    own = torch.log_softmax(logits, -1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    predicted = targets >= 0
    total, rewards = torch.zeros((), dtype=logits.dtype), [0.0, 0.0]
    for pair in range(targets.shape[1] // 2):
        ratios = []
        for row in (2 * pair, 2 * pair + 1):
            here = predicted[:, row]
            policy, frozen = own[here, row], reference[here, row]
            ratios.append(policy.mean() - frozen.mean() if form == "ipo" else policy.sum() - frozen.sum())
        chosen, rejected = ratios
        if form == "ipo":
            total = total + (chosen - rejected - 1 / (2 * BETA)) ** 2
        else:
            margin = BETA * (chosen - rejected)
            total = total - (1 - smoothing) * torch.log(torch.sigmoid(margin))
            total = total - smoothing * torch.log(torch.sigmoid(-margin))
        rewards[0] += BETA * float(chosen)
        rewards[1] += BETA * float(rejected)
    return total, rewards


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight [V, h], hidden [s, b, h], targets and reference [s, b]."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    hidden = torch.randn(SEQUENCE, 2 * PAIRS, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (SEQUENCE, 2 * PAIRS), generator=generator)
    for row, (first, last) in enumerate([(2, 9), (2, 12), (0, 4), (0, 3), (5, 6), (5, 11)]):
        targets[:first, row] = targets[last:, row] = -1
    reference = -3 * torch.rand(SEQUENCE, 2 * PAIRS, generator=generator) - 1
    return weight, hidden, targets, reference * (targets >= 0)


def inputs_of(targets: Tensor, reference: Tensor) -> ModelInputs:
    fields = {"tokens": torch.zeros_like(targets).t(), "targets": targets.t(), "reference": reference.t()}
    return ModelInputs(fields, torch.arange(len(targets)))


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize(
    ("form", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)], ids=["plain", "smooth", "ipo"]
)
def test_losses_and_gradients(
    world: World, monkeypatch: pytest.MonkeyPatch, form: Literal["sigmoid", "ipo"], smoothing: float
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 5 * VOCABULARY)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 5)
    weight, hidden, targets, reference = case()
    exact, wide = weight.double().requires_grad_(), hidden.double().requires_grad_()
    total, rewards = by_torch(functional.linear(wide, exact), reference.double(), targets, form, smoothing)
    (0.25 * total).backward()

    layer, mine = head(world, weight), hidden.clone().requires_grad_()
    objective = DirectPreference(BETA, form, smoothing)
    found = objective.loss_function(inputs_of(targets, reference), torch.tensor(0.25))(layer, mine)
    found.total.backward()
    metrics = dict(zip(objective.metrics, map(float, found.metrics), strict=True))
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-6)
    assert metrics["chosen"] == pytest.approx(rewards[0], rel=1e-5)
    assert metrics["rejected"] == pytest.approx(rewards[1], rel=1e-5)
    assert metrics["pairs"] == PAIRS
    assert mine.grad is not None
    assert wide.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    table = layer.table
    assert table.gradient is not None
    torch.testing.assert_close(table.gradient.double(), table.shard.take(exact.grad), rtol=1e-4, atol=1e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
def test_an_unchanged_model_equals_its_reference(world: World, form: torch.dtype) -> None:
    """Log-probabilities have the same bits, so that the first loss is ln 2."""
    weight, hidden, targets, _ = case()
    layer, hidden = head(world, weight.to(form)), hidden.to(form)
    reference = log_probabilities(layer, hidden, targets)
    objective = DirectPreference(BETA)
    losses = objective.loss_function(inputs_of(targets, reference), torch.tensor(1.0))
    with torch.no_grad():
        watched = dict(zip(objective.metrics, map(float, losses(layer, hidden).metrics), strict=True))
    trained = losses(layer, hidden.clone().requires_grad_())
    assert [float(each) for each in trained.metrics] == list(watched.values())
    settled = {name: value / 7 for name, value in watched.items()}
    assert objective.normalize(settled) == pytest.approx(PAIRS / 7)
    assert settled["loss"] == pytest.approx(math.log(2), abs=1e-15)
    assert (settled["margin"], settled["accuracy"]) == (0.0, 0.5)


def test_padding_rows_are_not_pairs() -> None:
    targets = torch.full((2, SEQUENCE), -1)
    assert DirectPreference().count(MicroBatch.of_tokens(torch.zeros_like(targets), targets)) == 0
    ahead = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    losses, told = DirectPreference(BETA).pair_losses(ahead, torch.tensor([3.0, 2.0, 0.0, 0.0]))
    assert float(told[-1]) == 1
    assert float(losses) == pytest.approx(-math.log(1 / (1 + math.exp(-2 * BETA))))
