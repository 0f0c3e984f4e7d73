"""From a deck's file to its plan, and to the plans of what could be changed in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.source import settled_keys
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck, fields
from hpctrain.errors import HpctrainError
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory import MemoryPlan, plan_memory

LEAST_SAVING = 0.02
"""Of a rank's total; changes that save less are not told."""


@dataclass(frozen=True)
class Saving:
    """A change of the deck and what the rank that holds most would then hold less, in bytes."""

    change: str
    saved: int
    total: int


@dataclass(frozen=True)
class DeckPlan:
    """The plan of a deck on some ranks, and what would save most, the most first."""

    deck: Deck
    ranks: int
    memory: MemoryPlan
    savings: tuple[Saving, ...]


def plan_deck(
    path: Path,
    ranks: int,
    overrides: Sequence[str] = (),
    ranks_per_node: int | None = None,
    advised: bool = True,
) -> DeckPlan:
    """Plan the deck in a file, and with `advised` what changes of it would save.

    The token file is opened only where the deck leaves its vocabulary to it.

    Raises HpctrainError as a run on so many ranks would.
    """
    deck = read_deck(path, overrides, ranks, settled_keys)
    vocabulary = deck.model.vocabulary or TokenFile(deck.data.tokens).vocabulary
    libraries = library_bytes() if deck.run.device != "cuda" else 0
    memory = plan_memory(deck, ranks, vocabulary, libraries, ranks_per_node)
    savings: list[Saving] = []
    for change in _changes(deck, memory) if advised else ():
        try:
            changed = read_deck(path, [*overrides, change], ranks, settled_keys)
            total = plan_memory(changed, ranks, vocabulary, libraries, ranks_per_node).largest.memory.total
        except HpctrainError:
            continue  # what this deck cannot have is no advice
        saved = memory.largest.memory.total - total
        if saved > LEAST_SAVING * memory.largest.memory.total:
            savings.append(Saving(change, saved, total))
    savings.sort(key=lambda saving: -saving.saved)
    return DeckPlan(deck, ranks, memory, tuple(savings))


def _changes(deck: Deck, memory: MemoryPlan) -> Iterator[str]:
    """Changes, each by itself, that take memory away from a rank."""
    if memory.zero_group > 1 or deck.layout.zero == 0:
        for stage in range(deck.layout.zero + 1, 4):
            yield f"layout.zero={stage}"
    if deck.precision.compute == "fp32":
        yield "precision.compute=bf16"
    if deck.memory.recompute == "none":
        yield "memory.recompute=selective"
        yield "memory.recompute=full"
    if "optimizer" in fields("memory") and deck.value("memory.optimizer") == "device":
        yield "memory.optimizer=disk"
    if deck.layout.zero > 1 and deck.memory.accumulate == "whole" and memory.micro_batches > 1:
        yield "memory.accumulate=sliced"
    if deck.batch.micro_size > 1 and deck.batch.micro_size % 2 == 0:
        yield f"batch.micro_size={deck.batch.micro_size // 2}"
    if deck.layout.tensor > 1 and not deck.layout.sequence_parallel:
        yield "layout.sequence_parallel=true"
