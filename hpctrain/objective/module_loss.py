"""Losses of modules that users bring: cross-entropy of their logits, or a user's own loss function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.data.batches import MicroBatch
from hpctrain.data.items import FieldSpec
from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.module_call import find_logits
from hpctrain.model.modules.tensor_parallel.apply_plan import SplitHead, SplitOutputs
from hpctrain.objective.next_token import CrossEntropy, NextToken
from hpctrain.objective.objective import Losses, LossFunction, Objective
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.vocabulary import chunk_rows
from hpctrain.text import article

_IGNORED = -100
"""Target that torch's cross-entropy ignores."""


class ModuleNextToken(NextToken):
    """NextToken for logits [batch, seq, vocabulary] of a module, computed in fp32.

    The logits are whole, or split over tensor ranks.
    """

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        targets = inputs.fields["targets"]
        return partial(_cross_entropy, targets=targets, scale=scale, z_loss=self.z_loss)


@dataclass(frozen=True)
class ModuleClassification(Objective):
    """Cross-entropy of a module's logits and the classes of a dataset, in nats, computed in fp32.

    Logits are [batch, classes] or [batch, seq, classes]. Targets are [batch] or [batch, seq], negative where
    nothing is predicted.

    Attributes:
        name: Field of the dataset that has the classes.
        z_loss: As in NextToken.
    """

    name: str
    z_loss: float = 0.0
    metrics: ClassVar[tuple[str, ...]] = ("loss",)

    @override
    def count(self, micro_batch: MicroBatch) -> int:
        """Return the number of classes to predict."""
        return int((micro_batch.fields[self.name][: micro_batch.present] >= 0).sum())

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        targets = inputs.fields[self.name].long()
        if inputs.present < inputs.rows:
            targets = targets.clone()
            targets[inputs.present :] = _IGNORED

        def losses(outputs: Any) -> Losses:
            try:
                return _cross_entropy(outputs, targets, scale, self.z_loss)
            except IndexError:
                logits = _require_logits(outputs, targets)
                raise HpctrainError(
                    f"data.dataset: {self.name} must be below the number of logits of model.module, "
                    f"{logits.shape[-1]}, but the largest is {int(targets.max())}"
                ) from None

        return losses


class _SplitLossAutograd(torch.autograd.Function):
    """Sum of losses of a rank's logits [batch, seq, vocabulary / tp].

    The gradient is computed together with the loss, in the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, entropy: CrossEntropy, head: SplitHead, needs_gradient: bool
    ) -> Tensor:
        ctx.save_for_backward(gradient := torch.empty_like(logits, memory_format=torch.contiguous_format))
        rows = gradient.view(-1, gradient.shape[-1])
        rows.copy_(logits.reshape(rows.shape))
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        count = chunk_rows(len(rows), rows.shape[1], not rows.is_cpu)
        for start in range(0, len(rows), count):
            part = slice(start, start + count)
            # The gradient overwrites the copied logits.
            chunk = SplitLogits(rows[part], head.rows)
            losses, _ = entropy.chunk_losses(head, chunk, part, needs_gradient)
            loss += losses.sum()
        return loss

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, None, None, None


@dataclass(frozen=True)
class UserLoss(Objective):
    """Objective that calls a user's loss function.

    The function receives the module's outputs and a batch, whose fields are [batch, ...]. It returns a sum of
    losses and the count that sums of a step are divided by. For token files the fields are `tokens` and
    `targets`, negative where nothing is predicted. The counts are known only after the forward passes. So a
    step first divides by the number of samples, or of tokens to predict, and `normalize` corrects that.

    Attributes:
        function: The user's function.
        of_samples: True to count samples, False to count tokens.
    """

    function: Callable[..., Any]
    of_samples: bool = False
    metrics: ClassVar[tuple[str, ...]] = ("loss", "counted")

    @override
    def count(self, micro_batch: MicroBatch) -> int:
        """Return the number of samples, or of tokens to predict, of a micro-batch."""
        return micro_batch.present if self.of_samples else int((micro_batch.targets >= 0).sum())

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        """Divide `metrics["loss"]` by `metrics["counted"]`, remove the latter, and return it.

        It is the ratio of the samples or tokens that the function counted to those that the loss and the
        gradients are divided by already. The gradients must be divided by it as well.

        Raises:
            HpctrainError: The counts add up to 0, a negative number, or one that is not finite.
        """
        share = metrics.pop("counted")
        if isfinite(metrics["loss"]) and not 0 < share < inf:
            total = "0" if share == 0 else "a negative number" if share < 0 else "a number that is not finite"
            raise HpctrainError(
                f"model.loss: the counts of its function add up to {total} over a step or an evaluation "
                "(return the number of samples or tokens that the sum contains)"
            )
        metrics["loss"] /= share or 1.0
        return share or 1.0

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        batch = {name: field.contiguous() for name, field in inputs.fields.items()}
        # A micro-batch without samples has one padding row, so that this rank joins all collectives. It does
        # not count.
        weight = 0.0 if self.of_samples and not inputs.present else 1.0

        def losses(outputs: Any) -> Losses:
            with run_user_code("model.loss fails"):
                result = self.function(outputs, batch)
            total, count = _sum_and_count(result)
            loss, weighted_count = total.float() * weight, count * weight
            return Losses(loss * scale, (loss.detach(), weighted_count))

        return losses


def _sum_and_count(result: Any) -> tuple[Tensor, Tensor]:
    """Return the sum and the count in the result of a user's loss function, 0-dim, without a device wait."""
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise HpctrainError("model.loss: its function must return a sum, which is a tensor, and a count")
    total, given_count = result
    if total.dim():
        shape = list(total.shape)
        raise HpctrainError(
            f"model.loss: its function must return a sum, not losses of shape {shape} (use .sum())"
        )
    if total.is_complex():
        raise HpctrainError("model.loss: its function must return a real sum, not a complex one")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise HpctrainError(
            "model.loss: the sum of its function has no gradient, because it does not depend on the "
            "outputs of the module (check for .detach(), .item() and torch.no_grad())"
        )
    try:
        count = torch.as_tensor(given_count, device=total.device).detach()
    except (TypeError, ValueError, RuntimeError):
        kind = article(type(given_count).__name__)
        raise HpctrainError(
            f"model.loss: its function must return a number as the count, not {kind}"
        ) from None
    if count.numel() != 1 or count.is_complex():
        form = FieldSpec.of(count)
        raise HpctrainError(f"model.loss: its function must return one number as the count, not {form}")
    return total, count.reshape(())


