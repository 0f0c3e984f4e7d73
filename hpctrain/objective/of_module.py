"""The losses of a module that users bring: of its logits, or by a function of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.data.batches import MicroBatch
from hpctrain.deck.find import find_function, users_code
from hpctrain.errors import HpctrainError
from hpctrain.model.foreign.arguments import logits_of
from hpctrain.model.inputs import Inputs
from hpctrain.objective.next_token import NextToken
from hpctrain.objective.objective import Losses, LossOf

_IGNORED = -100


class NextTokenOfLogits(NextToken):
    """As NextToken, in fp32, of whole logits [b, s, V]."""

    def losses(self, inputs: Inputs, scale: Tensor) -> LossOf:
        """See Objective."""
        targets = inputs.fields["targets"]

        def losses(outputs: Any) -> Losses:
            logits = _require_logits(outputs, targets)
            return _cross_entropy(logits, targets, scale, self.z_loss)

        return losses


@dataclass(frozen=True)
class ClassesOfLogits:
    """The cross-entropy in nats, in fp32, of logits [b, C] or [b, s, C] and the classes that a dataset has
    under `name`, [b] or [b, s], negative where nothing is to be predicted. `z_loss` as of NextToken.
    """

    name: str
    z_loss: float = 0.0
    figures: ClassVar[tuple[str, ...]] = ("loss",)

    def count(self, micro_batch: MicroBatch) -> int:
        """Classes to be predicted."""
        return int((micro_batch.fields[self.name][: micro_batch.present] >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:  # noqa: ARG002
        """See Objective: the count is known before."""
        return 1.0

    def losses(self, inputs: Inputs, scale: Tensor) -> LossOf:
        """See Objective."""
        targets = inputs.fields[self.name].long()
        if inputs.present < inputs.rows:
            targets = targets.clone()
            targets[inputs.present :] = _IGNORED

        def losses(outputs: Any) -> Losses:
            logits = _require_logits(outputs, targets)
            try:
                return _cross_entropy(logits, targets, scale, self.z_loss)
            except IndexError:
                raise HpctrainError(
                    f"the dataset's {self.name} go up to {int(targets.max())}, but model.module gives logits "
                    f"of {logits.shape[-1]} classes (from 0)"
                ) from None

        return losses


@dataclass(frozen=True)
class UsersLoss:
    """What `function` makes of outputs and a batch, all fields [b, ...]: a sum, and the count that a step's
    sums are divided by. Of a token file these are `tokens` and `targets`, negative where there is none.

    Before the real count is known, sums are divided by samples, or by tokens to be predicted.
    """

    function: Callable[..., Any]
    of_samples: bool = False
    figures: ClassVar[tuple[str, ...]] = ("loss", "counted")

    def count(self, micro_batch: MicroBatch) -> int:
        """See above."""
        return micro_batch.present if self.of_samples else int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:
        """See Objective: how many were counted for each of those that were expected."""
        share = figures.pop("counted") or 1.0
        figures["loss"] /= share
        return share

    def losses(self, inputs: Inputs, scale: Tensor) -> LossOf:
        """See Objective."""
        batch = {name: field.contiguous() for name, field in inputs.fields.items()}
        # Of a dataset rows are samples, or none is: then one stands in, and is not counted.
        weight = 0.0 if self.of_samples and not inputs.present else 1.0

        def losses(outputs: Any) -> Losses:
            with users_code("model.loss fails"):
                made = self.function(outputs, batch)
            if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], Tensor):
                raise HpctrainError(
                    "model.loss: its function must give a sum, which is a tensor, and a count"
                )
            loss = made[0].float() * weight
            counted = torch.as_tensor(made[1], device=loss.device).detach().reshape(()) * weight
            return Losses(loss * scale, (loss.detach(), counted))

        return losses


def users_loss(target: str, of_samples: bool = False) -> UsersLoss:
    """The objective by the function that a target names; errors as in `find_function`."""
    return UsersLoss(find_function(target), of_samples)


def _cross_entropy(logits: Tensor, targets: Tensor, scale: Tensor, z_loss: float) -> Losses:
    """Of logits [..., C] and targets [...], of which negative ones are left out."""
    of_rows, wanted = logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    silent = wanted < 0
    known = wanted.masked_fill(silent, _IGNORED)
    loss = functional.cross_entropy(of_rows, known, ignore_index=_IGNORED, reduction="sum")
    total = loss * scale
    if z_loss:
        squares = of_rows.logsumexp(-1).square().masked_fill(silent, 0.0)
        total = total + z_loss * squares.sum() * scale
    return Losses(total, (loss.detach(),))


def _require_logits(outputs: Any, targets: Tensor) -> Tensor:
    """The logits among what a module gives, with a row for each target."""
    logits, shape = logits_of(outputs), targets.shape
    if logits is None:
        kind = type(outputs).__name__
        raise HpctrainError(f"model.module gives {kind} without logits (model.loss names a loss of its own)")
    if logits.dim() != len(shape) + 1 or logits.shape[:-1] != shape:
        of_tokens = len(shape) == 2
        raise HpctrainError(
            f"model.module gives logits of shape {list(logits.shape)} for {shape[0]} "
            + (f"sequences of {shape[1]} tokens" if of_tokens else "samples")
            + (", not [sequences, tokens, vocabulary]" if of_tokens else ", not [samples, classes]")
        )
    return logits
