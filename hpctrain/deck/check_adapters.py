"""Checks of [model.adapters] against other keys."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.text import either

OPTIMIZERS = ("adamw", "sgd", "lion")
"""Optimizers that can update adapters."""

_KEY = "model.adapters"


def adapter_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of keys that are impossible with adapters."""
    if deck.model.adapters is None:
        return
    with_them, memory = "with model.adapters", deck.memory
    if deck.model.frozen:
        sentence = f"has no effect {with_them}, since only adapters are trained (leave it out)"
        yield DeckProblem("model.frozen", sentence, (_KEY,))
    if deck.model.parametrization == "mup":
        sentence = f'has no known rule for the learning rates of adapters ("standard" would do {with_them})'
        yield DeckProblem("model.parametrization", sentence, (_KEY,))
    if deck.precision.compute == "fp8":
        sentence = f'does not support matrices that have adapters ("bf16" would do {with_them})'
        yield DeckProblem("precision.compute", sentence, (_KEY,))
    if deck.optimizer.name not in OPTIMIZERS:
        would = either([f'"{name}"' for name in OPTIMIZERS])
        yield DeckProblem("optimizer.name", f"cannot update adapters ({would} would do {with_them})", (_KEY,))
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) != "device":
            sentence = f'would offload state that adapters keep small ("device" would do {with_them})'
            yield DeckProblem(f"memory.{name}", sentence, (_KEY,))
    if deck.layout.replicas > 1:
        sentence = f"would exchange untrained parameters, too (1 would do {with_them})"
        yield DeckProblem("layout.local_steps.replicas", sentence, (_KEY,))
    if deck.communication.server is not None:
        sentence = f"is for updates of all parameters (leave it out {with_them})"
        yield DeckProblem("communication.server.mode", sentence, (_KEY,))
