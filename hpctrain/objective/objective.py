"""What an objective is: all that the step, the executor and the log know of it.

Only an objective knows what the part that predicts hands over; those who run a model pass it on.

Terms that layers add to the losses are in the record that travels with the inputs (model's Terms): they have
gradients and figures of their own, beside the objective's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs


@dataclass(frozen=True)
class Losses:
    """Of one micro-batch on one rank: `total`, fp32 0-dim, from which backward begins with a gradient of one,
    and the sums of the objective's figures, 0-dim each, in its order.
    """

    total: Tensor
    figures: tuple[Tensor, ...]


LossOf = Callable[..., Losses]
"""The losses of one micro-batch, of what the part that predicts hands over: see `Part.predict`."""


class Objective(Protocol):
    """Training objective. A run has one."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the metrics, which include "loss". Each is a sum over all ranks, divided by the count."""

    def count(self, micro_batch: MicroBatch) -> int:
        """Return what a micro-batch adds to the count that sums are divided by, such as predicted tokens."""

    def settle(self, figures: dict[str, float]) -> float:
        """Correct, in place, `figures` that were divided by the count, where only passes tell the real one;
        by how much this is larger, and gradients are too large so far.
        """

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch.

        Args:
            inputs: Inputs of the micro-batch on this rank.
            scale: Factor of the loss in the gradient: the loss scale divided by the count of the whole step.
        """
