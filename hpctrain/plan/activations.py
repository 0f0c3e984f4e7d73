"""What a pipeline stage saves for backward at the most, told from the deck and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.memory.activations import SMALLEST, UNDER_WAY
from hpctrain.memory.compress import compress_peak
from hpctrain.memory.saved import ActivationBytes, packed_bytes
from hpctrain.model.frozen import embedding_trained, silent_blocks
from hpctrain.model.part import Part
from hpctrain.parallel.saved import Storage, total
from hpctrain.pipeline.action import Action


class _PartBytes(NamedTuple):
    """Of a part of the stage: pieces and blocks of which something is saved, bytes of its head, of a
    micro-batch that waits for backward, and of what is there besides while a piece is computed again.
    """

    pieces: int
    seen: int
    head: int
    waiting: int
    again: int


def activation_peak(
    deck: Deck, saved: ActivationBytes, actions: Sequence[Action], models: Sequence[Part]
) -> int:
    """The most that a stage's forwards save at once, until the end of their backwards, in bytes.

    Autograd saves nothing of the first blocks, nor of what embeds, where all that comes before the first
    trained block is frozen. Where segments of blocks wait elsewhere, or in fewer bits, those on their way are
    there besides.
    """
    elsewhere = deck.memory.activations != "keep"
    staying, packed, exact = _segment_bytes(deck, saved.segment)
    moving = exact if deck.memory.activation_format == "exact" else packed
    here = 0 if elsewhere else packed
    rest, present = staying + here, exact - here  # of one that waits, and besides of one that is computed

    def bytes_of(part: Part) -> _PartBytes:
        blocks, silent = part.span.blocks, silent_blocks(part)
        pieces, head = saved.segments(blocks, silent), saved.head if part.span.predicts else 0
        waiting = pieces * rest + (saved.shared if pieces else 0) + head
        waiting += saved.embedding if part.span.embeds and embedding_trained(part) else 0
        return _PartBytes(
            pieces, saved.seen(blocks, silent), head, waiting, saved.again(blocks) if pieces else 0
        )

    parts = [bytes_of(model) for model in models]
    alive = peak = stored = 0
    latest: tuple[int, int] | None = None
    for action in actions:
        pieces, seen, head, waiting, again = parts[action.chunk]
        if action.kind == "F":
            # The present segment as it is, those before it still leaving; the head comes after them.
            leaving = min(UNDER_WAY, stored + pieces - 1) if elsewhere and pieces else 0
            forward = alive + waiting - head + (present if pieces else 0) + leaving * moving
            left = min(UNDER_WAY, stored + pieces) if elsewhere else 0
            alive += waiting
            stored += pieces
            peak = max(peak, forward, alive + left * moving)
            latest = (action.chunk, action.micro_batch)
            continue
        deferred = seen * saved.waiting if action.kind in "IW" else 0
        if action.kind == "W":
            alive -= deferred
            continue
        extra = present if pieces else 0
        if elsewhere and pieces:
            extra += moving * min(1, pieces - 1)
            if latest != (action.chunk, action.micro_batch):
                extra += min(UNDER_WAY, stored - pieces) * moving
        peak = max(peak, alive, alive - head + extra + again)
        if action.kind == "I" and pieces:
            # From block to block the graph goes and what weight gradients need comes.
            done = seen - seen // pieces
            change = max(0, done * saved.waiting - (pieces - 1) * rest)
            peak = max(
                peak, alive - head + change + extra + again + max(saved.waiting_first, saved.waiting_core)
            )
        alive += deferred - waiting
        peak = max(peak, alive)
        stored -= pieces
    return peak


def _segment_bytes(deck: Deck, segment: Sequence[Storage]) -> tuple[int, int, int]:
    """Bytes of a segment that stay in memory throughout; of the others, in the form in which they wait, and
    as they are computed.
    """
    form = deck.memory.activation_format
    if deck.memory.activations == "keep" and form == "exact":
        return total(segment), 0, 0
    leaving = [storage for storage in segment if storage.bytes >= SMALLEST]
    packed = sum(packed_bytes(storage, form) for storage in leaving)
    return total(segment) - total(leaving), packed, total(leaving)


def packing_bytes(deck: Deck, activations: ActivationBytes) -> int:
    """What compressing a segment needs at the most, beyond the segment as it is computed."""
    form = deck.memory.activation_format
    if form == "exact":
        return 0
    peak = saved = 0
    for storage in activations.segment:
        if storage.features and storage.bytes >= SMALLEST:
            length = storage.bytes // storage.itemsize
            peak = max(peak, compress_peak(length, storage.itemsize, form) - saved)
            saved += storage.bytes - packed_bytes(storage, form)
    return peak
