"""Length of a run: run.steps, or the steps that follow from run.tokens or run.epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from typing import Any, TypeGuard

from hpctrain.deck.sections.batch import Batch

LENGTHS = ("steps", "tokens", "epochs")
"""Keys of [run] that give the length. A deck has one of them; `--set` may replace it by another one."""


def steps_for_samples(
    samples: int, global_size: int, ramp_from: int, ramp_steps: int, steps_done: int = 0
) -> int:
    """Return the smallest number of steps of a run that trains on at least `samples` samples.

    In the ramp the batch size grows linearly with the step, rounded down to a multiple of `ramp_from`.

    Args:
        samples: Samples to train on after the completed steps. With 0, the result is `steps_done`. If it is
            negative, since the run has trained on too many, the result may be below `steps_done`.
        global_size: Batch size in samples after the ramp.
        ramp_from: Batch size of the first step, at most `global_size`; 0 without a ramp.
        ramp_steps: Number of steps of the ramp, counted from the beginning of the run.
        steps_done: Number of completed steps, which are part of the result and of the ramp.
    """
    step, done = steps_done, 0
    while ramp_from and step < ramp_steps:
        more = global_size - ramp_from
        size = (ramp_from + more * step // ramp_steps) // ramp_from * ramp_from
        end = ramp_steps
        if size + ramp_from <= global_size:
            end = min(end, -(-size * ramp_steps // more))  # the first step of a larger batch
        if done + (end - step) * size >= samples:
            return step - (done - samples) // size
        done, step = done + (end - step) * size, end
    return step - (done - samples) // global_size


@dataclass(frozen=True)
class CompletedWork:
    """Steps and samples that a resumed run has completed.

    Attributes:
        steps: Number of steps.
        samples: Number of samples in these steps, which may have had other batch sizes.
        sequence: Tokens in a sample; 0 if that is not known.
    """

    steps: int = 0
    samples: int = 0
    sequence: int = 0

    def samples_of_length(self, sequence: int) -> int:
        """Return the number of sequences of `sequence` tokens in the completed samples, rounded down.

        If the length of these samples is not known, it is taken to be `sequence`.
        """
        return self.samples * (self.sequence or sequence) // sequence


def add_steps(tables: Mapping[str, dict[str, Any]], completed: CompletedWork = CompletedWork()) -> bool:
    """Set run.steps from run.tokens in place, and return True; otherwise change nothing and return False.

    Nothing is changed if run.steps is given, or if run.tokens, batch.sequence or batch.global_size is missing
    or is not a positive whole number. Keys of the ramp (batch.ramp_from, batch.ramp_steps) may be missing.

    Args:
        tables: Sections of the deck by name, with batch.sequence of the preset or of model.from filled in.
            Old keys are not read.
        completed: Work that the resumed run has completed, which counts as part of run.tokens and run.steps.
    """
    run, batch = tables["run"], tables["batch"]
    sizes = [run.get("tokens"), batch.get("sequence"), batch.get("global_size")]
    sizes += [batch.get("ramp_from", 1) or 1, batch.get("ramp_steps", 1) or 1]
    numbers = [int(size) for size in sizes if _is_integer(size)]
    if "steps" in run or len(numbers) < len(sizes) or min(numbers) < 1:
        return False
    tokens, sequence, global_size, *_ = numbers
    ramp = batch.get("ramp_from", 0), batch.get("ramp_steps", 0)
    samples = -(-tokens // sequence) - completed.samples_of_length(sequence)
    run["steps"] = steps_for_samples(samples, global_size, *ramp, completed.steps)
    return True


def steps_of_epochs(epochs: float, sequences: int, batch: Batch, completed: CompletedWork) -> int:
    """Return the smallest number of steps in which a run passes `epochs` times over all sequences.

    The whole batch in which the last epoch ends is trained on. The result may be below the completed steps.

    Args:
        epochs: Positive number of epochs of the whole run, completed work included.
        sequences: Number of sequences in an epoch.
        batch: Section with the batch sizes.
        completed: Work that the resumed run has completed; its steps are part of the result.
    """
    samples = ceil(Fraction(str(epochs)) * sequences) - completed.samples_of_length(batch.sequence)
    return steps_for_samples(samples, batch.global_size, batch.ramp_from, batch.ramp_steps, completed.steps)


def is_epoch_count(value: object) -> bool:
    """Return True if a value is a positive finite number, whole or not. Booleans are no numbers here.

    The validation reports other values of run.epochs.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _is_integer(value: object) -> TypeGuard[float]:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
