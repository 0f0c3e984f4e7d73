"""Result of `hpctrain compare` in words: first difference of two runs, or of a run and its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from hpctrain.checkpoint.provenance import RecordedLoss
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE
from hpctrain.text import counted, fitted, ranges, table
from hpctrain.train.common_start import CommonStart
from hpctrain.train.compared_run import ComparedRun, loss_difference
from hpctrain.train.divergence import Rounding, StepDifference, changed_between, first_of, reduction_error
from hpctrain.train.fingerprints import LOSS, NORM, PHASES, RATE, StepFingerprints
from hpctrain.train.replay import LOSS_ROUNDING

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
class RecordMismatch:
    """Differences between the records of a run and its replay.

    Attributes:
        run: The run.
        step: First step whose recorded loss or gradient norm differs, if any.
        recorded: Recorded values of this step.
        replayed: Replayed values of this step.
        largest: Largest relative difference of losses and norms over all steps.
        reasons: Reasons why bits may differ.
        wrong: Tensors of a checkpoint of the run that differ from the replay, the largest differences first.
        compared: Number of tensors of this checkpoint that were compared.
        checkpoint_step: Step of this checkpoint, if there is one.
    """

    run: ComparedRun
    step: int | None
    recorded: RecordedLoss | None
    replayed: RecordedLoss | None
    largest: float
    reasons: Sequence[str]
    wrong: Sequence[StepDifference]
    compared: int
    checkpoint_step: int | None

    @property
    def exists(self) -> bool:
        """True if any record or tensor differs."""
        return self.step is not None or bool(self.wrong)


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison of two runs.

    Attributes:
        one: First run.
        other: Second run.
        start: Step after which both were replayed.
        first: Replayed steps of the first run.
        second: Replayed steps of the second run; the last one is the first that differs, if any does.
        differences: All tensors of the step in which the replays differ; empty if they do not.
        exact: True if the bits must be equal.
        first_other_bits: First tensor whose bits differ, if any.
        mismatches: Differences of each run's records from its replay; empty if the replays differ.
        rounding: Limits of differences that count as rounding.
    """

    one: ComparedRun
    other: ComparedRun
    start: CommonStart
    first: Sequence[StepFingerprints]
    second: Sequence[StepFingerprints]
    differences: Sequence[StepDifference]
    exact: bool
    first_other_bits: StepDifference | None
    mismatches: Sequence[RecordMismatch]
    rounding: Rounding


def recorded_sentence(one: ComparedRun, other: ComparedRun, differing_step: int | None, exact: bool) -> str:
    """Return the sentence about the recorded losses and gradient norms of two runs.

    Args:
        one: First run.
        other: Second run.
        differing_step: First step whose records differ, if any.
        exact: True if the bits are comparable.
    """
    both = sorted(one.step_losses.keys() & other.step_losses.keys())
    if not both:
        return "No step is recorded in both runs."
    if differing_step is None:
        same = "equal, bit for bit" if exact else "equal up to rounding"
        return f"Recorded losses and gradient norms of {counted(len(both), 'common step')} are {same}."
    gap = loss_difference(one.step_losses[differing_step], other.step_losses[differing_step])
    by = f"by {gap:.1e}" if isfinite(gap) else "one is not finite"
    before = [step for step in both if step < differing_step]
    until = f"are equal up to step {before[-1]}; " if before else "differ: "
    return f"Recorded losses and gradient norms {until}step {differing_step} is the first that differs, {by}."


def phase_table(differences: Sequence[StepDifference], same_layout: bool, width: int | None) -> list[str]:
    """Return the lines of a table with the numbers of compared and differing tensors in each phase of a step.

    Args:
        differences: All tensors of the step.
        same_layout: True if both runs have the same layout.
        width: Largest width of the table, if limited.
    """
    rows = [("phase", "tensors", "other bits", "above rounding", "first", "difference", "rounding")]
    for phase in PHASES:
        tensors = [each for each in differences if each.phase == phase]
        if not tensors:
            continue
        beyond = [each for each in tensors if each.exceeds_rounding]
        bits = [each for each in tensors if not each.equal]
        counts = (
            str(len(tensors)),
            str(len(bits)) if same_layout or phase != "gradient" else "",
            str(len(beyond)),
        )
        cells = "", "", ""
        if beyond or bits:
            first = (beyond or bits)[0]
            limit = f"{first.allowed:.0e}" if isfinite(first.allowed) else ""
            cells = first.description, size_text(first.size), limit
        rows.append((phase, *counts, *cells))
    if width is not None and max(map(len, table(rows, (0, 4)))) > width:
        rows = [rows[0], *(row for row in rows[1:] if row[4])]
    return fitted(rows, (0, 4), width)


