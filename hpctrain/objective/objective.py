"""Interface of training objectives.

Only the objective knows what the last part of the model passes to its loss function: the head and hidden
states, or the outputs of a user's module. The executor and the training step only pass it on. Auxiliary
losses of layers, such as load balancing, are not part of the objective: they travel with the inputs
(`hpctrain.model.inputs.AuxiliaryLosses`), and have their own gradients and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs


@dataclass(frozen=True)
class Losses:
    """Loss and metrics of one micro-batch on one rank.

    Attributes:
        total: Scalar fp32 tensor from which the backward pass starts, with a gradient of 1. Only its gradient
            is used; its value may differ from the loss.
        metrics: Sums of the objective's metrics on this rank, 0-dim each, in its order.
    """

    total: Tensor
    metrics: tuple[Tensor, ...]


LossFunction = Callable[..., Losses]
"""Computes the losses of one micro-batch. `ModelPart.predict` of the last part calls it.

Its arguments are `(head, hidden)` for a transformer: the output layer and the last hidden states [seq, batch,
hidden]. They are `(outputs)` for a user's module.
"""

LossGradient = Callable[[Tensor, Group], tuple[Tensor, tuple[Tensor, ...]]]
"""Computes the gradient of a loss from one value per token, such as its log-probability or score.

The function receives the values, fp32 [s/c, b], and the group of the c context ranks, which hold the other
pieces of the sequences. For some losses it is collective over this group. It returns the gradient of the sum
of losses with respect to the values, and this rank's sums of metrics.
"""


class Objective(Protocol):
    """Interface of a training objective. A run has one.

    A step adds the sums of metrics over all ranks and micro-batches, and divides them by the sum of counts.
    So a loss does not depend on the layout or on the size of micro-batches.
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, which include "loss". Each is a sum over all ranks, divided by the count."""

    def count(self, micro_batch: MicroBatch) -> int:
        """Return what a micro-batch adds to the count that sums are divided by: the tokens to predict."""
        return int((micro_batch.targets >= 0).sum())

    def normalize(self, metrics: dict[str, float]) -> float:  # noqa: ARG002
        """Correct metrics, in place, if the true divisor is known only after the forward passes.

        Args:
            metrics: Metrics of a step or an evaluation, divided by the count. Metrics that only serve this
                purpose are removed.

        Returns:
            Factor by which gradients must still be divided: the true divisor over the count, by which they
            are divided already. It is 1 if the count was right, as by default.
        """
        return 1.0

    def fields_of(self, micro_batch: MicroBatch) -> Mapping[str, Tensor]:
        """Return the fields that become a model's inputs: those of the micro-batch, and any others.

        Args:
            micro_batch: The micro-batch in host memory. Its sequences are whole, also if context ranks split
                them.
        """
        return micro_batch.fields

    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        """Return the function that computes the losses of a micro-batch.

        Args:
            inputs: Inputs of the micro-batch on this rank.
            scale: Factor of the loss in the gradient: the loss scale divided by the count of the whole step.
        """
