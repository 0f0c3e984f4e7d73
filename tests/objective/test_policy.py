"""PPO's and GRPO's losses against plain torch, written from the papers, on whole and split logits.

Tests of objective/policy.py and objective/token_sampling.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.log_probabilities import log_probabilities
from hpctrain.objective.policy import ADVANTAGES, OLD, Mean, PolicyOptimization, divergence
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel import vocabulary
from tests.objective.test_dpo import case
from tests.objective.test_next_token import VOCABULARY, head

LOW, HIGH, BETA, LONGEST = 0.1, 0.25, 0.05, 9
DRAWINGS = {"whole": TokenSampling(), "some": TokenSampling(30), "warm": TokenSampling(11, 1.7)}
"""Probabilities of all 37 tokens, or of the first ones. Of two ranks, the first one has 19."""


def drawn_by(logits: Tensor, drawing: TokenSampling) -> Tensor:
    """Return log-probabilities of logits [s, b, V]."""
    return torch.log_softmax(logits[..., : drawing.tokens] / drawing.temperature, -1)


def given(drawing: TokenSampling) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return weight [V, h], hidden [s, b, h], and fields [s, b] whose ratios are partly beyond the clip."""
    weight, hidden, targets, reference = case()
    if drawing.tokens is not None:
        targets = torch.where(targets < 0, targets, targets % drawing.tokens)
    generator = torch.Generator().manual_seed(9)
    own = drawn_by(functional.linear(hidden.double(), weight.double()), drawing)
    own = own.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if drawing != TokenSampling():
        reference = (own + 0.7 * torch.randn(own.shape, generator=generator)).float()
    old = (own + 0.2 * torch.randn(own.shape, generator=generator)).float()
    advantages = torch.randn(own.shape, generator=generator)
    # What stands where nothing is predicted must not matter.
    filled = {"targets": targets, OLD: old, ADVANTAGES: advantages, "reference": reference}
    return (
        weight,
        hidden,
        {
            name: values if name == "targets" else values.masked_fill(targets < 0, 3.0)
            for name, values in filled.items()
        },
    )


def by_torch(own: Tensor, fields: dict[str, Tensor], mean: str, estimate: str) -> dict[str, Tensor]:
    """Return loss and metrics of log-probabilities [s, b, V], answer by answer and token by token."""
    losses, tokens, kl, clipped, moved = [], 0, 0.0, 0, 0.0
    for row in range(own.shape[1]):
        each = []
        for place in range(own.shape[0]):
            target = int(fields["targets"][place, row])
            if target < 0:
                continue
            log_probability = own[place, row, target]
            ratio = torch.exp(log_probability - fields[OLD][place, row].double())
            advantage = float(fields[ADVANTAGES][place, row])
            bounded = max(min(float(ratio.detach()), 1 + HIGH), 1 - LOW)
            surrogate = ratio * advantage
            if bounded * advantage < float(surrogate.detach()):
                surrogate = torch.tensor(bounded * advantage, dtype=torch.float64)
                clipped += 1
            ahead = log_probability - fields["reference"][place, row].double()
            apart = ahead if estimate == "k1" else torch.exp(-ahead) - 1 + ahead
            each.append(-surrogate + BETA * apart)
            kl, tokens = kl + float(apart.detach()), tokens + 1
            moved += float((ratio - 1 - torch.log(ratio)).detach())
        losses.append(torch.stack(each))
    if mean == "tokens":
        loss = torch.cat(losses).mean()
    elif mean == "answers":
        loss = torch.stack([each.mean() for each in losses]).mean()
    else:
        loss = torch.stack([each.sum() / LONGEST for each in losses]).mean()
    return {"loss": loss, "kl": kl / tokens, "clip_share": clipped / tokens, "moved": moved / tokens}


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("mean", ["tokens", "answers", "constant"])
@pytest.mark.parametrize("estimate", ["k1", "k3"])
@pytest.mark.parametrize("of", DRAWINGS)
def test_losses_and_gradients(
    world: World, monkeypatch: pytest.MonkeyPatch, mean: Mean, estimate: str, of: str
) -> None:
    drawing = DRAWINGS[of]
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 5 * VOCABULARY)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 5)
    weight, hidden, fields = given(drawing)
    exact, wide = weight.double().requires_grad_(), hidden.double().requires_grad_()
    wanted = by_torch(drawn_by(functional.linear(wide, exact), drawing), fields, mean, estimate)
    assert 0.1 < wanted["clip_share"] < 0.9
    wanted["loss"].backward()

    layer, mine = head(world, weight), hidden.clone().requires_grad_()
    objective = PolicyOptimization(
        LOW,
        HIGH,
        mean,
        LONGEST,
        BETA,
        estimate,  # type: ignore[arg-type]
        has_reference=True,
        sampling=drawing,
    )
    inputs = ModelInputs({name: each.t() for name, each in fields.items()}, torch.arange(len(hidden)))
    tokens = int((fields["targets"] >= 0).sum())
    found = objective.loss_function(inputs, torch.tensor(1 / tokens))(layer, mine)
    found.total.backward()
    metrics = {
        name: float(each) / tokens for name, each in zip(objective.metrics, found.metrics, strict=True)
    }
    counted = objective.normalize(metrics)
    assert set(metrics) == {"loss", "clip_share", "moved", "entropy", "kl"}
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5), name
    table = layer.table
    assert mine.grad is not None
    assert wide.grad is not None
    assert exact.grad is not None
    assert table.gradient is not None
    torch.testing.assert_close(mine.grad.double() / counted, wide.grad, rtol=1e-4, atol=1e-7)
    expected = table.shard.take(exact.grad)
    torch.testing.assert_close(table.gradient.double() / counted, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("of", DRAWINGS)
def test_a_policy_that_was_just_sampled_has_not_moved(world: World, of: str) -> None:
    weight, hidden, fields = given(drawing := DRAWINGS[of])
    layer = head(world, weight)
    fields[OLD] = log_probabilities(layer, hidden, fields["targets"], drawing)
    there = fields["targets"] >= 0
    exact = drawn_by(functional.linear(hidden.double(), weight.double()), drawing)[there]
    exact = exact.gather(1, fields["targets"][there].unsqueeze(1))[:, 0]
    torch.testing.assert_close(fields[OLD][there].double(), exact, rtol=1e-6, atol=1e-6)
    inputs = ModelInputs({name: each.t() for name, each in fields.items()}, torch.arange(len(hidden)))
    objective = PolicyOptimization(sampling=drawing)
    found = objective.loss_function(inputs, torch.tensor(1.0))(layer, hidden.clone().requires_grad_())
    metrics = dict(zip(objective.metrics, map(float, found.metrics), strict=True))
    assert (metrics["moved"], metrics["clip_share"]) == (0.0, 0.0)
    assert metrics["loss"] == pytest.approx(
        -float(fields[ADVANTAGES][fields["targets"] >= 0].sum()), rel=1e-6
    )


def test_divergence_estimates_are_unbiased() -> None:
    """The mean over many samples is the divergence, and k3 is never negative."""
    generator = torch.Generator().manual_seed(2)
    policy, reference = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimate in ("k1", "k3"):
        each = divergence(policy, reference, estimate)  # type: ignore[arg-type]
        assert float((policy.exp() * each).sum()) == pytest.approx(exact, rel=1e-12)
    assert bool((divergence(policy, reference, "k3") >= 0).all())
