"""Checks of the reactions to spikes and faults: copies for a rollback, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck, Stability

_SPIKE = "stability.spike"


def stability_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the reaction of a deck to spikes."""
    keys, checkpoint, steps = deck.stability, deck.checkpoint, deck.run.steps
    if keys.corruption == "off" and keys.corruption_every != _default("corruption_every"):
        sentence = 'has no effect with stability.corruption = "off" (leave it out)'
        yield DeckProblem("stability.corruption_every", sentence, ("stability.corruption",), no_effect=True)
    for name in _in_vain(keys):
        sentence = f'has no effect with {_SPIKE} = "{keys.spike}" (leave it out)'
        yield DeckProblem(f"stability.{name}", sentence, (_SPIKE,), no_effect=True)
    if keys.spike == "off":
        return
    judged = steps - deck.learning_rate.warmup
    if keys.spike_window >= steps:
        sentence = f"is no shorter than the run, of run.steps = {steps}, and no step would be judged"
        would = f" ({judged // 2} would)" if judged // 2 >= 8 else ""
        yield DeckProblem("stability.spike_window", sentence + would, ("run.steps",))
    if keys.spike != "rollback":
        return
    if not checkpoint.every and not checkpoint.memory_every:
        sentence = (
            "has nothing to go back to, without checkpoint.every or checkpoint.memory_every "
            f"({keys.spike_back} steps would do for either)"
        )
        yield DeckProblem(_SPIKE, sentence, ("checkpoint.every", "checkpoint.memory_every"))
    elif not checkpoint.memory_every and not checkpoint.keep_every:
        oldest = (checkpoint.keep - 1) * checkpoint.every
        if oldest < keys.spike_back:
            enough = -(-keys.spike_back // checkpoint.every) + 1
            sentence = (
                f"is further back than the oldest of {checkpoint.keep} checkpoints, one every "
                f"{checkpoint.every} steps (checkpoint.keep = {enough} would do, or checkpoint.memory_every)"
            )
            others = ("checkpoint.keep", "checkpoint.every", "checkpoint.memory_every")
            yield DeckProblem("stability.spike_back", sentence, others)


def _in_vain(keys: Stability) -> Iterator[str]:
    """Yield the names of keys that differ from their defaults and have no effect."""
    looked_at = {
        "off": (),
        "skip": ("spike_window", "spike_factor", "spike_most"),
        "rollback": ("spike_window", "spike_factor", "spike_most", "spike_back"),
    }[keys.spike]
    for name in ("spike_window", "spike_factor", "spike_back", "spike_most"):
        if name not in looked_at and getattr(keys, name) != _default(name):
            yield name


def _default(name: str) -> object:
    return Stability.model_fields[name].default