def size_text(size: float) -> str:
    """Return the relative difference of a tensor as text: a number, "equal", or "other" if it is infinite."""
    return "other" if size == inf else "equal" if size == 0.0 else f"{size:.1e}"


def verdict_of(result: ComparisonResult) -> tuple[int, list[str]]:
    """Return the exit code of a comparison and the sentences that state its result."""
    if result.differences:
        return EXIT_DIFFERENT, _difference_sentences(result)
    mismatches = [each for each in result.mismatches if each.exists]
    if len(mismatches) == 2 and all(map(_is_rounding, mismatches)):
        mismatches = []  # both runs were recorded on machines that round differently from this one
    if mismatches:
        return EXIT_DIFFERENT, [line for each in mismatches for line in _mismatch_sentences(result, each)]
    last, recorded = result.second[-1].step, result.start.recorded
    steps = counted(len(result.second), "step")
    where = "their beginning" if result.start.step == 0 else f"step {result.start.step}"
    same = "are equal, bit for bit" if result.exact else "are equal up to rounding"
    first = "No difference" if recorded is None or recorded <= last else "Not compared far enough"
    lines = [f"{first}: the {steps} after {where}, up to step {last}, {same}{_records_clause(result)}."]
    each = result.first_other_bits
    if each is not None and not result.exact:
        lines.append(
            f"Bits first differ in step {each.step}, {_PHASES[each.phase]}: {each.description}, by "
            f"{size_text(each.size)} of its {_measure(each)}, which is rounding (at most {each.allowed:.0e})."
        )
    if not result.exact:
        lines.append(_tolerance_sentence(result.rounding))
    if recorded is not None and recorded > last:
        more = recorded - result.start.step
        lines.append(
            f"Their records first differ in step {recorded}; compare up to there with `--steps {more}`."
        )
        return EXIT_DIFFERENT, lines
    if recorded is not None:
        lines.append(f"Their records differ from step {recorded} on, because rounding errors grow.")
    return EXIT_DONE, lines


def _is_rounding(mismatch: RecordMismatch) -> bool:
    """Return True if all differences from the records are as small as rounding errors."""
    allowed = LOSS_ROUNDING[mismatch.run.deck.precision.compute]
    return mismatch.largest <= allowed and not any(each.exceeds_rounding for each in mismatch.wrong)


def _records_clause(result: ComparisonResult) -> str:
    """Return a clause that the replays equal the records, or nothing if no step was recorded."""
    runs = (result.one, result.other)
    recorded = any(each.step in run.step_losses for run in runs for each in result.second)
    rounding = " up to rounding" if any(each.largest for each in result.mismatches) else ""
    return f", and equal to both records{rounding}" if recorded else ""


def _tolerance_sentence(rounding: Rounding) -> str:
    activations, gradients, weights = rounding
    return (
        f"Differences count as rounding up to {activations:.0e} of the norm of activations, "
        f"{gradients:.0e} of gradients and {weights:.0e} of weights and state."
    )


def _difference_sentences(result: ComparisonResult) -> list[str]:
    """Return the sentences about two replays that differ."""
    first = first_of(result.differences, bits=result.exact)
    assert first is not None
    step, by = first.step, f"by {size_text(first.size)} of its {_measure(first)}"
    if first.phase == "samples":
        numbers = _differing_samples(result)
        by = (
            f"of {counted(len(numbers), 'sample')} ({ranges(numbers, ', ')})" if numbers else "in their order"
        )
    elif first.size == inf:
        by = "one of the two is not finite"
    elif first.size == 0.0:
        by = "only in signs of zeros, or in bits that cancel in its checksums"
    where = _ranks_clause(first, len(result.second[-1].tensors[0].bits))
    line = f"The runs first differ in step {step}, {_PHASES[first.phase]}: {first.description}, {by}{where}"
    if first.phase == "samples":
        return [f"{line}."]
    if not first.exceeds_rounding:
        line += (
            f". This is as small as rounding (at most {first.allowed:.0e}), but layout, versions, kernels "
            "and keys are the same, so that bits must be equal. The machines differ, or there was a fault"
        )
    elif isfinite(first.size):
        line += f" (rounding: at most {first.allowed:.0e})"
    lines = [f"{line}.", *_hints(result, first)]
    each = None if result.exact else result.first_other_bits
    if each is not None and (each.step, each.description) != (step, first.description):
        place = f"in step {each.step}, {_PHASES[each.phase]}: {each.description}"
        lines.append(f"Bits first differ {place}, by {size_text(each.size)}.")
    return lines


