"""The warning that a run which goes on has another learning rate than its checkpoint was to go on with."""

from __future__ import annotations

from hpctrain.deck.decays import ENDLESS, WITH_COOLDOWN
from hpctrain.deck.learning_rate import LearningRateSection
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.optim.schedule import LearningRate
from hpctrain.train.batch_size import batch_at

SMALLEST_CHANGE = 0.01
"""Relative change of the rate that is worth a warning."""


def rate_change(deck: Deck, before: Deck, step: int) -> str:
    """Return a warning with both rates if the learning rate jumps where a run goes on; "" if it does not.

    It does not jump where it stays between the rate of the last step and the one that the next step was to
    have.

    Args:
        deck: The deck of the run that goes on.
        before: The deck that its checkpoint was trained with.
        step: The number of steps that the checkpoint was trained for.
    """
    if not 0 < step < deck.run.steps:
        return ""
    last, planned, now = _rate_at(before, step - 1), _rate_at(before, step), _rate_at(deck, step)
    lowest, highest = sorted((last, planned))
    if lowest * (1 - SMALLEST_CHANGE) <= now <= highest * (1 + SMALLEST_CHANGE):
        return ""
    verb = "rises" if now > last else "falls"
    rates = f"the learning rate {verb} from {last:.2e} in step {step} to {now:.2e} in step {step + 1}"
    if step < before.run.steps:
        rates += f", which was to have {planned:.2e}"
    if before.learning_rate.warmup <= step < deck.learning_rate.warmup:
        rates += f"; it warms up again until step {deck.learning_rate.warmup}"
    return deck.problem(_cause(deck, before), rates + _remedy(deck, before, step))


def _rate_at(deck: Deck, step: int) -> float:
    """Return the rate of step `step`, from 0."""
    return LearningRate(**deck.learning_rate.model_dump()).at(step, batch_at(deck.batch, step))


def _cause(deck: Deck, before: Deck) -> str:
    """Return the key that moves the rate: one that was given if there is one, else one that others follow."""
    changed = [
        f"learning_rate.{name}"
        for name in LearningRateSection.model_fields
        if getattr(deck.learning_rate, name) != getattr(before.learning_rate, name)
    ]
    given = [key for key in changed if key not in deck.sources.defaulted]
    followed = [key for key in ("run.steps", "batch.global_size") if deck.value(key) != before.value(key)]
    return next(iter([*given, *followed, *changed]), "batch.ramp_steps")


def _remedy(deck: Deck, before: Deck, step: int) -> str:
    """Return in parentheses what keeps the rate where it was; "" where the change is what was asked for."""
    rate, old = deck.learning_rate, before.learning_rate
    cooled = rate.decay == old.decay and rate.decay in WITH_COOLDOWN
    if cooled and rate.peak == old.peak and step >= rate.warmup:
        begun = step >= old.decay_steps - old.cooldown
        if begun:
            return f" (checkpoints of up to step {old.decay_steps - old.cooldown} are from before the decay)"
        if rate.decay_steps > step:
            return f" (--set learning_rate.cooldown={rate.decay_steps - step} begins the decay here)"
    shape = ["warmup", "decay_steps"] if rate.decay not in ENDLESS else ["warmup"]
    names = [
        f"learning_rate.{name}"
        for name in shape
        if getattr(rate, name) != getattr(old, name) and f"learning_rate.{name}" in deck.sources.defaulted
    ]
    if not names or rate.decay != old.decay:
        return ""
    sets = " ".join(f"--set {key}={toml_value(before.value(key))}" for key in names)
    return f" ({sets} keeps the schedule of the checkpoint)"
