"""Warning that the learning rate of a resumed run jumps at the step of its checkpoint."""

from __future__ import annotations

from hpctrain.deck.decays import ENDLESS, WITH_COOLDOWN
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.learning_rate import LearningRateSection
from hpctrain.deck.sources import toml_value
from hpctrain.optim.schedule import LearningRate
from hpctrain.train.batch_size import batch_at

MIN_RELATIVE_CHANGE = 0.01
"""Relative change of the learning rate above which there is a warning."""


def rate_change(deck: Deck, trained_deck: Deck, step: int) -> str:
    """Return a warning if the learning rate of a resumed run jumps; "" if it does not.

    It does not jump if the next step's rate lies between the last step's rate and the rate that the next step
    would have had with the checkpoint's deck.

    Args:
        deck: The deck of the resumed run.
        trained_deck: The deck that its checkpoint was trained with.
        step: Number of steps that the checkpoint was trained for.
    """
    if not 0 < step < deck.run.steps:
        return ""
    last, planned, now = _rate_at(trained_deck, step - 1), _rate_at(trained_deck, step), _rate_at(deck, step)
    if not _jumps(deck.learning_rate, deck, trained_deck, step):
        return ""
    verb = "rises" if now > last else "falls"
    rates = f"the learning rate {verb} from {last:.2e} in step {step} to {now:.2e} in step {step + 1}"
    if step < trained_deck.run.steps:
        rates += f" instead of {planned:.2e} as in the checkpoint's deck"
    if trained_deck.learning_rate.warmup <= step < deck.learning_rate.warmup:
        rates += f"; it warms up again until step {deck.learning_rate.warmup}"
    return deck.problem(_cause(deck, trained_deck), rates + _remedy(deck, trained_deck, step))


def _jumps(section: LearningRateSection, deck: Deck, trained_deck: Deck, step: int) -> bool:
    """Return True if the rate of the next step jumps when `section` is the schedule of the resumed run."""
    now = _rate_of(section, deck, step)
    lowest, highest = sorted((_rate_at(trained_deck, step - 1), _rate_at(trained_deck, step)))
    return not lowest * (1 - MIN_RELATIVE_CHANGE) <= now <= highest * (1 + MIN_RELATIVE_CHANGE)


def _rate_at(deck: Deck, step: int) -> float:
    """Return the learning rate of step `step` (from 0)."""
    return _rate_of(deck.learning_rate, deck, step)


def _rate_of(section: LearningRateSection, deck: Deck, step: int) -> float:
    """Return the rate of step `step` (from 0) by the schedule `section` and the batch sizes of `deck`."""
    return LearningRate(**section.model_dump()).at(step, batch_at(deck.batch, step))


def _cause(deck: Deck, trained_deck: Deck) -> str:
    """Return the key that changes the rate: preferably one that the user gave."""
    changed = [
        f"learning_rate.{name}"
        for name in LearningRateSection.model_fields
        if getattr(deck.learning_rate, name) != getattr(trained_deck.learning_rate, name)
    ]
    given = [key for key in changed if key not in deck.sources.defaulted]
    sources = [
        key for key in ("run.steps", "batch.global_size") if deck.value(key) != trained_deck.value(key)
    ]
    return next(iter([*given, *sources, *changed]), "batch.ramp_steps")


def _remedy(deck: Deck, trained_deck: Deck, step: int) -> str:
    """Return, in parentheses, how to keep the schedule of the checkpoint; "" if the change is intended."""
    rate, old = deck.learning_rate, trained_deck.learning_rate
    same_cooldown_form = rate.decay == old.decay and rate.decay in WITH_COOLDOWN
    if same_cooldown_form and rate.peak == old.peak and step >= rate.warmup:
        has_begun = step >= old.decay_steps - old.cooldown
        if has_begun:
            return f" (checkpoints up to step {old.decay_steps - old.cooldown} precede the decay)"
        if rate.decay_steps > step:
            return f" (--set learning_rate.cooldown={rate.decay_steps - step} starts the decay here)"
    shape = ["warmup", "decay_steps"] if rate.decay not in ENDLESS else ["warmup"]
    changed_keys = [
        f"learning_rate.{name}"
        for name in shape
        if getattr(rate, name) != getattr(old, name) and f"learning_rate.{name}" in deck.sources.defaulted
    ]
    if not changed_keys or rate.decay != old.decay:
        return ""
    kept = rate.model_copy(update={key.rpartition(".")[2]: trained_deck.value(key) for key in changed_keys})
    if _jumps(kept, deck, trained_deck, step):
        return ""  # another key, such as the peak, changes the rate as well
    arguments = " ".join(f"--set {key}={toml_value(trained_deck.value(key))}" for key in changed_keys)
    return f" ({arguments} keeps the schedule of the checkpoint)"
