"""Storage of saved activations in fewer bits, in host memory or in a file.

A segment is a block, or several blocks that are recomputed together. After its forward pass, what it saved is
compressed and offloaded while the next segments compute. It is fetched while the backward pass of the
following segment computes.
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
from hpctrain.memory.offload_store import OffloadHandle, OffloadStore
from hpctrain.parallel.shards import Parameter

MIN_STORED_BYTES = 1 << 16  # smaller storages stay in memory unchanged

SEGMENTS_IN_FLIGHT = 2
"""Segments whose memory may still be occupied while they are offloaded."""


class PackedActivation(Protocol):
    """Interface of an object that autograd keeps in place of a tensor."""

    def unpack(self) -> Tensor:
        """Return the tensor."""


def unpack_saved(saved: Tensor | PackedActivation) -> Tensor:
    """Unpack hook of autograd: return the tensor that was saved, or unpack its PackedActivation."""
    return saved if isinstance(saved, Tensor) else saved.unpack()


Watch = Callable[[Tensor], PackedActivation]
"""Function that counts tensors in memory.

It is called for each tensor, and its result is kept as long as the tensor.
"""


class StoredActivation:
    """One storage that autograd saved, through any number of views.

    Its methods are called in the order `start_offload`, `advance`, `finish_offload`, `start_fetch`, `fetch`.
    Without an offload store only `start_offload`, which compresses, and `fetch` have an effect.

    Args:
        segment: Segment that saved it.
        tensor: One of the views.
        form: Format in which it is kept.
        watch: If given, called for each tensor that is in memory for it.
    """

    def __init__(
        self, segment: SavedSegment, tensor: Tensor, form: ActivationFormat, watch: Watch | None
    ) -> None:
        self.segment, self.form, self._watch = segment, form, watch
        self.dtype, self.device = tensor.dtype, tensor.device
        storage = tensor.untyped_storage()
        self.values: Tensor | None = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage)
        self.length = self.values.numel()
        self._packed: Tensor | None = None
        self._handle: OffloadHandle | None = None
        self._reported: list[PackedActivation] = []
        self._report()

    def start_offload(self, store: OffloadStore | None) -> None:
        """Compress the values, and start to offload them if there is a store."""
        if self.values is None:
            return
        self._packed = compress(self.values, self.form)
        if self.form != "exact" or store is None:
            self.values = None
        if store is not None:
            self._handle = store.put(self._packed)
            weakref.finalize(self, self._handle.release).atexit = False
        self._report()

    def advance(self) -> None:
        """Let the offload make progress."""
        if self._handle is not None:
            self._handle.advance()

    def finish_offload(self) -> None:
        """Wait for the offload, and free the memory."""
        if self._handle is not None:
            self._handle.finish_offload()
            self.values = self._packed = None
            self._report()

    def start_fetch(self) -> None:
        """Start to fetch the values, if they are offloaded."""
        if self._handle is not None and self.values is None and self._packed is None:
            self._handle.start_fetch()
            self._report()

    def fetch(self) -> Tensor:
        """Return the values of the storage, flat. Wait for the fetch and expand them if necessary.

        They stay in memory until autograd frees the last view.
        """
        if self.values is None:
            packed = self._packed
            if packed is None:
                assert self._handle is not None
                packed = self._handle.fetch()
            self.values = expand(packed, self.form, self.length, self.dtype)
            self._packed = None
            self._report()
        return self.values

    def _report(self) -> None:
        """Call `watch` for each tensor that is in memory now."""
        if self._watch is not None:
            fetched = self._handle.memory if self._handle is not None else None
            in_memory = [tensor for tensor in (self.values, self._packed, fetched) if tensor is not None]
            self._reported = [self._watch(tensor) for tensor in in_memory]


class StoredView:
    """Saved tensor that is a view of a StoredActivation."""

    def __init__(self, stored: StoredActivation, tensor: Tensor) -> None:
        self.stored = stored
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self) -> Tensor:
        """Return the tensor, as a view of its storage, which is fetched and expanded if necessary.

        Autograd calls it in the backward pass. The first call in a segment also starts to fetch the rest of
        the segment, and the one before it.
        """
        self.stored.segment.start_backward()
        return self.stored.fetch().as_strided(self.size, self.stride, self.offset)


class SavedSegment:
    """Tensors that one segment of blocks saves for one micro-batch.

    Args:
        x: Input of the segment [seq, batch, hidden].
        shared: Tensors that all segments share; they stay in memory.
        previous: Segment before it, which is fetched when the backward pass of this one starts.
    """

    def __init__(self, x: Tensor, shared: Sequence[Tensor], previous: SavedSegment | None) -> None:
        self._batch, self._rows = x.shape[1], x.shape[0]
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self._previous = previous
        self._by_address: dict[int, StoredActivation] = {}
        # Autograd holds the views that own them, so they are freed as the backward pass goes on.
        self._stored: list[weakref.ref[StoredActivation]] = []
        self._started = False

    def pack(
        self, tensor: Tensor, form: ActivationFormat, smallest: int, watch: Watch | None = None
    ) -> Tensor | PackedActivation:
        """Return what autograd keeps in place of a tensor: the tensor itself if it stays in memory.

        Args:
            tensor: Tensor to save.
            form: Format of activations; other tensors are kept exactly.
            smallest: Storages with fewer bytes stay in memory.
            watch: If given, called for each tensor in memory.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        stored = self._by_address.get(address)
        is_kept = isinstance(tensor, Parameter) or address in self._excluded or storage.nbytes() < smallest
        if is_kept or (stored is not None and stored.dtype != tensor.dtype):
            return watch(tensor) if watch is not None else tensor
        if stored is None:
            stored = StoredActivation(self, tensor, form if self._is_activation(tensor) else "exact", watch)
            self._by_address[address] = stored
            self._stored.append(weakref.ref(stored))
        return StoredView(stored, tensor)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Return True for features of tokens: [seq, batch, features], or 4 dims as in attention.

        Statistics, masks, indices and scores are not activations in this sense.
        """
        if not tensor.is_floating_point() or tensor.shape[-1] == 1:
            return False
        tokens = tensor.dim() == 3 and tensor.shape[1] == self._batch and tensor.shape[0] >= self._rows
        return tokens or tensor.dim() == 4

    def stored_activations(self) -> list[StoredActivation]:
        """Return the stored activations that the backward pass has not yet freed."""
        return [stored for reference in self._stored if (stored := reference()) is not None]

    def close(self, store: OffloadStore | None) -> None:
        """Compress all stored activations, and start to offload them if there is a store.

        It is called after the forward pass of the segment.
        """
        for stored in self.stored_activations():
            stored.start_offload(store)
        self._by_address.clear()

    def start_backward(self) -> None:
        """Start to fetch this segment, and the one before it, whose backward pass is next."""
        if not self._started:
            for segment in (self, self._previous):
                if segment is not None:
                    for stored in segment.stored_activations():
                        stored.start_fetch()
            self._started = True
            self._previous = None


class ActivationStore:
    """Keeps saved activations in a format, in memory or in an offload store.

    Set `offload_store` to offload them, and `watch` to be called for each tensor that is in memory for them.

    Args:
        form: Format of activations.
        smallest: Storages with fewer bytes stay in memory unchanged.
    """

    def __init__(self, form: ActivationFormat = "exact", smallest: int = MIN_STORED_BYTES) -> None:
        self.form, self.smallest = form, smallest
        self.offload_store: OffloadStore | None = None
        self.watch: Watch | None = None
        self._in_flight: deque[SavedSegment] = deque()

    @contextmanager
    def saving(
        self, x: Tensor, shared: Sequence[Tensor], previous: SavedSegment | None
    ) -> Iterator[SavedSegment]:
        """Store what autograd saves in this context, which surrounds the forward pass of one segment.

        Yield the segment, which is `previous` of the next call. At the end of the context, the tensors are
        compressed and start to be offloaded. The end may wait until the segment that is SEGMENTS_IN_FLIGHT
        before this one is stored.

        Args:
            x: Input of the segment [seq, batch, hidden].
            shared: Tensors that all segments share; they stay in memory.
            previous: Segment before it, or None.
        """
        segment = SavedSegment(x, shared, previous)
        watch = self.watch
        with saved_tensors_hooks(
            lambda tensor: segment.pack(tensor, self.form, self.smallest, watch), unpack_saved
        ):
            yield segment
        segment.close(self.offload_store)
        if self.offload_store is not None:
            for earlier in self._in_flight:
                for stored in earlier.stored_activations():
                    stored.advance()
            self._in_flight.append(segment)
            if len(self._in_flight) > SEGMENTS_IN_FLIGHT:
                for stored in self._in_flight.popleft().stored_activations():
                    stored.finish_offload()
