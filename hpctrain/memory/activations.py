"""Saved activations that wait for backward in fewer bits, in host memory or in a file.

What a segment of blocks saves leaves when its forward pass is over, while the next ones compute, and comes
back while the backward pass of the segment after it computes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.memory.compress import ActivationFormat, compress, expand
from hpctrain.memory.offload_store import OffloadHandle, Shelf
from hpctrain.parallel.shard import Parameter

SMALLEST = 1 << 16  # bytes of a storage that is worth the way

UNDER_WAY = 2
"""Segments whose memory stays while they leave; the last ones of a forward pass need not come back."""


class PackedActivation(Protocol):
    """What autograd holds in place of a tensor."""

    def unpack(self) -> Tensor:
        """The tensor again."""


Watch = Callable[[Tensor], PackedActivation]
"""Told of every tensor that is kept; what it returns is there for as long as the tensor is."""


class StoredActivation:
    """One storage that autograd saved, by however many views of it."""

    def __init__(
        self, segment: SavedSegment, tensor: Tensor, form: ActivationFormat, watch: Watch | None
    ) -> None:
        self.segment, self.form, self._watch = segment, form, watch
        self.dtype, self.device = tensor.dtype, tensor.device
        storage = tensor.untyped_storage()
        self.values: Tensor | None = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage)
        self.length = self.values.numel()
        self._packed: Tensor | None = None
        self._stay: OffloadHandle | None = None
        self._watched: list[PackedActivation] = []
        self._tell()

    def leave(self, shelf: Shelf | None) -> None:
        """Compress, and start to leave for the shelf."""
        if self.values is None:
            return
        self._packed = compress(self.values, self.form)
        if self.form != "exact" or shelf is None:
            self.values = None
        if shelf is not None:
            self._stay = shelf.put(self._packed)
            weakref.finalize(self, self._stay.release).atexit = False
        self._tell()

    def advance(self) -> None:
        """Go on leaving."""
        if self._stay is not None:
            self._stay.advance()

    def settle(self) -> None:
        """Have left."""
        if self._stay is not None:
            self._stay.settle()
            self.values = self._packed = None
            self._tell()

    def start_return(self) -> None:
        """Start to come back."""
        if self._stay is not None and self.values is None and self._packed is None:
            self._stay.start_fetch()
            self._tell()

    def back(self) -> Tensor:
        """The values, flat, kept as long as anyone may ask for them."""
        if self.values is None:
            packed = self._packed
            if packed is None:
                assert self._stay is not None
                packed = self._stay.fetch()
            self.values = expand(packed, self.form, self.length, self.dtype)
            self._packed = None
            self._tell()
        return self.values

    def _tell(self) -> None:
        """Let the watch know what is in memory now."""
        if self._watch is not None:
            coming = self._stay.memory if self._stay is not None else None
            here = [tensor for tensor in (self.values, self._packed, coming) if tensor is not None]
            self._watched = [self._watch(tensor) for tensor in here]


class View:
    """A saved tensor: a view of a StoredActivation."""

    def __init__(self, stored: StoredActivation, tensor: Tensor) -> None:
        self.stored = stored
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self) -> Tensor:
        """The tensor again."""
        self.stored.segment.needed()
        return self.stored.back().as_strided(self.size, self.stride, self.offset)


class SavedSegment:
    """What one segment of blocks saves for one micro-batch."""

    def __init__(self, x: Tensor, shared: Sequence[Tensor], before: SavedSegment | None) -> None:
        self._batch, self._rows = x.shape[1], x.shape[0]
        self._without = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self._before = before
        self._open: dict[int, StoredActivation] = {}
        # Owned by the views that autograd holds, so that they go as backward goes on.
        self._stored: list[weakref.ref[StoredActivation]] = []
        self._started = False

    def pack(
        self, tensor: Tensor, form: ActivationFormat, smallest: int, watch: Watch | None = None
    ) -> Tensor | PackedActivation:
        """What autograd is to hold in place of a tensor: itself, where it stays."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        stored = self._open.get(address)
        stays = isinstance(tensor, Parameter) or address in self._without or storage.nbytes() < smallest
        if stays or (stored is not None and stored.dtype != tensor.dtype):
            return watch(tensor) if watch is not None else tensor
        if stored is None:
            stored = StoredActivation(self, tensor, form if self._is_activation(tensor) else "exact", watch)
            self._open[address] = stored
            self._stored.append(weakref.ref(stored))
        return View(stored, tensor)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Features of tokens: [s, b, features], or four dims as of attention and `as_features`; no
        statistics, masks, indices or scores.
        """
        if not tensor.is_floating_point() or tensor.shape[-1] == 1:
            return False
        tokens = tensor.dim() == 3 and tensor.shape[1] == self._batch and tensor.shape[0] >= self._rows
        return tokens or tensor.dim() == 4

    def living(self) -> list[StoredActivation]:
        """What backward has not used yet."""
        return [stored for reference in self._stored if (stored := reference()) is not None]

    def close(self, shelf: Shelf | None) -> None:
        """Forward is over."""
        for stored in self.living():
            stored.leave(shelf)
        self._open.clear()

    def needed(self) -> None:
        """Backward begins: have all come back, and the segment before it, which is next."""
        if not self._started:
            for segment in (self, self._before):
                if segment is not None:
                    for stored in segment.living():
                        stored.start_return()
            self._started = True
            self._before = None


class ActivationStore:
    """Keeps what segments save in a format, on a shelf where there is one (`shelf`), else in memory.

    `watch`, if set, is told of all that is in memory for them.
    """

    def __init__(self, form: ActivationFormat = "exact", smallest: int = SMALLEST) -> None:
        self.form, self.smallest = form, smallest
        self.shelf: Shelf | None = None
        self.watch: Watch | None = None
        self._leaving: deque[SavedSegment] = deque()

    @contextmanager
    def saving(
        self, x: Tensor, shared: Sequence[Tensor], before: SavedSegment | None
    ) -> Iterator[SavedSegment]:
        """The forward pass of a segment of blocks, whose input is x [s, b, h], after that of `before`."""
        segment = SavedSegment(x, shared, before)
        watch = self.watch
        with saved_tensors_hooks(
            lambda tensor: segment.pack(tensor, self.form, self.smallest, watch),
            lambda held: held if isinstance(held, Tensor) else held.unpack(),
        ):
            yield segment
        segment.close(self.shelf)
        if self.shelf is not None:
            for earlier in self._leaving:
                for stored in earlier.living():
                    stored.advance()
            self._leaving.append(segment)
            if len(self._leaving) > UNDER_WAY:
                for stored in self._leaving.popleft().living():
                    stored.settle()
