"""Checks of a deck with [model.adapters]: what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.text import either

OPTIMIZERS = ("adamw", "sgd", "lion")
"""Those that update adapters."""

_KEY = "model.adapters"


def adapter_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Everything that keeps a deck from training adapters alone."""
    if deck.model.adapters is None:
        return
    with_them, memory = "with model.adapters", deck.memory
    if deck.model.frozen:
        sentence = f"has nothing to do {with_them}, beside which nothing is trained (leave it out)"
        yield DeckProblem("model.frozen", sentence, (_KEY,))
    if deck.model.parametrization == "mup":
        sentence = f'has no known rule for the rates of adapters ("standard" would do {with_them})'
        yield DeckProblem("model.parametrization", sentence, (_KEY,))
    if deck.precision.compute == "fp8":
        sentence = f'multiplies no matrices that have adapters ("bf16" would do {with_them})'
        yield DeckProblem("precision.compute", sentence, (_KEY,))
    if deck.optimizer.name not in OPTIMIZERS:
        would = either([f'"{name}"' for name in OPTIMIZERS])
        yield DeckProblem("optimizer.name", f"updates no adapters ({would} would do {with_them})", (_KEY,))
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) != "device":
            sentence = f'takes away what adapters have little of ("device" would do {with_them})'
            yield DeckProblem(f"memory.{name}", sentence, (_KEY,))
    if deck.layout.replicas > 1:
        sentence = f"has replicas keep apart what is not trained, too (1 would do {with_them})"
        yield DeckProblem("layout.local_steps.replicas", sentence, (_KEY,))
    if deck.communication.server is not None:
        sentence = f"sends what is trained to servers by tables of all parameters (leave it out {with_them})"
        yield DeckProblem("communication.server.mode", sentence, (_KEY,))
