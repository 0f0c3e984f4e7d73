"""The section [objective]: the training loss, and checks of it against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.sources import toml_value

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

LANGUAGE = ("next-token", "sft")
"""Kinds that predict the next token; their loss is in nats."""


PREFERENCES = ("dpo", "reward")
"""Kinds that learn from pairs of answers; a pair is two consecutive sequences."""


REFERRED = ("dpo",)
"""Kinds of `PREFERENCES` that compare with a reference: the model at the beginning of the run."""


POLICIES = ("ppo", "grpo")
"""Kinds that learn from rewards of answers that the model generates."""


OF_SCORES = ("reward",)
"""Kinds whose model outputs one score for each token instead of logits."""


_OWN = {"dpo": ("beta", "loss", "smoothing"), "reward": ("margin", "centering")}


class ObjectiveSection(Section):
    """Loss with which the model is trained."""

    kind: Literal["next-token", "sft", "dpo", "reward", "ppo", "grpo"] = key(
        "next-token; sft: conversations; dpo: preference pairs; reward: reward model; ppo, grpo: RL "
        "with rewards.",
        "next-token",
    )
    beta: float = key(
        "Weight of the KL divergence from the reference (the initial model); 0: no reference (dpo, ppo, "
        "grpo).",
        0.1,
        ge=0,
        le=1000,
    )
    loss: Literal["sigmoid", "ipo"] = key(
        "Loss of a pair (dpo); sigmoid: as in the paper; ipo: squared error of means over each answer's "
        "tokens.",
        "sigmoid",
    )
    smoothing: float = key(
        "Share of pairs assumed to have their labels swapped: label smoothing (dpo, sigmoid).",
        0.0,
        ge=0,
        lt=0.5,
    )
    margin: float = key(
        "Margin of the preferred answer's reward, added to the `margin` of a row of the data (reward).",
        0.0,
        ge=0,
        le=1000,
    )
    centering: float = key(
        "Weight of the squared sum of a pair's rewards, which keeps rewards near zero (reward).",
        0.0,
        ge=0,
        le=1000,
    )


def _differs(keys: ObjectiveSection, name: str) -> bool:
    return bool(getattr(keys, name) != ObjectiveSection.model_fields[name].default)


def objective_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of a deck with its objective, among them keys that have no effect."""
    keys, kind = deck.objective, deck.objective.kind
    for other, names in _OWN.items():
        for name in names:
            taken = kind in POLICIES and name == "beta"
            if kind != other and not taken and _differs(keys, name):
                sentence = f'is for objective.kind = "{other}", which is {toml_value(kind)} (leave it out)'
                yield DeckProblem(f"objective.{name}", sentence, ("objective.kind",))
    if kind not in PREFERENCES:
        return
    if kind in REFERRED and not keys.beta:
        yield DeckProblem("objective.beta", 'must be above 0 for "dpo" (0.1 would do)', ("objective.kind",))
    if kind in OF_SCORES and deck.model.module is None and deck.model.tied:
        sentence = f"must be false for objective.kind = {toml_value(kind)}, whose head is a row of its own"
        yield DeckProblem("model.tied", f"{sentence} (leave it out)", ("objective.kind",))
    if keys.loss == "ipo" and keys.smoothing:
        sentence = 'is for objective.loss = "sigmoid" ("ipo" knows no labels that are wrong; leave it out)'
        yield DeckProblem("objective.smoothing", sentence, ("objective.loss",))
    for name in ("model.module", "model.loss", "data.dataset", "data.mixture"):
        if deck.value(name) is not None:
            sentence = (
                "is not for pairs of answers, which a transformer learns from one token file (leave it out)"
            )
            yield DeckProblem("objective.kind", f"{name} {sentence}", (name,))
    if deck.communication.server is not None:
        sentence = "is not for servers and workers (leave [communication.server] out)"
        yield DeckProblem("objective.kind", sentence, ("communication.server",))
    if deck.stability.z_loss:
        sentence = 'has no z-loss: stability.z_loss is for "next-token" (leave it out)'
        yield DeckProblem("objective.kind", sentence, ("stability.z_loss",))
    even = {"batch.micro_size": deck.batch.micro_size, "batch.global_size": deck.batch.global_size}
    even["batch.ramp_from"] = deck.batch.ramp_from
    even["run.evaluate_sequences"] = deck.run.evaluate_sequences
    for name, size in even.items():
        if size % 2:
            sentence = f"must be even: a pair of answers is two sequences ({multiples(size, 2)} would do)"
            yield DeckProblem(name, sentence, ("objective.kind",))
