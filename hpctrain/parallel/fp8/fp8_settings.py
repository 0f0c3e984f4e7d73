"""Settings of a run for matrix products in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

AS_STORED = ("head", "embedding.*")
"""Layers that are never in 8 bits. A tied head is the table of the embedding."""


@dataclass(frozen=True)
class Fp8Settings:
    """Recipe and formats of products in 8 bits, by their names in the deck.

    Attributes:
        recipe: Recipe that scales operands.
        gradients: Format of the gradients of outputs.
        history: Steps in the history of a recipe with delayed scales.
        exclude: Patterns of the names of matrices that are not in 8 bits.
        messages: True if ranks exchange pieces of sequences in 8 bits.
        gather: True if ranks gather slices of weights in 8 bits.
    """

    recipe: str
    gradients: str
    history: int
    exclude: tuple[str, ...] = ()
    messages: bool = False
    gather: bool = False

    def excludes(self, name: str) -> bool:
        """Return True if a parameter of this name is not multiplied in 8 bits."""
        return any(names(pattern, name) for pattern in (*AS_STORED, *self.exclude))


def names(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a parameter ("blocks.0.attention.output.weight") or its layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