def _cross_entropy(outputs: Any, targets: Tensor, scale: Tensor, z_loss: float) -> Losses:
    """Return the losses of logits [..., classes], whole or split over tensor ranks, and targets [...].

    Negative targets are left out.
    """
    if isinstance(outputs, SplitOutputs):
        logits = _require_split(outputs, targets)
        entropy = CrossEntropy(targets.contiguous(), scale, z_loss)
        loss = _SplitLossAutograd.apply(logits, entropy, outputs.head, logits.requires_grad)
        return Losses(loss, (loss.detach(),))
    logits = _require_logits(outputs, targets)
    rows, flat_targets = logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    ignored = flat_targets < 0
    classes = flat_targets.masked_fill(ignored, _IGNORED)
    loss = functional.cross_entropy(rows, classes, ignore_index=_IGNORED, reduction="sum")
    total = loss * scale
    if z_loss:
        squares = rows.logsumexp(-1).square().masked_fill(ignored, 0.0)
        total = total + z_loss * squares.sum() * scale
    return Losses(total, (loss.detach(),))


def _require_logits(outputs: Any, targets: Tensor) -> Tensor:
    """Return the logits among the outputs of a module, after checking that there is a row for each target."""
    logits, shape = find_logits(outputs), targets.shape
    if logits is None:
        kind = type(outputs).__name__
        raise HpctrainError(f"model.module: returns {kind} without logits (set model.loss)")
    if logits.dim() != len(shape) + 1 or logits.shape[:-1] != shape:
        per_token = len(shape) == 2
        raise HpctrainError(
            f"model.module: returns logits of shape {list(logits.shape)} for {shape[0]} "
            + (f"sequences of {shape[1]} tokens" if per_token else "samples")
            + (", not [sequences, tokens, vocabulary]" if per_token else ", not [samples, classes]")
        )
    return logits


def _require_split(outputs: SplitOutputs, targets: Tensor) -> Tensor:
    logits, table = _require_logits(outputs.outputs, targets), outputs.head.table
    if logits.shape[-1] != table.shape[0]:
        raise HpctrainError(
            f"model.module: returns {logits.shape[-1]} logits per token, but the output layer "
            f'{table.shard.name} with the style "vocabulary" computes {table.shape[0]} on a rank (return '
            "them unchanged)"
        )
    return logits
