"""Base class of objectives for preference pairs: two answers of which one was preferred."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from hpctrain.objective.objective import Objective


class PairObjective(Objective):
    """Count and metrics of preference pairs.

    A pair is two neighbouring rows of a micro-batch, the chosen answer first. Losses and metrics are means
    over pairs. The count before the passes is that of tokens, since only the passes find pairs with an empty
    answer.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "chosen", "rejected", "pairs")

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        """Divide the metrics by the number of pairs per counted token, in place, and return this number."""
        pairs = metrics.pop("pairs") or 1.0
        metrics |= {name: value / pairs for name, value in metrics.items() if name in self.metrics}
        return pairs
