"""In the place of a part whose layers cannot be asked: passes on as much, and adds to as many gradients."""

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
    """Computes nothing, for the run's own executor; an objective has so many `figures`."""

    part: ModelPart
    figures: int

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        """See ModelPart; that of the last part is a number."""
        shape = (1,) if self.part.span.has_head else self.hidden_shape(inputs.rows)
        if hidden is None:
            trained = any(parameter.requires_grad for parameter in parameter_list(self.part))
            hidden = torch.zeros((), device=META, requires_grad=trained)
        result: Tensor = _Silent.apply(hidden, self, shape)
        return result

    def predict(self, last: Tensor, compute: object) -> Losses:  # noqa: ARG002
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""
        return Losses(last.sum(), (last.detach().sum(),) * self.figures)

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""
        return self.part.hidden_shape(micro_size)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        return self.part.dtype

    def backward(self) -> None:
        """One addition to each gradient of the part."""
        for layer in reversed(self.part.layers):
            for _, added in layer.backward_order():
                add(added)


class _Silent(torch.autograd.Function):
    """What a part makes, without memory."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, part: SilentPart, shape: tuple[int, ...]) -> Tensor:
        ctx.part, ctx.like = part, (given.shape, given.dtype)
        return torch.empty(shape, dtype=part.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        ctx.part.backward()
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device=META), None, None
