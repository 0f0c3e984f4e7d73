"""What `hpctrain compare` says in the end: where two runs part, or which one is not what its replay gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from hpctrain.checkpoint.provenance import RecordedLoss
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE
from hpctrain.text import counted, fitted, ranges, table
from hpctrain.train.common_start import CommonStart
from hpctrain.train.compared_run import ComparedRun, loss_difference
from hpctrain.train.divergence import Rounding, StepDifference, changed_between, first_of, unsummed
from hpctrain.train.fingerprints import LOSS, NORM, PHASES, RATE, StepPrints
from hpctrain.train.replay import ROUNDING

_PHASES = {
    "start": "before the step",
    "samples": "in its samples",
    "forward": "in the forward pass",
    "gradient": "in the ranks' own gradients",
    "reduction": "in the sums of gradients",
    "update": "in the update",
}
_NAMED = 3


@dataclass(frozen=True)
class Departure:
    """Where a run's records are not what its replay gives: the first such step, if any, with both figures;
    how far apart these are at most; why bits may differ; of the `compared` tensors of its checkpoint after
    step `behind`, those that are `wrong`, the worst first.
    """

    run: ComparedRun
    step: int | None
    recorded: RecordedLoss | None
    replayed: RecordedLoss | None
    largest: float
    reasons: Sequence[str]
    wrong: Sequence[StepDifference]
    compared: int
    behind: int | None

    @property
    def there(self) -> bool:
        """Whether there is any."""
        return self.step is not None or bool(self.wrong)


@dataclass(frozen=True)
class ComparisonResult:
    """All that was found: the steps of both replays; what is `apart` in the step in which these differ, if
    they do; whether bits had to be the same (`exact`), and the first that were not (`bits`); departures of
    both.
    """

    one: ComparedRun
    other: ComparedRun
    start: CommonStart
    first: Sequence[StepPrints]
    second: Sequence[StepPrints]
    apart: Sequence[StepDifference]
    exact: bool
    bits: Sequence[StepDifference]
    departures: Sequence[Departure]
    rounding: Rounding


def recorded_sentence(one: ComparedRun, other: ComparedRun, parts: int | None, alike: bool) -> str:
    """Where the recorded figures of two runs part."""
    both = sorted(one.step_losses.keys() & other.step_losses.keys())
    if not both:
        return "No step is recorded in both runs."
    if parts is None:
        same = "equal, bit for bit" if alike else "equal up to rounding"
        return f"Recorded losses and gradient norms of {counted(len(both), 'common step')} are {same}."
    gap = loss_difference(one.step_losses[parts], other.step_losses[parts])
    by = f"by {gap:.1e}" if isfinite(gap) else "one is not finite"
    before = [step for step in both if step < parts]
    until = f"are equal up to step {before[-1]}; " if before else "differ: "
    return f"Recorded losses and gradient norms {until}step {parts} is the first that differs, {by}."


def phase_table(apart: Sequence[StepDifference], alike: bool, width: int | None) -> list[str]:
    """Of each phase of a step how many tensors were compared, and how many differ, and which one first."""
    rows = [("phase", "tensors", "other bits", "above rounding", "first", "difference", "rounding")]
    for phase in PHASES:
        own = [each for each in apart if each.phase == phase]
        if not own:
            continue
        beyond = [each for each in own if each.beyond]
        bits = [each for each in own if not each.equal]
        shown = (beyond or bits or own)[0]
        told = shown.told, size_text(shown.size), f"{shown.allowed:.0e}" if isfinite(shown.allowed) else ""
        what = told if beyond or bits else ("", "", "")
        counts = str(len(own)), str(len(bits)) if alike or phase != "gradient" else "", str(len(beyond))
        rows.append((phase, *counts, *what))
    if width is not None and max(map(len, table(rows, (0, 4)))) > width:
        rows = [rows[0], *(row for row in rows[1:] if row[4])]
    return fitted(rows, (0, 4), width)


def size_text(size: float) -> str:
    """How far apart a tensor is, in a few letters."""
    return "other" if size == inf else "equal" if size == 0.0 else f"{size:.1e}"


def verdict_of(found: ComparisonResult) -> tuple[int, list[str]]:
    """The exit code, and what is said."""
    if found.apart:
        return EXIT_DIFFERENT, _parted(found)
    departed = [each for each in found.departures if each.there]
    if len(departed) == 2 and all(map(_rounds, departed)):
        departed = []  # both were recorded where something rounds otherwise, as on another kind of machine
    if departed:
        return EXIT_DIFFERENT, [line for each in departed for line in _departed(found, each)]
    last, recorded = found.second[-1].step, found.start.recorded
    steps = counted(len(found.second), "step")
    where = "their beginning" if found.start.step == 0 else f"step {found.start.step}"
    same = "are equal, bit for bit" if found.exact else "are equal up to rounding"
    first = "No difference" if recorded is None or recorded <= last else "Not compared far enough"
    lines = [f"{first}: the {steps} after {where}, up to step {last}, {same}{_own(found)}."]
    if found.bits and not found.exact:
        each = found.bits[0]
        lines.append(
            f"The first other bits are in step {each.step}, {_PHASES[each.phase]}: {each.told}, by "
            f"{size_text(each.size)} of its {_measure(each)}, which is rounding (at most {each.allowed:.0e})."
        )
    if not found.exact:
        lines.append(_tolerances(found))
    if recorded is not None and recorded > last:
        more = recorded - found.start.step
        lines.append(
            f"Their records first differ in step {recorded}; compare up to there with `--steps {more}`."
        )
        return EXIT_DIFFERENT, lines
    if recorded is not None:
        lines.append(f"Their records differ from step {recorded} on, because rounding errors grow.")
    return EXIT_DONE, lines


def _rounds(departure: Departure) -> bool:
    """Whether what departs is of the size of rounding."""
    allowed = ROUNDING[departure.run.deck.precision.compute]
    return departure.largest <= allowed and not any(each.beyond for each in departure.wrong)


def _own(found: ComparisonResult) -> str:
    """Whether the records come out again."""
    known = any(each.step in run.step_losses for run in (found.one, found.other) for each in found.second)
    return ", and equal to both records" if known else ""


def _tolerances(found: ComparisonResult) -> str:
    activations, gradients, weights = found.rounding
    return (
        f"Differences count as rounding up to {activations:.0e} of the norm of activations, "
        f"{gradients:.0e} of gradients and {weights:.0e} of weights and state."
    )


def _parted(found: ComparisonResult) -> list[str]:
    """What is said of replays that differ."""
    first = first_of(found.apart, bits=found.exact)
    assert first is not None
    step, by = first.step, f"by {size_text(first.size)} of its {_measure(first)}"
    if first.phase == "samples":
        numbers = _other_samples(found)
        by = (
            f"of {counted(len(numbers), 'sample')} ({ranges(numbers, ', ')})" if numbers else "in their order"
        )
    elif first.size == inf:
        by = "one of the two is not finite"
    elif first.size == 0.0:
        by = "only in signs of zeros, or in bits that cancel in its checksums"
    where = _on(first, len(found.second[-1].prints[0].bits))
    line = f"The runs first differ in step {step}, {_PHASES[first.phase]}: {first.told}, {by}{where}"
    if first.phase == "samples":
        return [f"{line}."]
    if not first.beyond:
        line += (
            f". This is as small as rounding (at most {first.allowed:.0e}), but layout, versions, kernels "
            "and keys are the same, so that bits must be equal. The machines differ, or there was a fault"
        )
    elif isfinite(first.size):
        line += f" (rounding: at most {first.allowed:.0e})"
    lines = [f"{line}.", *_hints(found, first)]
    if not found.exact and found.bits and (found.bits[0].step, found.bits[0].told) != (step, first.told):
        each = found.bits[0]
        bits = f"The first other bits are in step {each.step}, {_PHASES[each.phase]}: {each.told}"
        lines.append(f"{bits}, by {size_text(each.size)}.")
    return lines


def _measure(each: StepDifference) -> str:
    return "value" if each.name in (LOSS, NORM, RATE) else "norm"


def _on(first: StepDifference, ranks: int) -> str:
    """On which ranks, where it is not on all."""
    if not first.ranks or len(first.ranks) == ranks:
        return ""
    numbers = ranges(first.ranks, ", ")
    return f", only on rank {numbers}" if len(first.ranks) == 1 else f", on ranks {numbers}"


def _other_samples(found: ComparisonResult) -> list[int]:
    one, other = found.first[len(found.second) - 1].samples, found.second[-1].samples
    return sorted(number for number in one.keys() & other.keys() if one[number] != other[number])


def _hints(found: ComparisonResult, first: StepDifference) -> list[str]:
    """What tells which of the two runs is wrong."""
    number = len(found.second) - 1
    one, other = found.first[number], found.second[number]
    if first.phase == "reduction":
        gaps = [unsummed(each, first.name) for each in (one, other)]
        right, allowed = min(gaps), found.rounding.gradients
        if right <= allowed < max(gaps):
            wrong = "first" if gaps[0] > allowed else "second"
            return [
                f"In the {wrong} run it is not the sum of the gradients of its ranks: it differs by "
                f"{max(gaps):.1e} of its norm ({right:.1e} in the other run)."
            ]
    if first.phase == "update":
        runs = {"first": found.one, "second": found.other}
        left = [name for name, run in runs.items() if run.rows.get(first.step, {}).get("spike")]
        if len(left) == 1:
            return [f"The {left[0]} run skipped this update because of a spike."]
    if first.phase == "start" and number:
        names = {}
        for name, steps in (("first", found.first), ("second", found.second)):
            changed = changed_between(steps[number - 1], steps[number])
            if first.name in changed:
                names[name] = changed
        if len(names) == 1:
            name = next(iter(names))
            return [f"In the {name} run it changed in memory between two steps."]
    return []


def _departed(found: ComparisonResult, departure: Departure) -> list[str]:
    """What is said of a run whose records are not what its replay gives."""
    name = "first" if departure.run is found.one else "second"
    lines = []
    if departure.step is not None and departure.recorded is not None and departure.replayed is not None:
        same = departure.recorded.loss == departure.replayed.loss
        gap = loss_difference(departure.recorded, departure.replayed)
        by = f"by {gap:.1e}" if isfinite(gap) else "one of the two is not finite"
        place = f"its {'gradient norm' if same else 'loss'} of step {departure.step}"
        before = found.start.step >= departure.step - 1
        if same:
            when = f"in the backward pass of step {departure.step} or in its gradient reduction"
        elif before:
            when = f"before the loss of step {departure.step}"
        else:
            when = f"after the gradient reduction of step {departure.step - 1} and before the next loss"
        lines.append(
            f"The replays are equal, but the {name} run recorded other values than its replay: "
            f"{place} is the first, {by}. It had a fault that does not repeat, {when}."
        )
    elif departure.wrong:
        lines.append(
            f"The replays and records are equal, but the checkpoint of the {name} run after step "
            f"{departure.behind} differs from its replay. It had a fault that does not repeat, in the last "
            "update before the checkpoint or when it was written."
        )
    if departure.wrong:
        worst = departure.wrong[:_NAMED]
        told = ", ".join(f"{each.told} ({size_text(each.size)})" for each in worst)
        lines.append(
            f"Of the {departure.compared} tensors of its checkpoint after step {departure.behind}, "
            f"{len(departure.wrong)} differ from the replay; the largest differences: {told}."
        )
    if departure.reasons:
        lines.append(
            f"This is more than the rounding that is expected with {' and '.join(departure.reasons)}."
        )
    return lines
