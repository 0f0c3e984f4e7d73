"""The losses of a module that users bring: of its logits, or by a function of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.data.batches import MicroBatch
from hpctrain.errors import HpctrainError
from hpctrain.model.foreign.arguments import logits_of
from hpctrain.model.foreign.find import find_function, users_code
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
            logits = _require_logits(outputs, targets.shape).float().flatten(0, 1)
            wanted = targets.reshape(-1)
            silent = wanted < 0
            of_tokens = wanted.masked_fill(silent, _IGNORED)
            loss = functional.cross_entropy(logits, of_tokens, ignore_index=_IGNORED, reduction="sum")
            total = loss * scale
            if self.z_loss:
                squares = logits.logsumexp(-1).square().masked_fill(silent, 0.0)
                total = total + self.z_loss * squares.sum() * scale
            return Losses(total, (loss.detach(),))

        return losses


@dataclass(frozen=True)
class UsersLoss:
    """What `function` makes of outputs and a batch, its `tokens` and `targets` [b, s], negative where there
    is none: a sum, and the count that a step's sums are divided by.
    """

    function: Callable[..., Any]
    figures: ClassVar[tuple[str, ...]] = ("loss", "counted")

    def count(self, micro_batch: MicroBatch) -> int:
        """Tokens to be predicted, by which sums are divided until the real count is known."""
        return int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:
        """See Objective: how many were counted for each of the tokens to be predicted."""
        share = figures.pop("counted") or 1.0
        figures["loss"] /= share
        return share

    def losses(self, inputs: Inputs, scale: Tensor) -> LossOf:
        """See Objective."""
        batch = {name: field.contiguous() for name, field in inputs.fields.items()}

        def losses(outputs: Any) -> Losses:
            with users_code("model.loss fails"):
                made = self.function(outputs, batch)
            if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], Tensor):
                raise HpctrainError(
                    "model.loss: its function must give a sum, which is a tensor, and a count"
                )
            loss = made[0].float()
            counted = torch.as_tensor(made[1], device=loss.device).detach().reshape(())
            return Losses(loss * scale, (loss.detach(), counted))

        return losses


def users_loss(target: str) -> UsersLoss:
    """The objective by the function that a target names; errors as in `find_function`."""
    return UsersLoss(find_function(target))


def _require_logits(outputs: Any, shape: torch.Size) -> Tensor:
    logits = logits_of(outputs)
    if logits is None:
        kind = type(outputs).__name__
        raise HpctrainError(f"model.module gives {kind} without logits (model.loss names a loss of its own)")
    if logits.dim() != 3 or logits.shape[:2] != shape:
        raise HpctrainError(
            f"model.module gives logits of shape {list(logits.shape)} for {shape[0]} sequences of {shape[1]} "
            "tokens, not [sequences, tokens, vocabulary]"
        )
    return logits
