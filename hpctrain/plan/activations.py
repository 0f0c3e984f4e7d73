"""What a pipeline stage saves for backward at the most, told from the deck and the schedule."""

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


class _PartFigures(NamedTuple):
    """Of a part of the stage, of one micro-batch: segments of which something is saved, and bytes.

    `head` of `waiting`, what waits for backward; besides, `present` of a segment that is computed, `moving`
    of one on its way, `again` of one that is computed again; `deferred` of weight gradients that are computed
    later, and `coming`, in place of `again`, while these come and the graph goes.
    """

    pieces: int
    head: int
    waiting: int
    present: int
    moving: int
    again: int
    deferred: int
    coming: int


def activation_peak(deck: Deck, parts: Sequence[PartBytes], actions: Sequence[Action]) -> int:
    """The most that a stage's forwards save at once, until the end of their backwards, in bytes.

    Autograd saves nothing of the first blocks, nor of what embeds, where all that comes before the first
    trained block is frozen. Where segments of blocks wait elsewhere, or in fewer bits, those on their way are
    there besides.
    """
    elsewhere = deck.memory.activations != "keep"
    figures = [_figures(deck, part) for part in parts]
    moving = max(part.moving for part in figures)
    alive = peak = stored = 0
    latest: tuple[int, int] | None = None
    for action in actions:
        part = figures[action.chunk]
        pieces, before = part.pieces, alive - part.head
        if action.kind == "F":
            # The present segment as it is, those before it still leaving; the head comes after them.
            leaving = min(SEGMENTS_IN_FLIGHT, stored + pieces - 1) if elsewhere and pieces else 0
            forward = before + part.waiting + part.present + leaving * moving
            left = min(SEGMENTS_IN_FLIGHT, stored + pieces) if elsewhere else 0
            alive += part.waiting
            stored += pieces
            peak = max(peak, forward, alive + left * moving)
            latest = (action.chunk, action.micro_batch)
            continue
        deferred = part.deferred if action.kind in "IW" else 0
        if action.kind == "W":
            alive -= deferred
            continue
        extra = part.present
        if elsewhere and pieces:
            extra += moving * min(1, pieces - 1)
            if latest != (action.chunk, action.micro_batch):
                extra += min(SEGMENTS_IN_FLIGHT, stored - pieces) * moving
        peak = max(peak, alive, before + extra + (part.coming if action.kind == "I" else part.again))
        alive += deferred - part.waiting
        peak = max(peak, alive)
        stored -= pieces
    return peak


def _figures(deck: Deck, part: PartBytes) -> _PartFigures:
    silent = blocks_without_backward(part.part)
    seen, segments = (
        part.saved_blocks(silent),
        [segment_bytes(deck, each) for each in part.saved_segments(silent)],
    )
    elsewhere, exact = deck.memory.activations != "keep", deck.memory.activation_format == "exact"
    rests = [staying + (0 if elsewhere else packed) for staying, packed, _ in segments]
    presents = [computed - (0 if elsewhere else packed) for _, packed, computed in segments]
    waiting = sum(rests) + part.head + (part.shared if segments else 0)
    waiting += part.embedding if embedding_trained(part.part) else 0
    needs = [deferred_bytes(block, part.sizes) for block in seen]
    held, size = [each.deferred for each in needs], part.segment_size
    again, passing = part.recompute_bytes, [each.transient for each in needs]
    # By when a segment is computed again, those behind it are gone.
    kept = enumerate(again[len(again) - len(rests) :])
    most = max((besides - sum(rests[number + 1 :]) for number, besides in kept), default=0)
    peaks = enumerate(part.core_peaks[len(part.blocks) - len(seen) :]) if size <= 1 else ()
    cores = max((besides - sum(rests[number + 1 :]) for number, besides in peaks), default=0)
    # From block to block the graph goes and what weight gradients need comes.
    coming = [most + max(passing, default=0)] if size > 1 or not seen else list[int]()
    for number, besides in enumerate(again[len(again) - len(rests) :]):
        first = number * size
        later = sum(held[first + len(seen) // len(rests) :]) - sum(rests[number + 1 :])
        coming.append(later + besides + max(passing[first : first + size]))
    return _PartFigures(
        pieces=len(segments),
        head=part.head,
        waiting=waiting,
        present=max(presents, default=0),
        moving=max((computed if exact else packed for _, packed, computed in segments), default=0),
        again=max(most, cores),
        deferred=sum(held) + part.head_deferred,
        coming=max(coming) + part.head_deferred,
    )


def segment_bytes(deck: Deck, segment: Sequence[SavedStorage]) -> tuple[int, int, int]:
    """Bytes of a segment that stay in memory throughout; of the others, in the form in which they wait, and
    as they are computed.
    """
    form = deck.memory.activation_format
    if deck.memory.activations == "keep" and form == "exact":
        return total(segment), 0, 0
    leaving = [storage for storage in segment if storage.bytes >= MIN_STORED_BYTES]
    packed = sum(packed_bytes(storage, form) for storage in leaving)
    return total(segment) - total(leaving), packed, total(leaving)


def packing_bytes(deck: Deck, segment: Sequence[SavedStorage]) -> int:
    """What compressing a segment needs at the most, beyond the segment as it is computed."""
    form = deck.memory.activation_format
    if form == "exact":
        return 0
    peak = saved = 0
    for storage in segment:
        if storage.features and storage.bytes >= MIN_STORED_BYTES:
            length = storage.bytes // storage.itemsize
            peak = max(peak, compress_peak(length, storage.itemsize, form) - saved)
            saved += storage.bytes - packed_bytes(storage, form)
    return peak
