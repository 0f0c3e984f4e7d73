"""Faults of a rehearsed step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "missing send",
    "missing receive",
    "missing call",
    "swapped order",
    "wrong size",
    "other operation",
    "cyclic wait",
    "over memory",
]


@dataclass(frozen=True)
class RehearsalFault:
    """Fault of some ranks.

    Attributes:
        kind: Kind of fault.
        rank: First of these ranks.
        count: Number of these ranks.
        sentence: What was found and what would be right.
    """

    kind: Kind
    rank: int
    count: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {"fault": self.kind, "rank": self.rank, "ranks": self.count, "sentence": self.sentence}
