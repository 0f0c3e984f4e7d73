"""The keys of `[learning_rate]`: the rate of every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpctrain.deck.decays import DECAYS, ENDLESS, WITH_COOLDOWN
from hpctrain.deck.key import Section, key

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
        f"Form of the decay after the warm-up; {_FORMS}.",
        derived='"cosine"; with schedule-free "constant"',
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
