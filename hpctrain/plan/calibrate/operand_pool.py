"""Memory of which operands are taken in turns, so that they come from there as in a step, not from caches."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from hpctrain.comm.group import Group

_ELEMENTS = 24 << 20


class OperandPool:
    """Numbers of a format on a device: at least as many as the largest operand has `elements`. Those of a
    `group` lie where buckets do.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, elements: int, group: Group | None = None
    ) -> None:
        size = max(elements, min(_ELEMENTS, 24 * elements))
        generator = torch.Generator(device).manual_seed(0)
        if group is None:
            self._flat = torch.empty(size, dtype=dtype, device=device)
        else:
            self._flat = group.empty((size,), dtype)
        self._flat.normal_(std=0.02, generator=generator)
        self._next = 0

    def take(self, *shape: int) -> Tensor:
        """The next ones, of this shape; from the beginning again where no more are left."""
        count = prod(shape)
        if self._next + count > len(self._flat):
            self._next = 0
        taken = self._flat[self._next : self._next + count]
        self._next += -(-count // 64) * 64
        return taken.view(shape)
