"""What a run says of matrices that are multiplied in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

AS_STORED = ("head", "embedding.*")
"""What is never in 8 bits; where the two are tied the head is the table of the embedding."""


@dataclass(frozen=True)
class Fp8Settings:
    """By which recipe layers multiply in 8 bits, and with gradients of their outputs in which format, by the
    names that a deck has for these; by maxima of how many steps where it is a delayed one; without which
    matrices, by patterns of their names; whether pieces of sequences travel in 8 bits, and slices of weights.
    """

    recipe: str
    gradients: str
    history: int
    exclude: tuple[str, ...] = ()
    messages: bool = False
    gather: bool = False

    def excludes(self, name: str) -> bool:
        """Whether a parameter of this name is multiplied as it is stored."""
        return any(names(pattern, name) for pattern in (*AS_STORED, *self.exclude))


def names(pattern: str, name: str) -> bool:
    """Whether a pattern is of a parameter, "blocks.0.attention.output.weight", or of its layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
