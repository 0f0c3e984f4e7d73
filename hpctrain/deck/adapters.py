"""The table [model.adapters]: low-rank adapters of the matrices of blocks (LoRA)."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hpctrain.deck.key import Section, key

_MOST_RANK = 65536


class Adapters(Section):
    """Low-rank adapters, W + (alpha / rank) B A for each matrix W of their targets (LoRA, arXiv 2106.09685).

    Only A and B are trained.
    """

    rank: int = key("Rank of the adapters: rows of A and columns of B.", 8, ge=1, le=_MOST_RANK)
    alpha: float = key("Scale of the adapters: B A is multiplied by alpha / rank.", 16.0, gt=0, le=1e6)
    targets: tuple[str, ...] = key(
        'Matrices of blocks that get adapters, by the ends of their names: ["query", "value"], '
        '["feed_forward.*"].',
        ("*",),
        strict=False,
        min_length=1,
    )

    @property
    def scale(self) -> float:
        """Factor alpha / rank by which B A is multiplied."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Return True if a layer, such as "blocks.0.attention.query", has an adapter."""
        return any(targeted(pattern, name) for pattern in self.targets)


def targeted(pattern: str, name: str) -> bool:
    """Return True if a pattern matches the name of a layer, or the end of its name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
