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

    A piece may end with padding, along any dim. Padding is zero and never stored in files. There are two
    kinds:

    - The piece extends beyond the end of the global tensor, such as the last rows of a vocabulary that tensor
      ranks do not divide. `shape` and `start` tell how much padding there is.
    - Ranks have different numbers of rows or columns, such as those of heads (`HeadSplit`), and this piece is
      padded to the size of the largest one. `unpadded_local` tells how much padding there is. In the global
      tensor, the next piece begins at `start` + `unpadded_local`, not at `start` + `local`.

    Attributes:
        name: Name of the tensor.
        shape: Global shape.
        start: Index in the global tensor of the first element of the piece.
        local: Shape of the piece, with padding.
        split: Mesh axes that split the tensor. Over every other axis the piece is replicated.
        partial: Axes besides data and context over which gradients are partial and must be summed, although
            the parameter is replicated there, such as norms under sequence parallelism.
        holder_counts: For each piece, in their order, the number of neighboring ranks along the split axes
            that hold it. Several tensor ranks hold the same key/value head if there are more ranks than such
            heads. It is empty if each piece is on one rank.
        stage_copy: Number of this pipeline stage among those that hold the piece. Two stages hold the table
            of the embedding if embeddings are tied, or for multi-token prediction.
        stage_copies: Number of pipeline stages that hold the piece.
        unit: Rows that belong together, such as those of one head of queries or keys.
        zero_exempt: True if ZeRO does not split the tensor where it splits parameters, because it is small.
        unpadded_local: Shape of the piece before it is padded to the size of the largest one; None if ranks
            split the tensor evenly.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: tuple[int, ...]
    split: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    holder_counts: tuple[int, ...] = ()
    stage_copy: int = 0
    stage_copies: int = 1
    unit: int = 1
    zero_exempt: bool = False
    unpadded_local: tuple[int, ...] | None = None

    @staticmethod
    def replicated(name: str, shape: tuple[int, ...], partial: frozenset[str] = frozenset()) -> Shard:
        """Return the shard of a tensor that every rank holds completely."""
        return Shard(name, shape, (0,) * len(shape), shape, partial=partial)

    def stacked(self, number: int, count: int) -> Shard:
        """Return the shard of tensor `number` of `count` different ones, stacked along a new first dim."""
        start, local = (number, *self.start), (1, *self.local)
        unpadded = None if self.unpadded_local is None else (1, *self.unpadded_local)
        return replace(self, shape=(count, *self.shape), start=start, local=local, unpadded_local=unpadded)

    @property
    def unstacked(self) -> Shard:
        """Shard of one of the tensors that `stacked` has stacked."""
        shape, start, local = self.shape[1:], self.start[1:], self.local[1:]
        unpadded = None if self.unpadded_local is None else self.unpadded_local[1:]
        return replace(self, shape=shape, start=start, local=local, unpadded_local=unpadded)

    @property
    def elements(self) -> int:
        """Number of elements of the local piece, with padding."""
        return prod(self.local)

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the local piece without its padding."""
        sizes = zip(self.unpadded_local or self.local, self.shape, self.start, strict=True)
        return tuple(max(0, min(local, total - start)) for local, total, start in sizes)

    @property
    def elements_of_real_rows(self) -> int:
        """Number of elements of the local rows (dim 0) that are not padding, with the padding inside them."""
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

    def clear_padding(self, local_tensor: Tensor) -> None:
        """Set the padding of a local tensor, such as a gradient, to zero in place.

        Padding of a gradient is not always zero. If several ranks hold the same key/value head, padding query
        heads attend to it. Their queries are zero, but their output is not: it is the mean of the values. So
        the padding of the output layer's weight gets a gradient.
        """
        for dim, (size, local) in enumerate(zip(self.extent, self.local, strict=True)):
            if size < local:
                local_tensor.narrow(dim, size, local - size).zero_()


@dataclass(frozen=True)
class Partition:
    """Range of the indices of one dim that one rank holds.

    The indices are heads, output features (rows), input features (columns) or experts. `split_shard` makes a
    Shard of the partitions of all dims.

    Attributes:
        size: Number of indices of all ranks.
        start: First index of this rank.
        local: Number of indices of this rank, with padding.
        holder_counts: Number of neighboring ranks with each range, as in `Shard.holder_counts`.
        unit: Number of features that are not split, such as those of a head, as in `Shard.unit`.
        unpadded_local: Number of indices of this rank without padding; None if ranks split the dim evenly.
    """

    size: int
    start: int
    local: int
    holder_counts: tuple[int, ...] = ()
    unit: int = 1
    unpadded_local: int | None = None

    @property
    def unpadded(self) -> int:
        """Number of indices of this rank without padding."""
        return self.local if self.unpadded_local is None else self.unpadded_local

    @staticmethod
    def split(size: int, group: Group, unit: int = 1) -> Partition:
        """Return this rank's range of `size` features, in whole units (heads).

        With fewer units than ranks, neighbors have the same unit (`holder_counts`). The number of units must
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
        """Return this rank's partition of query heads, and that of key/value heads.

        `HeadSplit` describes how ranks split heads.

        Args:
            heads: Number of query heads of the model.
            key_value_heads: Number of key/value heads of the model.
            group: Tensor ranks.
        """
        split, rank = HeadSplit.of(heads, key_value_heads, group.size), group.rank
        local, local_key_values = split.padded_heads
        queries = Partition(heads, split.first_query_heads[rank], local)
        first = split.first_key_value_heads[rank]
        key_values = Partition(key_value_heads, first, local_key_values, split.holder_counts)
        if split.is_even:
            return queries, key_values
        return (
            replace(queries, unpadded_local=split.query_heads[rank]),
            replace(key_values, unpadded_local=split.key_value_heads[rank]),
        )

    def times(self, features: int) -> Partition:
        """Return the partition of the features of heads, if this is one of heads; `unit` stays the same.

        Args:
            features: Number of features of a head.
        """
        return replace(
            self,
            size=self.size * features,
            start=self.start * features,
            local=self.local * features,
            unpadded_local=None if self.unpadded_local is None else self.unpadded_local * features,
        )


