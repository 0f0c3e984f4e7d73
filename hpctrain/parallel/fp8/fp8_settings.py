"""Settings of a run for matrix products in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpctrain.parallel.fp8.formats import E5M2, Fp8Format
from hpctrain.parallel.fp8.recipes import ScalingRecipe

NEVER_QUANTIZED = ("head", "embedding.*")
"""Layers that are never in 8 bits. A tied head is the table of the embedding."""


@dataclass(frozen=True)
class Fp8Settings:
    """Recipe and formats of products in 8 bits.

    Attributes:
        recipe: Which elements of operands share a scale.
        gradient_format: Format of the gradients of outputs.
        history_steps: Steps in the history of a recipe with delayed scales.
        excluded_patterns: Patterns of the names of matrices that are not in 8 bits.
        quantize_messages: True if ranks exchange pieces of sequences in 8 bits.
        quantize_gathers: True if ranks gather slices of weights in 8 bits.
    """

    recipe: ScalingRecipe
    gradient_format: Fp8Format = E5M2
    history_steps: int = 1
    excluded_patterns: tuple[str, ...] = ()
    quantize_messages: bool = False
    quantize_gathers: bool = False

    def excludes(self, name: str) -> bool:
        """Return True if a parameter of this name is not multiplied in 8 bits."""
        return any(
            matches_parameter(pattern, name) for pattern in (*NEVER_QUANTIZED, *self.excluded_patterns)
        )


def matches_parameter(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a parameter ("blocks.0.attention.output.weight") or its layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
