"""What objectives of pairs of answers have in common: what they count, and their figures."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.data.batches import MicroBatch


class OfPairs:
    """Losses and figures are means over pairs, whose number the pass tells; see Objective."""

    figures: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "chosen", "rejected", "pairs")

    def count(self, micro_batch: MicroBatch) -> int:
        """Tokens of answers."""
        return int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:
        """See Objective: pairs for each token."""
        pairs = figures.pop("pairs") or 1.0
        figures |= {name: value / pairs for name, value in figures.items() if name in self.figures}
        return pairs
