"""A layout that was found: what of a deck makes it, what it takes and holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.plan.search.search_space import Values


@dataclass(frozen=True)
class Candidate:
    """The values of the keys that the deck leaves open; seconds of a step; bytes of the rank that holds most,
    and of the node that needs most.
    """

    deck: Deck
    changes: Values
    seconds_by_cause: Mapping[str, float]
    memory_bytes: int
    node_bytes: int

    @property
    def seconds(self) -> float:
        """Of a step."""
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
