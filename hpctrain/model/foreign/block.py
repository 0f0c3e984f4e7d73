"""How a block of a module runs: gathered, perhaps computed again in backward, and so that neither changes
what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.model.foreign.architecture import kept_buffers
from hpctrain.model.foreign.arguments import tensors_of
from hpctrain.model.foreign.buffers import changed_once
from hpctrain.model.foreign.layers import ModuleLayer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency


class RunningBlock:
    """Runs in the place of a block's forward method, whose parameters are those of a layer.

    HpctrainError where the block changes what it was given, and that is needed as it was.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        layer: ModuleLayer,
        groups: LayerContext,
        residency: Callable[[], ParameterResidency],
    ) -> None:
        self.name, self.block, self.layer, self.groups = name, block, layer, groups
        self.residency, self.forward = residency, block.forward
        self.buffers = [*kept_buffers(block)] if groups.saved_policy.repeats else []

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the block gives."""
        inputs, policy = list(tensors_of((given, named))), self.groups.saved_policy
        once = changed_once(self.block, self.buffers, self.forward)
        compute = partial(policy.call, partial(self._apart, once), *given, **named)
        residency = self.residency()
        needed = torch.is_grad_enabled() and (policy.repeats or residency.gathers)
        versions = _versions(inputs) if needed else []
        if self.layer.own:
            result = residency.surround(self.layer.own[0], compute, inputs, tensors_of)
        else:
            result = compute()
        if needed and _versions(inputs) != versions:
            why = 'memory.recompute = "full"' if policy.repeats else "layout.zero = 3"
            raise HpctrainError(
                f"{self.name}: changes its input in place, which conflicts with {why} (use x = x + y "
                "instead of x += y)"
            )
        return result

    def _apart(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What it gives, perhaps in the midst of a backward pass."""
        with self.groups.weight_gradients.apart():
            return forward(*given, **named)


def _versions(tensors: list[Tensor]) -> list[int]:
    """How many times each was changed in place."""
    return [tensor._version for tensor in tensors]
