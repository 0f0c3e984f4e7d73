"""Where one tensor's piece lies in the global logical tensor.

A Shard is the single source for initialization, gradient synchronization, ZeRO, checkpoints,
conversion and verification: nothing else guesses names or shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Initial = Literal["normal", "residual", "table", "router", "adapter", "ones", "zeros"]
"""How a parameter starts, by its role: "residual" is a normal weight that ends a residual branch, "table" one
with a row for each token or position, or that of a scalar head, "router" one with a row for each expert,
"adapter" the first factor of a low-rank one.
"""


@dataclass(frozen=True)
class Shard:
    """One rank's rectangular piece of a global tensor.

    `shape` is the global logical shape. The piece starts at index `start` and has shape `local`,
    which may reach beyond `shape`: what lies beyond is padding, is zero and is never stored.
    `split` names the mesh axes that cut the tensor; over every other axis the piece is replicated.
    `partial` names the axes besides data and context over which the gradient arrives in parts that
    must be summed, although the parameter itself is replicated there (the norms under sequence
    parallelism, key/value heads shared by several tensor ranks).
    `copies` is how many neighbours along the split axes hold this same piece; `stage_copy` and
    `stage_copies` number the pipeline stages that do (tied embeddings, on the first and the last one).
    `unit` are its rows that act together on what a layer computes: those of one head of queries or keys.
    With `stays` ZeRO does not cut it where it cuts parameters: it is small.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local: tuple[int, ...]
    split: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    copies: int = 1
    stage_copy: int = 0
    stage_copies: int = 1
    unit: int = 1
    zero_exempt: bool = False

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], partial: frozenset[str] = frozenset()) -> Shard:
        """The Shard of a tensor that every rank holds whole."""
        return Shard(name, shape, (0,) * len(shape), shape, partial=partial)

    def stacked(self, number: int, count: int) -> Shard:
        """The Shard of number `number` of `count` such tensors that differ, which lie behind each other."""
        start, local = (number, *self.start), (1, *self.local)
        return replace(self, shape=(count, *self.shape), start=start, local=local)

    @property
    def unstacked(self) -> Shard:
        """The Shard of one of those."""
        return replace(self, shape=self.shape[1:], start=self.start[1:], local=self.local[1:])

    @property
    def elements(self) -> int:
        """Elements of the local piece, padding included."""
        return prod(self.local)

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the local piece without its padding."""
        return tuple(
            max(0, min(local, total - start))
            for local, total, start in zip(self.local, self.shape, self.start, strict=True)
        )

    @property
    def is_longer(self) -> bool:
        """Whether a piece is longer than the whole, as of a small table that GPUs fill up."""
        return any(local > total for local, total in zip(self.local, self.shape, strict=True))

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of its piece; of one that is longer than the whole without its padding."""
        return self.extent if self.is_longer else self.local

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece, without padding, as an index into the global tensor."""
        return tuple(
            slice(start, start + extent) for start, extent in zip(self.start, self.extent, strict=True)
        )

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece, zero-padded to `local`, of a global tensor of shape `shape`."""
        assert tuple(whole.shape) == self.shape, (self.name, tuple(whole.shape), self.shape)
        piece = whole[self.slices]
        if self.extent == self.local:
            return piece.clone()
        padded = whole.new_zeros(self.local)
        padded[tuple(slice(0, n) for n in self.extent)] = piece
        return padded


class UpdateSettings(NamedTuple):
    """How elements are updated: whether weight decay applies, what multiplies their learning rate, and
    whether that is in Blocks.

    Weight decay, where it applies, takes the learning rate as it is.
    """

    decayed: bool = True
    rate: float = 1.0
    in_blocks: bool = False


class UpdateBlock(NamedTuple):
    """What of a parameter is updated as one, because its elements depend on each other.

    `shape` has as many dims as the parameter, of the whole tensor: 1 in leading ones, all in those behind the
    first that is neither. `work` are the FLOPs of its update.
    """

    shape: tuple[int, ...]
    work: float

    def elements(self, shard: Shard) -> int:
        """Elements of one in the local piece of a Shard, where they are neighbours."""
        return prod(self.local(shard))

    def local(self, shard: Shard) -> tuple[int, ...]:
        """Its shape in the local piece of a Shard."""
        return tuple(min(size, held) for size, held in zip(self.shape, shard.local, strict=True))


class Parameter(nn.Parameter):
    """A model parameter with its Shard, its gradient buffer and its share in the schedule.

    It is made without memory of its own; its Bucket gives it some. `gradient` is the buffer, of the
    parameter's shape, into which every backward pass adds. Who adds to it without autograd (the
    parallel linear layers) calls `added()` afterwards; for all others a hook of the Bucket does.
    `decayed` says whether weight decay applies, `rate` by what the learning rate is multiplied, `block` what
    is updated as one, if not each element by itself, and `uses` how many additions to `gradient` one backward
    pass of one micro-batch makes. A table whose two uses add in an order that depends on the schedule is
    `separate_lookups`: its Bucket gives it `lookups`, a second buffer for one of them.
    """

    shard: Shard
    decayed: bool
    initial: Initial
    rate: float = 1.0
    block: UpdateBlock | None = None
    uses: int = 1
    separate_lookups: bool = False
    lookups: Tensor | None = None
    open_gradient: Callable[[], None] | None = None
    on_added: Callable[[Parameter], None] | None = None
    _gradient: Tensor | None = None
    _stale: bool = False

    def __new__(  # noqa: D102
        cls, shard: Shard, decayed: bool = True, initial: Initial = "normal"
    ) -> Parameter:
        # One element seen as many: of the right shape, yet without memory.
        data = torch.empty(()).expand(shard.local)
        self: Parameter = super().__new__(cls, data, requires_grad=True)
        self.shard, self.decayed, self.initial = shard, decayed, initial
        return self

    @property
    def update_settings(self) -> UpdateSettings:
        """How it is updated."""
        return UpdateSettings(self.decayed, self.rate, self.block is not None)

    @property
    def gradient(self) -> Tensor | None:
        """The buffer, to add to; one that is there only while it is used is opened by asking for it."""
        buffer = self._buffer()
        if self._stale and buffer is not None:
            buffer.zero_()
            self._stale = False
        return buffer

    @gradient.setter
    def gradient(self, buffer: Tensor | None) -> None:
        self._gradient = buffer

    def reset_gradient(self) -> None:
        """Begin again from zero; what the buffer holds does not count from now on."""
        self._stale = True

    def gradient_to_overwrite(self) -> Tensor | None:
        """The buffer, to overwrite, if nothing has been added since `forget_gradient`; else None."""
        buffer = self._buffer()
        if buffer is None or not self._stale:
            return None
        self._stale = False
        return buffer

    def _buffer(self) -> Tensor | None:
        if self._gradient is None and self.open_gradient is not None:
            self.open_gradient()
        return self._gradient

    def added(self) -> None:
        """Tell the Bucket that one addition to `gradient` is complete."""
        if self.on_added is not None:
            self.on_added(self)
