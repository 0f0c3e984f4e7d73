"""What a pipeline stage keeps for backward at the most, told from the deck and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.memory.activations import SMALLEST, UNDER_WAY
from hpctrain.memory.compress import compress_peak
from hpctrain.memory.saved import ActivationBytes, activation_bytes, packed_bytes
from hpctrain.model.part import Span
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.saved import Storage
from hpctrain.pipeline.action import Action


@dataclass(frozen=True)
class PlannedPart:
    """A part of a stage; autograd keeps nothing of its first `silent` blocks, nor of what embeds where all
    that comes before the first trained block is frozen.
    """

    span: Span
    silent: int = 0
    embedding_kept: bool = True


@dataclass(frozen=True)
class _Way:
    """A segment on its way to where it waits, and back: bytes that stay in memory throughout, bytes in the
    form in which they wait, and bytes as they are computed.
    """

    staying: int
    packed: int
    exact: int

    @staticmethod
    def of(segment: Sequence[Storage], deck: Deck) -> _Way:
        """That of the deck."""
        memory = deck.memory
        if memory.activations == "keep" and memory.activation_format == "exact":
            return _Way(sum(storage.bytes for storage in segment), 0, 0)
        leaving = [storage for storage in segment if storage.bytes >= SMALLEST]
        packed = sum(packed_bytes(storage, memory.activation_format) for storage in leaving)
        exact = sum(storage.bytes for storage in leaving)
        return _Way(sum(storage.bytes for storage in segment) - exact, packed, exact)


def saved_bytes(deck: Deck, shape: ModelShape, sizes: Mapping[str, int]) -> ActivationBytes:
    """What autograd saves of a micro-batch on one rank."""
    return activation_bytes(
        shape,
        deck.batch.micro_size,
        Precision.of(deck).storage,
        tensor=sizes["tensor"],
        sequence_parallel=deck.layout.sequence_parallel,
        context=sizes["context"],
        context_form=deck.layout.context_form,
        recompute=deck.memory.recompute,
        device=deck.run.device if deck.run.device == "cuda" else "cpu",
    )


def activation_peak(
    deck: Deck, kept: ActivationBytes, actions: Sequence[Action], parts: Sequence[PlannedPart]
) -> int:
    """The most that a stage's forwards keep at once, until the end of their backwards, in bytes.

    Where segments of blocks wait elsewhere, or in fewer bits, those on their way are there besides.
    """
    way = _Way.of(kept.segment, deck)
    elsewhere = deck.memory.activations != "keep"
    waits = elsewhere or deck.memory.activation_format != "exact"
    alive = peak = stored = 0
    latest: tuple[int, int] | None = None
    for action in actions:
        part = parts[action.chunk]
        pieces = kept.segments(part.span.blocks, part.silent)
        head = kept.head if part.span.predicts else 0
        each = pieces * (way.staying + (0 if elsewhere else way.packed))
        each += (kept.shared if pieces else 0) + head
        each += kept.embedding if part.span.embeds and part.embedding_kept else 0
        here = min(pieces, 1)
        if action.kind == "F":
            # The present segment as it is, those before it still leaving; the head comes after them.
            leaving = min(UNDER_WAY, stored + pieces - 1) if elsewhere and pieces else 0
            present = way.exact - (0 if elsewhere else way.packed)
            forward = alive + each - head + here * present + leaving * _on_way(way, deck)
            left = min(UNDER_WAY, stored + pieces) if elsewhere else 0
            alive += each
            stored += pieces
            peak = max(peak, forward, alive + left * _on_way(way, deck))
            latest = (action.chunk, action.micro_batch)
            continue
        seen = kept.seen(part.span.blocks, part.silent)
        waiting = seen * kept.waiting if action.kind in "IW" else 0
        if action.kind == "W":
            alive -= waiting
            continue
        extra = 0
        if waits and pieces:
            extra = way.exact - (0 if elsewhere else way.packed)
            if elsewhere:
                extra += _on_way(way, deck) * min(1, pieces - 1)
                if latest != (action.chunk, action.micro_batch):
                    extra += min(UNDER_WAY, stored - pieces) * _on_way(way, deck)
        again = kept.again(part.span.blocks) if pieces else 0
        peak = max(peak, alive, alive - head + extra + again)
        if action.kind == "I" and pieces:
            # From block to block the graph goes and what weight gradients need comes.
            done = seen - seen // pieces
            gone = (pieces - 1) * (way.staying + (0 if elsewhere else way.packed))
            change = max(0, done * kept.waiting - gone)
            peak = max(
                peak, alive - head + change + extra + again + max(kept.waiting_first, kept.waiting_core)
            )
        alive += waiting - each
        peak = max(peak, alive)
        stored -= pieces
    return peak


def packing_bytes(deck: Deck, kept: ActivationBytes) -> int:
    """What compressing a segment needs at the most, beyond the segment as it is computed."""
    form = deck.memory.activation_format
    if form == "exact":
        return 0
    peak = saved = 0
    for storage in kept.segment:
        if storage.features and storage.bytes >= SMALLEST:
            length = storage.bytes // storage.itemsize
            peak = max(peak, compress_peak(length, storage.itemsize, form) - saved)
            saved += storage.bytes - packed_bytes(storage, form)
    return peak


def _on_way(way: _Way, deck: Deck) -> int:
    """Bytes of a segment that leaves or comes."""
    return way.exact if deck.memory.activation_format == "exact" else way.packed
