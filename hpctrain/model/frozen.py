"""Which parameters of a model are not trained, and of which of its blocks autograd therefore sees nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpctrain.deck.sources import toml_value
from hpctrain.model.part import Part, blocks_of


@dataclass(frozen=True)
class Frozen:
    """What `freeze_parameters` found: the patterns that named something, whether anything is left to train,
    and pairs of a frozen and a trained parameter that are one matrix or vector in memory.
    """

    used: set[str]
    left: bool
    torn: list[tuple[str, str]]


def freeze_parameters(parts: Sequence[Part], patterns: Sequence[str]) -> Frozen:
    """Freeze what the patterns name: no gradient, no weight decay."""
    used: set[str] = set()
    torn: list[tuple[str, str]] = []
    left = False
    for leaf in (leaf for part in parts for unit in part.units() for leaf in unit):
        for dims in sorted({parameter.dim() for parameter in leaf}):  # a layer's matrices, or its vectors
            fused = [parameter for parameter in leaf if parameter.dim() == dims]
            for parameter in fused:
                matching = [p for p in patterns if fnmatchcase(parameter.shard.name, p)]
                used.update(matching)
                if matching:
                    parameter.requires_grad_(False)
                    parameter.decayed = False
            trained = [p.shard.name for p in fused if p.requires_grad]
            frozen = [p.shard.name for p in fused if not p.requires_grad]
            left = left or bool(trained)
            if trained and frozen:
                torn.append((frozen[0], trained[0]))
    return Frozen(used, left, torn)


def frozen_problems(patterns: Sequence[str], parts: Sequence[Frozen]) -> list[str]:
    """What is wrong with the patterns, of which each part of the model used some: ends of sentences."""
    used = {pattern for part in parts for pattern in part.used}
    torn = (pair for part in parts for pair in part.torn)
    reasons = [f"freezes {one}, but not {other}, with which it is one" for one, other in torn]
    reasons += [
        f"no parameter is called {toml_value(pattern)}" for pattern in patterns if pattern not in used
    ]
    if not reasons and patterns and not any(part.left for part in parts):
        reasons.append("leaves nothing to train")
    return list(dict.fromkeys(reasons))


def embedding_trained(part: Part) -> bool:
    """Whether what a part passes to its first block depends on parameters that are trained: its own, or
    those of the parts before.
    """
    return not part.span.embeds or any(p.requires_grad for p in part.layers[0].parameters())


def silent_blocks(part: Part) -> int:
    """Leading blocks that neither are trained nor follow anything that is."""
    if embedding_trained(part):
        return 0
    trained = [any(p.requires_grad for p in block.parameters()) for block in blocks_of(part)]
    return trained.index(True) if True in trained else len(trained)
