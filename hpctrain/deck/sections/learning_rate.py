"""The section [learning_rate], the rate of every step, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.decays import DECAYS, ENDLESS, WITH_COOLDOWN
from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Conflicts, HasEffectWith, OtherThan, Relations

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

if TYPE_CHECKING:
    Decay = str
else:
    Decay = Literal[tuple(DECAYS)]


_FORMS = "; ".join(f"{name}: {form.description}" for name, form in DECAYS.items() if form.description)


_ENDING = ", ".join(name for name in DECAYS if name not in ENDLESS)


_COOLED = ", ".join(WITH_COOLDOWN)


class LearningRateSection(Section):
    """Learning rate of each step: linear warm-up to the peak, then decay to the floor."""

    peak: float = key("Highest learning rate.", 3e-4, gt=0, le=1000)
    warmup: int = key(
        "Steps of linear warm-up.",
        unit="steps",
        derived="100, at most a tenth of run.steps and decay_steps",
        ge=0,
    )
    decay: Decay = key(
        f"Form of the decay after the warm-up; {_FORMS}.", derived='"cosine"; with schedule-free "constant"'
    )
    decay_steps: int = key(
        f"Steps after which the rate is at the floor and stays there ({_ENDING}).",
        unit="steps",
        derived="run.steps, at least warmup",
        ge=1,
    )
    cooldown: int = key(
        "Last steps of decay_steps, in which the rate falls linearly from the peak to the floor "
        f"({_COOLED}).",
        unit="steps",
        derived=f"a tenth of decay_steps ({_COOLED}), else 0",
        ge=0,
    )
    floor: float = key("Lowest rate after the warm-up, as a share of the peak.", 0.1, ge=0, le=1)
    reference_batch: int = key(
        "Batch size that the peak was tuned for: the rate is scaled by batch / reference_batch; 0: no "
        "scaling.",
        0,
        unit="sequences",
        ge=0,
    )


RELATIONS: Relations = (
    HasEffectWith(
        "learning_rate.floor",
        "learning_rate.decay",
        tuple(name for name, form in DECAYS.items() if form.has_floor),
    ),
    HasEffectWith("learning_rate.cooldown", "learning_rate.decay", WITH_COOLDOWN),
    Conflicts(
        "learning_rate.decay",
        "optimizer.name",
        OtherThan("constant"),
        ("schedule-free",),
        because="it averages weights instead of using a decay",
    ),
)


def learning_rate_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a warm-up or cooldown that decay_steps does not leave room for, at most one.

    A decay_steps that the form of the decay does not use is another one. Relations in RELATIONS are checked
    elsewhere.
    """
    rate, others = deck.learning_rate, ("learning_rate.decay", "learning_rate.decay_steps", "run.steps")
    form = DECAYS[rate.decay]
    # A warm-up or ramp longer than the run is no mistake: a trial run stops early.
    if form.ends and rate.warmup > rate.decay_steps:
        sentence = f"must be at most learning_rate.decay_steps = {rate.decay_steps}"
        yield DeckProblem("learning_rate.warmup", sentence, others)
    elif form.has_cooldown and rate.cooldown > rate.decay_steps - rate.warmup:
        sentence = (
            f"must be at most {rate.decay_steps - rate.warmup}, the steps that learning_rate.warmup = "
            f"{rate.warmup} leaves of learning_rate.decay_steps = {rate.decay_steps}"
        )
        yield DeckProblem("learning_rate.cooldown", sentence, ("learning_rate.warmup", *others))
    # With a decay that has neither an end nor a floor, decay_steps is accepted: a deck that has it may be run
    # with --set optimizer.name=schedule-free, whose decay is constant.
    if not form.ends and form.has_floor and "learning_rate.decay_steps" not in deck.sources.defaulted:
        sentence = f'has no effect with learning_rate.decay = "{rate.decay}" (leave it out)'
        yield DeckProblem("learning_rate.decay_steps", sentence, ("learning_rate.decay",), no_effect=True)
