"""Autograd functions where no gradient is asked, as text is generated or a model is evaluated."""

from __future__ import annotations

from typing import Any

import torch


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What `function.apply` gives; without gradients by its forward pass alone, which takes a few us and not
    twenty. That may do no more with its context than to save tensors and set attributes.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Nothing(), *arguments)


class _Nothing:
    """A context that keeps no tensor."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """For a pass that is never asked for."""
