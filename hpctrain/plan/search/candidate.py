"""Layout that a search found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.plan.search.search_space import Values


@dataclass(frozen=True)
class Candidate:
    """Layout with its predicted step time and memory.

    Attributes:
        deck: Deck with the layout.
        changes: Values of the searched keys.
        seconds_by_cause: Seconds of a step by cause.
        memory_bytes: Bytes of the rank with most memory.
        node_bytes: Bytes of the node that needs most.
    """

    deck: Deck
    changes: Values
    seconds_by_cause: Mapping[str, float]
    memory_bytes: int
    node_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds_by_cause.values())

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {
            "changes": dict(self.changes),
            "seconds": self.seconds,
            "seconds_by_cause": dict(self.seconds_by_cause),
            "total_bytes": self.memory_bytes,
            "node_bytes": self.node_bytes,
        }
