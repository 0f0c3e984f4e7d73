"""The section [objective]: the training loss, and checks of it against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.relations import Above, Conflicts, HasEffectWith, Relations, Requires

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

LANGUAGE_KINDS = ("next-token", "sft")
"""Kinds that predict the next token; their loss is in nats."""


PREFERENCE_KINDS = ("dpo", "reward")
"""Kinds that learn from pairs of answers; a pair is two consecutive sequences."""


REFERENCE_KINDS = ("dpo",)
"""Kinds of `PREFERENCE_KINDS` that compare with a reference: the model at the beginning of the run."""


POLICY_KINDS = ("ppo", "grpo")
"""Kinds that learn from rewards of answers that the model generates."""


SCORE_KINDS = ("reward",)
"""Kinds whose model outputs one score for each token instead of logits."""


_KIND = "objective.kind"


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
    mtp_weight: float = key(
        "Weight of the mean loss of model.mtp_layers modules of multi-token prediction.",
        0.3,
        ge=0,
        le=1000,
    )


RELATIONS: Relations = (
    HasEffectWith("objective.mtp_weight", "model.mtp_layers", Above(0)),
    Requires("objective.beta", _KIND, (*REFERENCE_KINDS, *POLICY_KINDS)),
    Conflicts("objective.beta", _KIND, (0.0,), REFERENCE_KINDS, because="it must be above 0", hint="use 0.1"),
    Requires("objective.loss", _KIND, ("dpo",)),
    Requires("objective.smoothing", _KIND, ("dpo",)),
    Requires("objective.margin", _KIND, ("reward",)),
    Requires("objective.centering", _KIND, ("reward",)),
    *(
        Conflicts(
            _KIND,
            name,
            PREFERENCE_KINDS,
            because="pairs of answers require a built-in transformer and one token file",
            hint=f"leave {name} out",
        )
        for name in ("model.module", "model.loss", "data.dataset", "data.mixture")
    ),
    Conflicts(
        _KIND,
        "communication.server",
        PREFERENCE_KINDS,
        because="workers compute next-token losses only",
        hint="leave [communication.server] out",
    ),
    Conflicts(_KIND, "stability.z_loss", PREFERENCE_KINDS, hint="leave stability.z_loss out"),
    *(
        Conflicts(
            _KIND,
            name,
            POLICY_KINDS,
            because="the model learns from its own answers",
            hint=f"leave {name} out",
        )
        for name in (
            *("model.module", "model.loss", "data.dataset", "data.mixture", "run.tokens"),
            *("communication.server", "batch.ramp_from", "model.dropout", "stability.z_loss"),
            *("evaluation.sets", "checkpoint.mirror"),
        )
    ),
    Conflicts(
        _KIND,
        "model.experts.capacity",
        POLICY_KINDS,
        because="experts drop tokens that depend on the other sequences of a micro-batch",
        hint="leave model.experts.capacity out",
    ),
)


def objective_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the objective that no relation in RELATIONS describes.

    These are replicas of a policy, and with pairs of answers odd batch sizes, and smoothing of the loss
    "ipo".
    """
    keys, batch = deck.objective, deck.batch
    if keys.kind in POLICY_KINDS and deck.layout.replicas > 1:
        sentence = "conflicts with [layout.local_steps]: the model learns from its own answers"
        sentence += " (leave layout.local_steps out)"
        yield DeckProblem(_KIND, sentence, ("layout.local_steps",))
    if keys.kind not in PREFERENCE_KINDS:
        return
    if keys.loss == "ipo" and keys.smoothing:
        sentence = 'requires objective.loss = "sigmoid", but it is "ipo" (leave this key out)'
        yield DeckProblem("objective.smoothing", sentence, ("objective.loss",))
    even = {
        "batch.micro_size": batch.micro_size,
        "batch.global_size": batch.global_size,
        "batch.ramp_from": batch.ramp_from,
        "run.evaluate_sequences": deck.run.evaluate_sequences,
    }
    for name, size in even.items():
        if size % 2:
            sentence = f"must be even: a pair of answers is two sequences (use {multiples(size, 2)})"
            yield DeckProblem(name, sentence, (_KIND,))
