"""Single bits that are flipped in a run, where and when a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hpctrain.train.step import ReadBatches, Step, StepResult, TrainState
from hpctrain.train.trainer import Trainer

Places = Callable[[Trainer], list[tuple[str, Tensor]]]


def flip(values: Tensor, element: int, bit: int) -> None:
    """Change one bit of one element of contiguous values."""
    raw = values.view(torch.uint8).reshape(-1)
    size = values.element_size()
    raw[element * size + bit // 8] ^= 1 << bit % 8


def states(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """All that belongs to parameters and lies between updates, with the names that the guard gives it."""
    return [
        (f"{tensor.kind}/{tensor.shard.name}", tensor.values)
        for tensor in trainer.engine.state()
        if isinstance(tensor.values, Tensor) and tensor.values.numel()
    ]


def gradients(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """Summed gradients."""
    return [
        (f"gradient/{segment.parameter.shard.name}", values)
        for bucket in trainer.engine.stage.buckets
        for segment, values, _ in bucket.owned_segments(bucket.owned_gradients)
        if values.numel()
    ]


@dataclass
class Flip:
    """One flip of rank `rank` in the step that comes after `step` steps, once."""

    step: int
    rank: int
    places: Places
    place: int
    element: int
    bit: int
    moment: str
    done: str = ""
    met: bool = False

    def now(self, trainer: Trainer) -> None:
        """Do it, if this is the rank."""
        if self.done or self.met:
            return
        self.met = True
        places = self.places(trainer)
        name, values = places[self.place % len(places)]
        watched = {piece.name for piece in trainer.guard.update_only.pieces}  # type: ignore[attr-defined]
        if self.places is states and name not in watched and self.moment != "between":
            return  # what the step itself changes, and may have by now
        self.done = name
        if trainer.world.rank == self.rank:
            element = self.element % values.numel()
            flip(values, element, self.bit % (8 * values.element_size()))


@dataclass
class Flips:
    """Does flips at their moments: "between" steps, "within" one (before the backward passes are done), or
    when gradients are "summed"."""

    flips: list[Flip]
    now: Trainer | None = None
    steps: int = 0
    results: list[StepResult] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        make, accumulate = Trainer.train_step, Step.accumulate

        def train_step(trainer: Trainer, batch: int | None = None) -> StepResult:
            self.now = trainer
            self._do("between", trainer.state)
            return make(trainer, batch)

        def accumulated(step: Step, state: TrainState, batch: int) -> tuple[Tensor, ReadBatches]:
            self._do("within", state)
            result = accumulate(step, state, batch)
            self._do("summed", state)
            return result

        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(Step, "accumulate", accumulated)

    def _do(self, moment: str, state: TrainState) -> None:
        assert self.now is not None
        for each in self.flips:
            if each.step == state.step and each.moment == moment:
                each.now(self.now)

    def __iter__(self) -> Iterator[Flip]:
        return iter(self.flips)
