"""Which matrices of a model are multiplied in 8 bits, and whether patterns can leave out what they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.deck.sources import toml_value
from hpctrain.model.part import Part
from hpctrain.parallel.eight_bits import AS_STORED, EightBits, names
from hpctrain.parallel.linear import SplitLinear

_NEVER = ("head.weight", "embedding.tokens.weight", "embedding.positions.weight")
"""Names that patterns may have in vain: these are never in 8 bits."""


@dataclass(frozen=True)
class Excluded:
    """What `find_excluded` found: the patterns that named something, whether anything is left in 8 bits, and
    pairs of an excluded and another matrix that are one in memory.
    """

    used: set[str]
    left: bool
    torn: list[tuple[str, str]]


def find_excluded(parts: Sequence[Part], how: EightBits) -> Excluded:
    """Go through the linear layers of parts of a model."""
    used = {pattern for pattern in how.exclude if any(names(pattern, name) for name in _NEVER)}
    used.update(pattern for pattern in how.exclude if pattern in AS_STORED)
    torn: list[tuple[str, str]] = []
    left = False
    modules = (module for part in parts for layer in part.layers for module in layer.modules())
    for layer in (module for module in modules if isinstance(module, SplitLinear)):
        fused = [weight.shard.name for weight in layer.weights]
        used.update(pattern for pattern in how.exclude if any(names(pattern, name) for name in fused))
        without = [name for name in fused if how.excludes(name)]
        within = [name for name in fused if not how.excludes(name)]
        left = left or bool(within)
        if without and within:
            torn.append((without[0], within[0]))
    return Excluded(used, left, torn)


def excluded_problems(patterns: Sequence[str], parts: Sequence[Excluded]) -> list[str]:
    """What is wrong with the patterns, of which each part of the model used some: ends of sentences."""
    used = {pattern for part in parts for pattern in part.used}
    torn = (pair for part in parts for pair in part.torn)
    reasons = [f"leaves out {one}, but not {other}, with which it is one" for one, other in torn]
    reasons += [
        f"no linear layer is called {toml_value(pattern)}" for pattern in patterns if pattern not in used
    ]
    if not reasons and not any(part.left for part in parts):
        reasons.append('leaves nothing to multiply in 8 bits (precision.compute = "bf16" would do the same)')
    return list(dict.fromkeys(reasons))
