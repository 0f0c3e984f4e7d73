"""Memory that ranks would save by single changes of a deck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from hpctrain.deck.schema import Deck, fields
from hpctrain.errors import HpctrainError
from hpctrain.plan.memory_plan import MemoryPlan

LEAST_SAVING = 0.02
"""Smallest share of a rank's memory that a change must save to be listed."""


@dataclass(frozen=True)
class MemorySaving:
    """Change of the deck that saves memory.

    Attributes:
        change: The change, such as "layout.zero=3".
        saved: Bytes that the rank with most memory saves.
        total: Bytes that the rank with most memory then needs.
    """

    change: str
    saved: int
    total: int


def find_savings(
    deck: Deck,
    memory: MemoryPlan,
    changed: Callable[[str], Deck],
    plan: Callable[[Deck], MemoryPlan],
    seconds: float = inf,
) -> list[MemorySaving]:
    """Return the changes of a deck that save memory, the largest saving first. Each is planned on its own.

    Args:
        deck: The deck.
        memory: Memory plan of the deck.
        changed: Function that returns the deck after a change such as "layout.zero=3".
        plan: Function that returns the memory plan of a deck.
        seconds: Time after which no further change is planned.
    """
    end = time.monotonic() + seconds
    held = memory.largest.memory.total
    savings = []
    for change in _changes(deck, memory):
        if time.monotonic() >= end:
            break
        try:
            total = plan(changed(change)).largest.memory.total
        except HpctrainError:
            continue  # the deck does not support this change
        if held - total > LEAST_SAVING * held:
            savings.append(MemorySaving(change, held - total, total))
    return sorted(savings, key=lambda saving: -saving.saved)


def _changes(deck: Deck, memory: MemoryPlan) -> Iterator[str]:
    """Yield changes, each on its own, that reduce the memory of a rank."""
    if memory.zero_group > 1 or deck.layout.zero == 0:
        for zero in range(deck.layout.zero + 1, 4):
            yield f"layout.zero={zero}"
    if deck.precision.compute == "fp32":
        yield "precision.compute=bf16"
    elif deck.precision.compute == "fp8" and deck.precision.fp8 == "delayed":
        yield "precision.fp8=tensor"  # which keeps inputs in 8 bits from the first step on
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
