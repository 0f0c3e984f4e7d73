"""Place of a local tensor in the global one.

A Shard is the single source for initialization, gradient synchronization, ZeRO, checkpoints, conversion and
verification: nothing else guesses names or shapes. For example, a query matrix of 8 heads with 64 features
each, split over 2 tensor ranks, has on rank 1 this shard:

    Shard("blocks.0.attention.query.weight", shape=(512, 512), start=(256, 0), local=(256, 512),
          split=frozenset({"tensor"}), unit=64)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.deck.head_split import HeadSplit

Initial = Literal["normal", "residual", "table", "router", "adapter", "ones", "zeros"]
"""Initial values of a parameter by its role.

"residual" is a normal weight at the end of a residual branch, "table" a weight with a row for each token or
position, or that of a scalar head, "router" one with a row for each expert, and "adapter" the first factor of
a low-rank adapter.
"""


@dataclass(frozen=True)
class Shard:
    """One rank's rectangular piece of a global tensor.

    Attributes:
        name: Name of the tensor.
        shape: Global shape.
        start: Index in the global tensor of the first element of the piece.
        local: Shape of the piece. It may extend beyond `shape`, or beyond `used`; the part beyond is padding,
            which is zero and never stored.
        split: Mesh axes that split the tensor. Over every other axis the piece is replicated.
        partial: Axes besides data and context over which gradients are partial and must be summed, although
            the parameter is replicated there, such as norms under sequence parallelism.
        holders: Number of neighbors along the split axes that hold each piece, in the order of pieces. An
            example are key and value heads that several tensor ranks share. It is empty if each piece is on
            one rank.
        stage_copy: Number of this pipeline stage among those that hold the piece. Two stages hold the table
            of the embedding if embeddings are tied, or for multi-token prediction.
        stage_copies: Number of pipeline stages that hold the piece.
        unit: Rows that belong together, such as those of one head of queries or keys.
        zero_exempt: True if ZeRO does not split the tensor where it splits parameters, because it is small.
        used: Shape of the piece without padding that other ranks hold, such as heads that only fill up the
            piece of a rank with fewer heads; None if there is no such padding on any rank.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: tuple[int, ...]
    split: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    holders: tuple[int, ...] = ()
    stage_copy: int = 0
    stage_copies: int = 1
    unit: int = 1
    zero_exempt: bool = False
    used: tuple[int, ...] | None = None

    @staticmethod
    def replicated(name: str, shape: tuple[int, ...], partial: frozenset[str] = frozenset()) -> Shard:
        """Return the shard of a tensor that every rank holds completely."""
        return Shard(name, shape, (0,) * len(shape), shape, partial=partial)

    def stacked(self, number: int, count: int) -> Shard:
        """Return the shard of tensor `number` of `count` different ones, stacked along a new first dim."""
        start, local = (number, *self.start), (1, *self.local)
        used = None if self.used is None else (1, *self.used)
        return replace(self, shape=(count, *self.shape), start=start, local=local, used=used)

    @property
    def unstacked(self) -> Shard:
        """Shard of one of the tensors that `stacked` has stacked."""
        used = None if self.used is None else self.used[1:]
        return replace(self, shape=self.shape[1:], start=self.start[1:], local=self.local[1:], used=used)

    @property
    def elements(self) -> int:
        """Number of elements of the local piece, with padding."""
        return prod(self.local)

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the local piece without its padding."""
        return tuple(
            max(0, min(local, total - start))
            for local, total, start in zip(self.used or self.local, self.shape, self.start, strict=True)
        )

    @property
    def elements_of_rows(self) -> int:
        """Number of elements of the local piece without the padding that follows its last row."""
        return prod(self.extent[:1]) * prod(self.local[1:])

    @property
    def is_longer(self) -> bool:
        """True if the piece is longer than the global tensor, such as a small table that GPUs pad."""
        return any(local > total for local, total in zip(self.local, self.shape, strict=True))

    @property
    def clipped_local(self) -> tuple[int, ...]:
        """Shape of the local piece, without its padding if it is longer than the global tensor."""
        return self.extent if self.is_longer else self.local

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the piece, without padding, in the global tensor."""
        return tuple(
            slice(start, start + extent) for start, extent in zip(self.start, self.extent, strict=True)
        )

    def take(self, global_tensor: Tensor) -> Tensor:
        """Return a copy of this rank's piece of a global tensor, padded with zeros to `local`."""
        assert tuple(global_tensor.shape) == self.shape, (self.name, tuple(global_tensor.shape), self.shape)
        piece = global_tensor[self.slices]
        if self.extent == self.local:
            return piece.clone()
        padded = global_tensor.new_zeros(self.local)
        padded[tuple(slice(0, n) for n in self.extent)] = piece
        return padded

    def zero_padding(self, local_tensor: Tensor) -> None:
        """Set the padding of a local piece to zero, such as the gradient of heads that only fill up a rank.

        The output layer gets such a gradient if several ranks hold the same key/value head: their padding
        queries attend to it.
        """
        for dim, (size, local) in enumerate(zip(self.extent, self.local, strict=True)):
            if size < local:
                local_tensor.narrow(dim, size, local - size).zero_()


