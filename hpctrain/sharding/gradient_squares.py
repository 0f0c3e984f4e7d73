"""Square sums of gradients before they are reduced, for the gradient noise scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hpctrain.host.device import on_host
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket

_PIECE = 1 << 16
"""Number of elements that a CPU squares in fp64 at a time: few enough for the cache."""

_ROWS = 1024
"""Number of rows of an embedding table that are added at a time."""


def square_sum(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares, fp64 0-dim, of flat gradients on the device. Local.

    It is computed in fp64, so that the result in single precision does not depend on how gradients are split.
    """
    pieces = list(gradients)
    if pieces and not on_host(device):
        return torch.stack(torch._foreach_norm(pieces, 2, torch.float64)).square().sum()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for elements in pieces:
        for piece in elements.split(_PIECE):
            squares = piece.double()
            total += torch.dot(squares, squares)
    return total


def local_square_sum(bucket: Bucket, gradients: Tensor) -> Tensor:
    """Return what this rank adds to the square norm of unreduced gradients over all ranks, fp64 0-dim. Local.

    Ranks with different tokens have different gradients, and each adds its own. Tensor ranks with the same
    piece, and stages that hold the same tensor, have the same gradient, and only the first of them adds it.

    Args:
        bucket: The bucket.
        gradients: Its gradients before they are reduced, flat [length].
    """
    other_tokens = bucket.sharding.group, bucket.sharding.replicas
    local = (
        elements
        for segment, elements, _ in bucket.segments_within(gradients, slice(0, bucket.length))
        if segment.parameter.requires_grad
        and segment.replication.holder_position(False, *other_tokens)[0] == 0
    )
    return square_sum(local, gradients.device)


class FirstMicroBatchNorm:
    """Square sum of the gradients of a step's first micro-batch.

    It is for a rank that has all tokens and the whole model. Each parameter is added when its gradient is
    complete, before the next micro-batch adds to it.

    Attributes:
        squares: The sum, fp64 0-dim.
    """

    def __init__(self, device: torch.device) -> None:
        self.squares = square_sum((), device)
        self._additions: dict[Parameter, int] = {}

    def begin(self) -> None:
        """Begin a step."""
        self.squares = torch.zeros_like(self.squares)
        self._additions.clear()

    def count_addition(self, parameter: Parameter) -> None:
        """Record one addition to a parameter's gradient; after the last one, add its square sum to `squares`.

        The last one is addition number `parameter.uses` of the micro-batch. Then the gradient is complete.
        """
        additions = self._additions[parameter] = self._additions.get(parameter, 0) + 1
        gradient, lookups = parameter.gradient, parameter.lookup_gradients
        assert gradient is not None
        if additions != parameter.uses or gradient.is_meta:
            return
        if not lookups:
            self.squares += square_sum([gradient.flatten()], gradient.device)
            return
        for pieces in zip(*(each.split(_ROWS) for each in (gradient, *lookups)), strict=True):
            self.squares += square_sum([sum(pieces[1:], pieces[0]).flatten()], gradient.device)
