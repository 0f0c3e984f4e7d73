"""How long a run is: run.steps, or what of its tokens, or of epochs of its data, makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from typing import Any, TypeGuard

from hpctrain.deck.problem import Problem
from hpctrain.deck.schema import Batch, Deck

LENGTHS = ("steps", "tokens", "epochs")
"""Keys of [run] of which a deck has one: another file of it, or `--set`, replaces it by any of them."""


def steps_for_samples(samples: int, global_size: int, ramp_from: int, ramp_steps: int, begun: int = 0) -> int:
    """The fewest steps, those that have `begun` the run among them, of which the others take so many samples
    (or more), by the keys of [batch]: see `batch_at`. Of samples below none it is fewer than have begun it.
    """
    step, done = begun, 0
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
    """What a run that goes on has done: so many steps, of so many samples, perhaps with other batches; and
    how many tokens such a sample has, 0 where nobody knows.
    """

    steps: int = 0
    samples: int = 0
    sequence: int = 0

    def samples_of_length(self, sequence: int) -> int:
        """As how many sequences of another length the samples count."""
        return self.samples * (self.sequence or sequence) // sequence


def fill_steps(tables: Mapping[str, dict[str, Any]], begun: CompletedWork = CompletedWork()) -> bool:
    """Write run.steps where the tables have run.tokens instead, in place; whether that was so."""
    run, batch = tables["run"], tables["batch"]
    sizes = [run.get("tokens"), batch.get("sequence"), batch.get("global_size")]
    sizes += [batch.get("ramp_from", 1) or 1, batch.get("ramp_steps", 1) or 1]
    whole = [int(size) for size in sizes if _is_whole(size)]
    if "steps" in run or len(whole) < len(sizes) or min(whole) < 1:
        return False
    tokens, sequence, global_size, *_ = whole
    ramp = batch.get("ramp_from", 0), batch.get("ramp_steps", 0)
    samples = -(-tokens // sequence) - begun.samples_of_length(sequence)
    run["steps"] = steps_for_samples(samples, global_size, *ramp, begun.steps)
    return True


def steps_of_epochs(epochs: float, sequences: int, batch: Batch, begun: CompletedWork) -> int:
    """The fewest steps of a run that goes so many times through that many sequences."""
    samples = ceil(Fraction(str(epochs)) * sequences) - begun.samples_of_length(batch.sequence)
    return steps_for_samples(samples, batch.global_size, batch.ramp_from, batch.ramp_steps, begun.steps)


def is_epoch_count(value: object) -> bool:
    """Whether these can be counted; what else is wrong with them is told as of any key."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def length_problems(deck: Deck) -> Iterator[Problem]:
    """All that is wrong with how the length of a run is given."""
    run = deck.run
    given = [f"run.{name}" for name in ("tokens", "epochs") if getattr(run, name) is not None]
    if "run.steps" in deck.sources.places and not deck.sources.place("run.steps").note:
        given.insert(0, "run.steps")
    for key in given[1:]:
        sentence = f"gives the run's length beside {given[0]} (one of both has to go)"
        yield Problem(key, sentence, (given[0],))
    if run.tokens is not None and deck.data.dataset is not None:
        sentence = "counts tokens, and a dataset that you bring has samples (run.steps would do)"
        yield Problem("run.tokens", sentence, ("data.dataset",))


def _is_whole(value: object) -> TypeGuard[float]:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)
