"""Pool of operands that are used in turn, so that they come from memory as in a step, not from caches."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from hpctrain.comm.group import Group

_ELEMENTS = 24 << 20


class OperandPool:
    """Memory from which operands are taken in turn.

    Args:
        dtype: Format of the operands.
        device: Device of the operands.
        elements: Elements of the largest operand.
        group: Group in whose memory the operands are, like buckets; None for other memory.
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
        """Return the next operand of a shape. After the end, the pool begins again."""
        count = prod(shape)
        if self._next + count > len(self._flat):
            self._next = 0
        operand = self._flat[self._next : self._next + count]
        self._next += -(-count // 64) * 64
        return operand.view(shape)
