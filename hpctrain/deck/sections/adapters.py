"""The table [model.adapters]: low-rank adapters of the matrices of blocks (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

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


OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers that can update adapters."""


_ADAPTERS = "model.adapters"


def adapter_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of keys that are impossible with adapters."""
    if deck.model.adapters is None:
        return
    with_them, memory = "with model.adapters", deck.memory
    if deck.model.frozen:
        sentence = f"has no effect {with_them}, since only adapters are trained (leave it out)"
        yield DeckProblem("model.frozen", sentence, (_ADAPTERS,))
    if deck.model.parametrization == "mup":
        sentence = f'has no known rule for the learning rates of adapters ("standard" would do {with_them})'
        yield DeckProblem("model.parametrization", sentence, (_ADAPTERS,))
    if deck.precision.compute == "fp8":
        sentence = f'does not support matrices that have adapters ("bf16" would do {with_them})'
        yield DeckProblem("precision.compute", sentence, (_ADAPTERS,))
    if deck.optimizer.name not in OPTIMIZERS:
        would = either([f'"{name}"' for name in OPTIMIZERS])
        yield DeckProblem(
            "optimizer.name", f"cannot update adapters ({would} would do {with_them})", (_ADAPTERS,)
        )
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) != "device":
            sentence = f'would offload state that adapters keep small ("device" would do {with_them})'
            yield DeckProblem(f"memory.{name}", sentence, (_ADAPTERS,))
    if deck.layout.replicas > 1:
        sentence = f"would exchange untrained parameters, too (1 would do {with_them})"
        yield DeckProblem("layout.local_steps.replicas", sentence, (_ADAPTERS,))
    if deck.communication.server is not None:
        sentence = f"is for updates of all parameters (leave it out {with_them})"
        yield DeckProblem("communication.server.mode", sentence, (_ADAPTERS,))
