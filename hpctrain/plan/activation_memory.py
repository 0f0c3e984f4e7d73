"""Prediction of the activation memory of a pipeline stage, from the deck and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.costs.compressed_bytes import compress_peak
from hpctrain.costs.layer_bytes.activation_sizes import SavedStorage, total
from hpctrain.costs.layer_bytes.byte_functions import deferred_bytes
from hpctrain.costs.part_bytes import PartBytes, packed_bytes
from hpctrain.deck.schema import Deck
from hpctrain.memory.activation_store import MIN_STORED_BYTES, SEGMENTS_IN_FLIGHT
from hpctrain.model.parameters.frozen import blocks_without_backward, embedding_trained
from hpctrain.pipeline.action import Action


def activation_peak(deck: Deck, parts: Sequence[PartBytes], actions: Sequence[Action]) -> int:
    """Return the largest number of bytes that a stage saves for its backward passes at any time. Local.

    If everything before the first trained block is frozen, autograd saves nothing in the embedding and the
    first blocks. If activations are offloaded or compressed, the segments in transfer count, too.

    Args:
        deck: The deck.
        parts: Saved bytes of the model parts of the stage, by chunk.
        actions: Actions of the stage, in their order.
    """
    replay = _Replay([_micro_batch_bytes(deck, part) for part in parts], deck.memory.activations != "keep")
    for action in actions:
        if action.kind == "F":
            replay.forward(action)
        elif action.kind == "W":
            replay.weight_gradient(action)
        else:
            replay.backward(action)
    return replay.peak


class SegmentBytes(NamedTuple):
    """Bytes that a segment saves. A segment is a block, or several blocks that are recomputed together.

    Attributes:
        resident: Bytes of storages that stay in memory unchanged.
        packed: Bytes of the other storages, which are compressed or offloaded, in their stored format.
        computed: Bytes of these other storages as they are computed.
    """

    resident: int
    packed: int
    computed: int


def segment_bytes(deck: Deck, segment: Sequence[SavedStorage]) -> SegmentBytes:
    """Return the bytes of the storages that a segment saves, as the deck stores them."""
    form = deck.memory.activation_format
    if deck.memory.activations == "keep" and form == "exact":
        return SegmentBytes(total(segment), 0, 0)
    large = [storage for storage in segment if storage.bytes >= MIN_STORED_BYTES]
    packed = sum(packed_bytes(storage, form) for storage in large)
    return SegmentBytes(total(segment) - total(large), packed, total(large))


def packing_bytes(deck: Deck, segment: Sequence[SavedStorage]) -> int:
    """Return the temporary bytes that the compression of a segment needs, 0 if activations are exact.

    The storages are compressed one after the other. What the first ones have saved is free for the next.
    """
    form = deck.memory.activation_format
    if form == "exact":
        return 0
    peak = freed = 0
    for storage in segment:
        if storage.features and storage.bytes >= MIN_STORED_BYTES:
            length = storage.bytes // storage.itemsize
            peak = max(peak, compress_peak(length, storage.itemsize, form) - freed)
            freed += storage.bytes - packed_bytes(storage, form)
    return peak


class _MicroBatchBytes(NamedTuple):
    """Bytes of one micro-batch in a part of the stage.

    Attributes:
        segments: Number of segments that save something.
        saved: Bytes in memory between forward and backward pass.
        head: Those of them that are saved after the blocks.
        computing: Further bytes of the segment that computes, before it is compressed or offloaded.
        transfer: Bytes of a segment that is being offloaded or fetched.
        recompute: Further bytes of the backward pass, for what it recomputes.
        deferred: Bytes that deferred weight gradients keep.
        deferring: Further bytes of a backward pass that defers weight gradients. Block by block, saved
            tensors are freed, and the operands of weight gradients are kept.
    """

    segments: int
    saved: int
    head: int
    computing: int
    transfer: int
    recompute: int
    deferred: int
    deferring: int


def _micro_batch_bytes(deck: Deck, part: PartBytes) -> _MicroBatchBytes:
    """Return the bytes of a micro-batch in a part of the stage."""
    unsaved = blocks_without_backward(part.part)
    blocks = part.saved_blocks(unsaved)
    segments = [segment_bytes(deck, each) for each in part.saved_segments(unsaved)]
    is_kept, is_exact = deck.memory.activations == "keep", deck.memory.activation_format == "exact"
    stored = [each.resident + (each.packed if is_kept else 0) for each in segments]
    computing = [each.computed - (each.packed if is_kept else 0) for each in segments]
    transfer = [each.computed if is_exact else each.packed for each in segments]
    saved = sum(stored) + part.head + (part.shared if segments else 0)
    saved += part.embedding if embedding_trained(part.part) else 0
    deferred = [deferred_bytes(block, part.sizes) for block in blocks]
    # When a segment is recomputed, all later segments are freed already.
    freed = [sum(stored[number + 1 :]) for number in range(len(stored))]
    recomputed, size = part.recompute_bytes, part.segment_size
    recomputed = recomputed[len(recomputed) - len(stored) :]
    recomputed = [further - freed[number] for number, further in enumerate(recomputed)]
    recompute = max(recomputed, default=0)
    cores = part.core_peaks[len(part.blocks) - len(blocks) :] if size <= 1 else []
    core = max((further - freed[number] for number, further in enumerate(cores)), default=0)
    transients = [each.transient for each in deferred]
    deferring = [recompute + max(transients, default=0)] if size > 1 or not blocks else list[int]()
    for number, further in enumerate(recomputed):
        first = number * size
        operands = sum(each.deferred for each in deferred[first + len(blocks) // len(stored) :])
        deferring.append(operands + further + max(transients[first : first + size]))
    return _MicroBatchBytes(
        segments=len(segments),
        saved=saved,
        head=part.head,
        computing=max(computing, default=0),
        transfer=max(transfer, default=0),
        recompute=max(recompute, core),
        deferred=sum(each.deferred for each in deferred) + part.head_deferred,
        deferring=max(deferring) + part.head_deferred,
    )


class _Replay:
    """Replays the actions of a stage, to find the peak of its activations.

    Args:
        parts: Bytes of a micro-batch in each part of the stage.
        offloads: True if segments are offloaded.

    Attributes:
        peak: Largest number of bytes so far.
    """

    def __init__(self, parts: Sequence[_MicroBatchBytes], offloads: bool) -> None:
        self._parts, self._offloads = parts, offloads
        self._transfer = max(part.transfer for part in parts)
        self._saved = self._segments = self.peak = 0
        self._last_forward: tuple[int, int] | None = None

    def forward(self, action: Action) -> None:
        """Add what the forward pass of a micro-batch saves in a chunk."""
        part = self._parts[action.chunk]
        # While the last segment computes, those before it may still be in transfer. The head computes later.
        earlier = min(SEGMENTS_IN_FLIGHT, self._segments + part.segments - 1)
        transfers = earlier if self._offloads and part.segments else 0
        computing = self._saved - part.head + part.saved + part.computing + transfers * self._transfer
        self._saved += part.saved
        self._segments += part.segments
        transfers = min(SEGMENTS_IN_FLIGHT, self._segments) if self._offloads else 0
        self.peak = max(self.peak, computing, self._saved + transfers * self._transfer)
        self._last_forward = action.chunk, action.micro_batch

    def backward(self, action: Action) -> None:
        """Remove what the backward pass frees, and add the operands of deferred weight gradients."""
        part = self._parts[action.chunk]
        transfers = 0
        if self._offloads and part.segments:
            transfers = min(1, part.segments - 1)
            if self._last_forward != (action.chunk, action.micro_batch):
                # Segments of a later forward pass may still be in transfer.
                transfers += min(SEGMENTS_IN_FLIGHT, self._segments - part.segments)
        defers = action.kind == "I"
        further = part.computing + transfers * self._transfer
        further += part.deferring if defers else part.recompute
        self.peak = max(self.peak, self._saved, self._saved - part.head + further)
        self._saved += (part.deferred if defers else 0) - part.saved
        self.peak = max(self.peak, self._saved)
        self._segments -= part.segments

    def weight_gradient(self, action: Action) -> None:
        """Remove the operands of the deferred weight gradients of a micro-batch."""
        self._saved -= self._parts[action.chunk].deferred
