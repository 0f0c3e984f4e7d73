"""Replacement of a model part that cannot run on the meta device, for plans of traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.planned import META
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.objective.objective import Losses
from hpctrain.plan.step_on_meta import add


@dataclass
class SilentPart:
    """Model part that computes nothing, and has the gradients and output shapes of the original part.

    The pipeline executor of the run can execute it.

    Attributes:
        part: The original part.
        metrics: Number of metrics of the objective.
    """

    part: ModelPart
    metrics: int

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        """Return the hidden states without values; for the last part, one number."""
        shape = (1,) if self.part.span.has_head else self.hidden_shape(inputs.rows)
        if hidden is None:
            trained = any(parameter.requires_grad for parameter in parameter_list(self.part))
            hidden = torch.zeros((), device=META, requires_grad=trained)
        result: Tensor = _Silent.apply(hidden, self, shape)
        return result

    def predict(self, last: Tensor, compute: object) -> Losses:  # noqa: ARG002
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""
        return Losses(last.sum(), (last.detach().sum(),) * self.metrics)

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""
        return self.part.hidden_shape(micro_size)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        return self.part.dtype

    def backward(self) -> None:
        """Add once to each gradient of the part."""
        for layer in reversed(self.part.layers):
            for _, added in layer.backward_order():
                add(added)


class _Silent(torch.autograd.Function):
    """Autograd function that returns the output of a part without values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: SilentPart, shape: tuple[int, ...]) -> Tensor:
        ctx.part, ctx.input_form = part, (hidden.shape, hidden.dtype)
        return torch.empty(shape, dtype=part.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        ctx.part.backward()
        shape, dtype = ctx.input_form
        return torch.empty(shape, dtype=dtype, device=META), None, None
