"""The section [objective]: what is learned of the data, and the checks of it against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import Problem, multiples
from hpctrain.deck.sources import toml_value

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

PREFERENCES = ("dpo",)
"""Kinds that learn from pairs of answers, which are sequences next to each other."""


class ObjectiveSection(Section):
    """What is learned: the next token (of conversations, those of the answers), or which answer is better."""

    kind: Literal["next-token", "dpo"] = key(
        "next-token: also of conversations (supervised fine-tuning); dpo: of pairs, by the start's own odds.",
        "next-token",
    )
    beta: float = key(
        "How dear it is to leave the model that the run starts from, the reference (dpo).", 0.1, gt=0, le=1000
    )
    loss: Literal["sigmoid", "ipo"] = key(
        "Loss of a pair (dpo): sigmoid, as in the paper; ipo: a square, of means over each answer's tokens.",
        "sigmoid",
    )
    smoothing: float = key(
        "Share of pairs that are taken to be labelled the wrong way round (dpo, sigmoid).", 0.0, ge=0, lt=0.5
    )


def objective_problems(deck: Deck) -> Iterator[Problem]:
    """Everything that keeps a deck from its objective, and keys that are given in vain."""
    keys, kind = deck.objective, deck.objective.kind
    if kind not in PREFERENCES:
        for name in ("beta", "loss", "smoothing"):
            if getattr(keys, name) != ObjectiveSection.model_fields[name].default:
                sentence = f'is for objective.kind = "dpo", which is {toml_value(kind)} (leave it out)'
                yield Problem(f"objective.{name}", sentence, ("objective.kind",))
        return
    if keys.loss == "ipo" and keys.smoothing:
        sentence = 'is for objective.loss = "sigmoid" ("ipo" knows no labels that are wrong; leave it out)'
        yield Problem("objective.smoothing", sentence, ("objective.loss",))
    for name in ("model.module", "model.loss", "data.dataset", "data.mixture"):
        if deck.value(name) is not None:
            sentence = (
                "is not for pairs of answers, which a transformer learns from one token file (leave it out)"
            )
            yield Problem("objective.kind", f"{name} {sentence}", (name,))
    if deck.communication.server != "none":
        sentence = 'is not for servers and workers (communication.server = "none" would do)'
        yield Problem("objective.kind", sentence, ("communication.server",))
    if deck.stability.z_loss:
        sentence = 'has no z-loss: stability.z_loss is for "next-token" (leave it out)'
        yield Problem("objective.kind", sentence, ("stability.z_loss",))
    even = {"batch.micro_size": deck.batch.micro_size, "batch.global_size": deck.batch.global_size}
    even["batch.ramp_from"] = deck.batch.ramp_from
    even["run.evaluate_sequences"] = deck.run.evaluate_sequences
    for name, size in even.items():
        if size % 2:
            sentence = f"must be even: a pair of answers is two sequences ({multiples(size, 2)} would do)"
            yield Problem(name, sentence, ("objective.kind",))
