"""What is found of a module by running it by itself: faults, and no alarms where there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpctrain.data.batches import MicroBatch
from hpctrain.model.modules.module_call import make_call
from hpctrain.objective.objective import Losses, LossFunction
from hpctrain.train.module_probe import probe

WIDTH = 6


def found(
    module: nn.Module, loss: Callable[[Tensor, Tensor], tuple[Tensor, object]]
) -> list[tuple[str, bool]]:
    """Sentences of a module in double precision that takes fp32 rows of a dataset, and whether they fail."""
    fields = {"x": torch.randn(3, WIDTH), "y": torch.randn(3, 2)}

    def losses(micro: MicroBatch) -> LossFunction:
        def of_outputs(outputs: Tensor) -> Losses:
            total, count = loss(outputs, micro.fields["y"])
            return Losses(total, (total.detach(), torch.as_tensor(count)))

        return of_outputs

    call = make_call(module.double(), fields, ["x"])
    return [(each.sentence, each.fails) for each in probe(call, MicroBatch(fields), losses)]


def squares(outputs: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return (outputs - y).square().sum(), len(y)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.inner(x)))
        return y


class Normalized(Small):
    """Its weight is an attribute, made anew in each pass, which is no leaf of autograd's."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(self.inner)


class Recalls(Small):
    """Keeps what it has made, with its graph, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(super().forward(x).mean())
        return super().forward(x) + torch.stack(self.seen).sum()


class Overwrites(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class OfOneNumber(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


def test_a_right_module_raises_no_alarm() -> None:
    assert found(Small(), squares) == []


def test_what_a_pass_makes_of_parameters_is_no_state() -> None:
    assert found(Normalized(), squares) == []


def test_tensors_within_lists_are_state() -> None:
    (sentence, fails), *_ = found(Recalls(), squares)
    assert fails
    assert "keeps state outside of buffers, which checkpoints do not store: seen" in sentence


def test_fractions_that_are_changed_in_place_are_told() -> None:
    assert any("changes its input in place" in sentence for sentence, _ in found(Overwrites(), squares))


def test_a_weighted_loss_raises_no_alarm() -> None:
    def weighted(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight = (y[:, 0] > 0) + 0.5
        return ((outputs - y).square().sum(1) * weight).sum(), weight.sum()

    assert found(Small(), weighted) == []


def test_a_mean_of_one_number_of_each_sample_is_told() -> None:
    def mean(outputs: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (outputs - y[:, 0]).square().mean(), len(y)

    ((sentence, fails),) = found(OfOneNumber(), mean)
    assert fails
    assert "model.loss is not a sum over samples" in sentence


def test_a_count_that_does_not_grow_with_samples_is_told() -> None:
    def alone(outputs: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return squares(outputs, y)[0], 1

    ((sentence, fails),) = found(Small(), alone)
    assert fails
    assert "the count of model.loss does not grow with samples: for 3 samples at once it is 1," in sentence