def split_shard(name: str, *dims: int | Partition, axes: frozenset[str] = frozenset({"tensor"})) -> Shard:
    """Return the shard of a tensor that ranks split.

    Args:
        name: Name of the tensor.
        dims: Partition of each dim, or its size if it is not split. At most one partition has
            `holder_counts`, and at most one has a `unit`.
        axes: Mesh axes whose ranks split the tensor.
    """
    partitions = [Partition(each, 0, each) if isinstance(each, int) else each for each in dims]
    holder_counts = next((each.holder_counts for each in partitions if each.holder_counts), ())
    is_padded = any(each.unpadded_local is not None for each in partitions)
    return Shard(
        name,
        tuple(each.size for each in partitions),
        tuple(each.start for each in partitions),
        tuple(each.local for each in partitions),
        split=axes,
        partial=axes if holder_counts else frozenset(),
        holder_counts=holder_counts,
        unit=prod(each.unit for each in partitions),
        unpadded_local=tuple(each.unpadded for each in partitions) if is_padded else None,
    )


def piece_and_position(holder_counts: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the number of the piece that a rank holds, and its position among the ranks that hold it.

    Example: with `holder_counts` of (2, 1), rank 1 holds piece 0, and has position 1 there.

    Args:
        holder_counts: Number of ranks that hold each piece; empty if each piece is on one rank.
        rank: Number of the rank along the axis that splits the tensor.
    """
    piece = 0
    while holder_counts and rank >= holder_counts[piece]:
        rank -= holder_counts[piece]
        piece += 1
    return (piece, rank) if holder_counts else (rank, 0)


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
