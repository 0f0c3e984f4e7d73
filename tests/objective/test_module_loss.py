"""User's loss functions: what they may return, and the message if they return something else."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.module_loss import UserLoss
from hpctrain.objective.objective import Losses

OUTPUTS = torch.tensor([0.5, -1.5], requires_grad=True)


def losses_of(made: Any) -> Losses:
    inputs = ModelInputs.of_tokens(torch.zeros(3, 2, dtype=torch.int64), torch.arange(3), None)
    return UserLoss(lambda *_: made).loss_function(inputs, torch.tensor(0.25))(OUTPUTS)


@pytest.mark.parametrize(
    "count", [2, 2.0, np.int64(2), np.ones(1) * 2, torch.tensor([2]), torch.tensor(2.0, requires_grad=True)]
)
def test_a_count_is_any_number(count: Any) -> None:
    made = losses_of((OUTPUTS.square().sum(), count))
    loss, counted = made.metrics
    assert made.total.item() == 0.625 and loss.item() == 2.5 and counted.item() == 2
    assert counted.shape == () and not counted.requires_grad and made.total.requires_grad


def _of_loss(made: Tensor) -> tuple[Tensor, int]:
    return made, 2


WRONG = {
    "no pair": (OUTPUTS.sum(), "a sum, which is a tensor, and a count"),
    "vector": (_of_loss(OUTPUTS.square()), r"losses of shape \[2\] \(use \.sum\(\)\)"),
    "of one": (_of_loss(OUTPUTS.sum().reshape(1)), r"losses of shape \[1\]"),
    "complex": (_of_loss(torch.complex(OUTPUTS, OUTPUTS).sum()), "not a complex one"),
    "detached": (_of_loss(OUTPUTS.sum().detach()), "has no gradient, because it does not depend"),
    "constant": (_of_loss(torch.zeros(())), "has no gradient"),
    "no count": ((OUTPUTS.sum(), None), "a number as the count, not a NoneType"),
    "text": ((OUTPUTS.sum(), "2"), "a number as the count, not a str"),
    "counts": ((OUTPUTS.sum(), [1, 1]), r"one number as the count, not int64 \[2\]"),
    "complex count": ((OUTPUTS.sum(), 2j), "one number as the count, not complex"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_results_of_a_loss_function_are_reported(kind: str) -> None:
    made, told = WRONG[kind]
    with pytest.raises(HpctrainError, match=rf"^model\.loss: .*its function .*{told}"):
        losses_of(made)


def test_a_sum_needs_no_gradient_without_autograd() -> None:
    with torch.no_grad():
        assert losses_of((OUTPUTS.sum(), 0)).metrics[1].item() == 0


def test_a_count_that_cannot_divide_is_reported() -> None:
    loss = UserLoss(lambda *_: None)
    assert loss.normalize(metrics := {"loss": 3.0, "counted": 0.5}) == 0.5 and metrics == {"loss": 6.0}
    for counted, told in {
        0.0: "0",
        -1.0: "a negative",
        nan: "a number that is not finite",
        inf: "a number",
    }.items():
        with pytest.raises(HpctrainError, match=f"counts of its function add up to {told}"):
            loss.normalize({"loss": 3.0, "counted": counted})
        # Of a step that is skipped counts, too, may be anything.
        loss.normalize({"loss": nan, "counted": counted})
