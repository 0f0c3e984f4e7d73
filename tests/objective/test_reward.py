"""Loss of pairs by their rewards, and positions of rewards, compared with arithmetic by hand.

Tests of objective/reward.py; tests/train/test_reward.py runs the same through a run's own step.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, MicroBatch
from hpctrain.data.conversations import PreferenceSource
from hpctrain.data.tokens import TokenFile
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.reward import PairwiseReward, answer_ends
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.scalar_head import ScalarHead
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.engines import alone

LENGTH, HIDDEN = 6, 4


def loss_of(ahead: float) -> float:
    return math.log(1 + math.exp(-ahead))


def rewards(*values: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool)


def test_margins_and_centering() -> None:
    given, there = rewards(1.0, -0.5, 0.2, 0.7, 0.3, 0.3)
    loss, told = PairwiseReward().pair_losses(given, there, None)
    assert float(loss) == pytest.approx(loss_of(1.5) + loss_of(-0.5) + loss_of(0.0))
    metrics = dict(zip(PairwiseReward.metrics, told.tolist(), strict=True))
    assert metrics["accuracy"] == 1.5 and metrics["pairs"] == 3
    assert metrics["margin"] == pytest.approx(1.0)
    assert (metrics["chosen"], metrics["rejected"]) == pytest.approx((1.5, 0.5))
    assert metrics["loss"] == float(loss)

    loss, told = PairwiseReward(margin=0.25, centering=0.1).pair_losses(
        given, there, torch.tensor([0.5, 0.0, -1.0])
    )
    expected = loss_of(0.75) + loss_of(-0.75) + loss_of(0.75) + 0.1 * (0.25 + 0.81 + 0.36)
    assert float(loss) == pytest.approx(expected)
    assert told.tolist()[1:] == pytest.approx([metrics[name] for name in PairwiseReward.metrics[1:]])


def test_padding_rows_are_not_pairs() -> None:
    targets = torch.full((2, LENGTH), MASKED)
    assert PairwiseReward().count(MicroBatch.of_tokens(torch.zeros_like(targets), targets)) == 0
    given, there = rewards(1.0, 0.5, 0.0, 0.0)
    there[2:] = False
    loss, told = PairwiseReward(margin=1.0).pair_losses(given, there, None)
    assert float(loss) == pytest.approx(loss_of(-0.5)) and float(told[-1]) == 1
    metrics = dict.fromkeys(PairwiseReward.metrics, 0.0)
    assert PairwiseReward().normalize(metrics) == 1.0 and "pairs" not in metrics


def test_metrics_are_means_over_pairs() -> None:
    metrics = {"loss": 0.3, "accuracy": 0.25, "margin": 1.0, "chosen": 0.5, "rejected": -0.5, "pairs": 0.5}
    assert PairwiseReward().normalize(metrics) == 0.5
    assert metrics == {"loss": 0.6, "accuracy": 0.5, "margin": 2.0, "chosen": 1.0, "rejected": -1.0}


@pytest.mark.parametrize("length", [16, 8, 7, 6, 5])
def test_rewards_are_those_of_the_last_tokens_of_answers(world: World, tmp_path: Path, length: int) -> None:
    """The last token is the end of the text, or the last one in the row if the row is cut before it."""
    answers = [("ab", "abc"), ("abcd", "a")]
    rows = [{"prompt": "pq", "chosen": one, "rejected": other} for one, other in answers]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    prepare_rows(world, tmp_path / "pairs.h5", [source], kind="preferences", template="raw")
    held = PreferenceSource(TokenFile(tmp_path / "pairs.h5"), length, 0.0, "train")
    (micro,) = Batches(held, 0).evaluation(4, 0, 1, 6)
    places = answer_ends(micro.targets.t(), torch.arange(length), alone(world).context).tolist()
    assert places[4:] == [-1, -1]
    texts = [answer for pair in answers for answer in pair]
    for row, (place, text) in enumerate(zip(places, texts, strict=False)):
        whole = [*b"pq", *text.encode(), 256]
        assert place == min(len(whole), length) - 1
        assert int(micro.tokens[row, place]) == whole[place]


def test_only_last_tokens_have_gradients(world: World) -> None:
    layer_context: LayerContext = alone(world)
    head = ScalarHead(HIDDEN, layer_context)
    head.table.data = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    head.table.gradient = torch.zeros(1, HIDDEN)
    targets = torch.full((2, LENGTH), MASKED)
    targets[0, 1:4] = targets[1, 2:6] = 1
    hidden = torch.randn(LENGTH, 2, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    fields = {"tokens": torch.zeros_like(targets), "targets": targets}
    losses = PairwiseReward().loss_function(ModelInputs(fields, torch.arange(LENGTH)), torch.tensor(0.5))(
        head, hidden
    )
    losses.total.backward()
    assert hidden.grad is not None
    learned = torch.nonzero(hidden.grad.abs().sum(-1)).tolist()
    assert learned == [[4, 0], [5, 1]]

    exact = hidden.detach().double().requires_grad_()
    weight = head.table.detach()[0].double().requires_grad_()
    scores = exact @ weight
    loss = -torch.log(torch.sigmoid(scores[4, 0] - scores[5, 1]))
    (0.5 * loss).backward()
    assert exact.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(head.table.gradient[0].double(), weight.grad, rtol=1e-6, atol=1e-7)
    assert float(losses.metrics[0]) == pytest.approx(float(loss.detach()), rel=1e-6)