@dataclass(frozen=True)
class Partition:
    """Indices `start` to `start + local` of a dim of size `size`, which one rank holds.

    It is a range of output features (rows), of input features (columns) or of experts. `split_shard` makes a
    Shard of partitions.

    Attributes:
        size: Global number of features (or experts).
        start: First one of this rank.
        local: Number of those of this rank, with padding.
        holders: Number of neighbors with each range, if there are fewer heads than ranks, as for
            `Shard.holders`.
        unit: Number of features that are not split, such as those of a head, as for `Shard.unit`.
        used: Number of those of this rank without padding, as for `Shard.used`; None if no rank has padding.
    """

    size: int
    start: int
    local: int
    holders: tuple[int, ...] = ()
    unit: int = 1
    used: int | None = None

    @staticmethod
    def split(size: int, group: Group, unit: int = 1) -> Partition:
        """Return this rank's range of `size` features, in whole units (heads).

        With fewer units than ranks, neighbors have the same unit (`holders`). The number of units must
        divide that of ranks, or the other way round.
        """
        units, ranks = size // unit, group.size
        if units % ranks == 0:
            local = size // ranks
            return Partition(size, group.rank * local, local)
        assert ranks % units == 0, (size, unit, ranks)
        replicas = ranks // units
        return Partition(size, group.rank // replicas * unit, unit, (replicas,) * units)

    @staticmethod
    def of_heads(heads: int, key_value_heads: int, group: Group) -> tuple[Partition, Partition]:
        """Return this rank's range of heads of queries, and of key/value heads, as a HeadSplit says."""
        split, rank = HeadSplit.of(heads, key_value_heads, group.size), group.rank
        queries, key_values = split.padded
        used = (None, None) if split.is_even else (split.queries[rank], split.key_values[rank])
        return (
            Partition(heads, split.first_queries[rank], queries, used=used[0]),
            Partition(key_value_heads, split.first_key_values[rank], key_values, split.holders, used=used[1]),
        )

    def times(self, features: int) -> Partition:
        """Return the range of features, if each index of this one stands for `features` neighboring ones."""
        return replace(
            self,
            size=self.size * features,
            start=self.start * features,
            local=self.local * features,
            used=None if self.used is None else self.used * features,
        )


def split_shard(name: str, *dims: int | Partition, axes: frozenset[str] = frozenset({"tensor"})) -> Shard:
    """Return the shard of a tensor that ranks split.

    Args:
        name: Name of the tensor.
        dims: Partition of each dim, or its size if it is not split. At most one has holders or a unit.
        axes: Mesh axes whose ranks split the tensor.
    """
    partitions = [Partition(each, 0, each) if isinstance(each, int) else each for each in dims]
    holders = next((each.holders for each in partitions if each.holders), ())
    is_padded = any(each.used is not None for each in partitions)
    return Shard(
        name,
        tuple(each.size for each in partitions),
        tuple(each.start for each in partitions),
        tuple(each.local for each in partitions),
        split=axes,
        partial=axes if holders else frozenset(),
        holders=holders,
        unit=prod(each.unit for each in partitions),
        used=tuple(each.used or each.local for each in partitions) if is_padded else None,
    )


def position_among_holders(holders: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the number of the piece that a rank holds, and the number of the rank among its holders.

    Args:
        holders: Number of holders of each piece; empty if each piece is on one rank.
        rank: Number of the rank along the axis that splits the tensor.
    """
    piece = 0
    while holders and rank >= holders[piece]:
        rank -= holders[piece]
        piece += 1
    return (piece, rank) if holders else (rank, 0)


class UpdateSettings(NamedTuple):
    """Settings with which the optimizer updates elements.

    Attributes:
        has_weight_decay: True if weight decay applies. It uses the learning rate without the factor.
        learning_rate_factor: Factor of the learning rate.
        in_blocks: True if elements are updated in blocks (`UpdateBlock`).
    """

    has_weight_decay: bool = True
    learning_rate_factor: float = 1.0
    in_blocks: bool = False


class UpdateBlock(NamedTuple):
    """Part of a parameter that is updated as one, because its elements depend on each other.

    Attributes:
        shape: Global shape, with as many dims as the parameter: 1 in leading dims, then any size in one dim,
            then the parameter's own sizes.
        work: FLOPs of its update.
    """

    shape: tuple[int, ...]
    work: float

    def elements(self, shard: Shard) -> int:
        """Return the number of elements of one block in a local piece."""
        return prod(self.local(shard))

    def local(self, shard: Shard) -> tuple[int, ...]:
        """Return the shape of one block in a local piece."""
        return tuple(min(size, local) for size, local in zip(self.shape, shard.local, strict=True))


class Parameter(nn.Parameter):
    """Model parameter with its Shard and its gradient buffer.

    It is created without memory; its bucket provides some. Every backward pass adds to the gradient buffer.
    A layer that adds without autograd, such as a linear layer, calls `mark_gradient_added` afterwards; for
    all others a hook does.

    Attributes:
        shard: Place in the global tensor.
        has_weight_decay: True if weight decay applies.
        initial: Initial values.
        learning_rate_factor: Factor of the learning rate.
        update_block: Part that is updated as one. None if each element is updated by itself.
        uses: Number of additions to the gradient in the backward pass of one micro-batch.
        separate_lookups: Number of further buffers of a table that two parts of a rank use. The schedule
            decides which part adds first. So each lookup adds to its own buffer, and `Bucket.merge_lookups`
            sums them at the end.
        lookup_gradients: These further buffers, which its bucket provides. Layer n of those that look up rows
            adds to number n, or to `gradient` if there are not as many.
        open_gradient: Allocates the gradient buffer if it exists only while it is used.
        on_gradient_added: Called with the parameter after each addition.
    """

    shard: Shard
    has_weight_decay: bool
    initial: Initial
    learning_rate_factor: float = 1.0
    update_block: UpdateBlock | None = None
    uses: int = 1
    separate_lookups: int = 0
    lookup_gradients: tuple[Tensor, ...] = ()
    open_gradient: Callable[[], None] | None = None
    on_gradient_added: Callable[[Parameter], None] | None = None
    _gradient: Tensor | None = None
    _stale: bool = False

    def __new__(  # noqa: D102
        cls, shard: Shard, has_weight_decay: bool = True, initial: Initial = "normal"
    ) -> Parameter:
        # One element, expanded to the shape, without memory for the others.
        data = torch.empty(()).expand(shard.local)
        self: Parameter = super().__new__(cls, data, requires_grad=True)
        self.shard, self.has_weight_decay, self.initial = shard, has_weight_decay, initial
        return self

    @property
    def update_settings(self) -> UpdateSettings:
        """Settings with which the optimizer updates the parameter."""
        return UpdateSettings(self.has_weight_decay, self.learning_rate_factor, self.update_block is not None)

    @property
    def gradient(self) -> Tensor | None:
        """Gradient buffer of the parameter's shape, to add to. It is allocated first if necessary."""
        buffer = self._buffer()
        if self._stale and buffer is not None:
            buffer.zero_()
            self._stale = False
        return buffer

    @gradient.setter
    def gradient(self, buffer: Tensor | None) -> None:
        self._gradient = buffer

    def zero_stale_gradient(self) -> None:
        """Fill the buffer with zeros if nothing was added since `reset_gradient`."""
        if self._stale:
            _ = self.gradient  # the property fills a stale buffer with zeros

    def reset_gradient(self) -> None:
        """Make the gradient zero. The buffer is zeroed or overwritten at the next addition."""
        self._stale = True

    def gradient_to_overwrite(self) -> Tensor | None:
        """Return the buffer if nothing was added since `reset_gradient`; the caller must overwrite it.

        Returns:
            The buffer, or None if the caller must add to `gradient`.
        """
        buffer = self._buffer()
        if buffer is None or not self._stale:
            return None
        self._stale = False
        return buffer

    def _buffer(self) -> Tensor | None:
        if self._gradient is None and self.open_gradient is not None:
            self.open_gradient()
        return self._gradient

    def mark_gradient_added(self) -> None:
        """Report that one addition to the gradient is complete."""
        if self.on_gradient_added is not None:
            self.on_gradient_added(self)


def gradient_of(parameter: Parameter) -> Tensor:
    """Return the gradient buffer of a parameter, which must exist, to add to."""
    gradient = parameter.gradient
    assert gradient is not None, f"{parameter.shard.name} has no gradient buffer"
    return gradient


def gradients_to_update(parameters: Sequence[Parameter]) -> tuple[list[Tensor], bool]:
    """Return the gradient buffers of parameters that one product adds to, and whether to overwrite them.

    They must be overwritten if nothing was added since `Parameter.reset_gradient`.
    """
    stale = [buffer for each in parameters if (buffer := each.gradient_to_overwrite()) is not None]
    assert len(stale) in {0, len(parameters)}, "fused weights have their gradients added together"
    return stale or [gradient_of(each) for each in parameters], bool(stale)