def _measure(each: StepDifference) -> str:
    return "value" if each.name in (LOSS, NORM, RATE) else "norm"


def _ranks_clause(first: StepDifference, ranks: int) -> str:
    """Return a clause with the ranks that have a difference, or nothing if all have it."""
    if not first.ranks or len(first.ranks) == ranks:
        return ""
    numbers = ranges(first.ranks, ", ")
    return f", only on rank {numbers}" if len(first.ranks) == 1 else f", on ranks {numbers}"


def _differing_samples(result: ComparisonResult) -> list[int]:
    one, other = result.first[len(result.second) - 1].samples, result.second[-1].samples
    return sorted(number for number in one.keys() & other.keys() if one[number] != other[number])


def _hints(result: ComparisonResult, first: StepDifference) -> list[str]:
    """Return a sentence that says which of the two runs is wrong, if the fingerprints show it."""
    number = len(result.second) - 1
    one, other = result.first[number], result.second[number]
    if first.phase == "reduction":
        gaps = [reduction_error(each, first.name) for each in (one, other)]
        right, allowed = min(gaps), result.rounding.gradients
        if right <= allowed < max(gaps):
            wrong = "first" if gaps[0] > allowed else "second"
            return [
                f"In the {wrong} run it is not the sum of the gradients of its ranks: it differs by "
                f"{max(gaps):.1e} of its norm ({right:.1e} in the other run)."
            ]
    if first.phase == "update":
        runs = {"first": result.one, "second": result.other}
        skipped = [name for name, run in runs.items() if run.rows.get(first.step, {}).get("spike")]
        if len(skipped) == 1:
            return [f"The {skipped[0]} run skipped this update because of a spike."]
    if first.phase == "start" and number:
        names = [
            name
            for name, steps in (("first", result.first), ("second", result.second))
            if first.name in changed_between(steps[number - 1], steps[number])
        ]
        if len(names) == 1:
            return [f"In the {names[0]} run it changed in memory between two steps."]
    return []


def _mismatch_sentences(result: ComparisonResult, mismatch: RecordMismatch) -> list[str]:
    """Return the sentences about a run whose records differ from its replay."""
    name = "first" if mismatch.run is result.one else "second"
    lines = []
    if mismatch.step is not None and mismatch.recorded is not None and mismatch.replayed is not None:
        same = mismatch.recorded.loss == mismatch.replayed.loss
        gap = loss_difference(mismatch.recorded, mismatch.replayed)
        by = f"by {gap:.1e}" if isfinite(gap) else "one of the two is not finite"
        place = f"its {'gradient norm' if same else 'loss'} of step {mismatch.step}"
        before = result.start.step >= mismatch.step - 1
        if same:
            when = f"in the backward pass of step {mismatch.step} or in its gradient reduction"
        elif before:
            when = f"before the loss of step {mismatch.step}"
        else:
            when = f"after the gradient reduction of step {mismatch.step - 1} and before the next loss"
        lines.append(
            f"The replays are equal, but the {name} run recorded other values than its replay: "
            f"{place} is the first, {by}. It had a fault that does not repeat, {when}."
        )
    elif mismatch.wrong:
        lines.append(
            f"The replays and records are equal, but the checkpoint of the {name} run after step "
            f"{mismatch.checkpoint_step} differs from its replay. It had a fault that does not repeat, in "
            "the last update before the checkpoint or when it was written."
        )
    if mismatch.wrong:
        worst = mismatch.wrong[:_NAMED]
        largest = ", ".join(f"{each.description} ({size_text(each.size)})" for each in worst)
        lines.append(
            f"Of the {mismatch.compared} tensors of its checkpoint after step {mismatch.checkpoint_step}, "
            f"{len(mismatch.wrong)} differ from the replay; the largest differences: {largest}."
        )
    if mismatch.reasons:
        lines.append(
            f"This is more than the rounding that is expected with {' and '.join(mismatch.reasons)}."
        )
    return lines
