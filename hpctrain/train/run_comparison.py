"""Comparison of two runs (`hpctrain compare`): first difference of their records, and of replays of both.

Nothing is written. Each run is replayed by its own deck from the newest checkpoint at which both are equal,
one after the other, and the fingerprints of every step are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from hpctrain.checkpoint.provenance import RecordedLoss
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.comm.world import World
from hpctrain.deck.check import check_world, world_problems
from hpctrain.deck.code import CodeTrust
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE, HpctrainError
from hpctrain.files import finite
from hpctrain.report.contents import layout_text
from hpctrain.report.runs import RunRecord, side_by_side
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted
from hpctrain.train.common_start import (
    CommonStart,
    checkpoint_fingerprints,
    find_start,
    first_recorded_difference,
    require_comparable,
    same_environment,
    state_fingerprints,
)
from hpctrain.train.compared_run import ComparedRun, load_run, loss_difference
from hpctrain.train.corpus_comparison import require_same_source
from hpctrain.train.divergence import Rounding, StepComparison, StepDifference, first_of, parameter_of
from hpctrain.train.fingerprints import LOSS, NORM, StepFingerprints, fingerprints
from hpctrain.train.recorded_losses import RecordedLosses
from hpctrain.train.replay import (
    LOSS_ROUNDING,
    NUMERICS_SECTIONS,
    STEPS,
    open_replay,
    refuse_other_order,
    rounding_reasons,
)
from hpctrain.train.stored_choices import computed_by, with_stored_choices
from hpctrain.train.verdict import (
    ComparisonResult,
    RecordMismatch,
    phase_table,
    recorded_sentence,
    size_text,
    verdict_of,
)

MOST_STEPS = 50
"""Largest number of steps that are replayed without `--steps`."""

_HEAD = f"{'run':<6} {'step':>8}  {'recorded':>12}  {'replayed':>12}  {'error':>7}  first difference"


@dataclass
class ReplayedRun:
    """Replay of a run.

    Attributes:
        run: The run.
        deck: Deck of the replay.
        layout: Sizes of the axes of its layout.
        kernels: Kernels and libraries that computed it, by purpose.
        reasons: Reasons why bits may differ from the records.
        steps: Fingerprints of the replayed steps.
    """

    run: ComparedRun
    deck: Deck
    layout: dict[str, int]
    kernels: dict[str, str]
    reasons: list[str]
    steps: list[StepFingerprints] = field(default_factory=list)


def compare(
    world: World,
    paths: tuple[Path, Path],
    steps: int | None,
    replays: bool,
    show: Callable[[str], None],
    records_only: bool = False,
    trust: CodeTrust = CodeTrust(),  # noqa: B008 - nothing is trusted
) -> int:
    """Show on rank 0 how two runs differ, and their first difference. Collective.

    Args:
        world: All ranks.
        paths: Folders or checkpoints of the two runs.
        steps: Number of steps to replay; None to choose it from the records.
        replays: True to replay both runs if `records_only` is False.
        show: Prints lines.
        records_only: True to show only decks, results and speeds side by side.
        trust: Code of the runs that may be executed.

    Returns:
        The exit code: 0 if the runs differ by no more than rounding, or with `records_only`; else 1.

    Raises:
        HpctrainError: The runs cannot be compared. It is raised on all ranks.
    """

    def print_lines(lines: Sequence[str]) -> None:
        if world.rank == 0 and lines:
            show("\n".join(lines))

    with world.agreement():
        if len({realpath(path) for path in paths}) == 1:
            raise HpctrainError(f"{paths[0]}: is given twice; name two different runs")
    one, other = (load_run(world, path, trust) for path in paths)
    print_lines(side_by_side(_record(one), _record(other), columns()))
    damaged = [f"Skipped: {each}" for run in (one, other) for each in run.damaged]
    print_lines([line for each in damaged for line in ("", *fit(each, columns()))])
    if records_only:
        return EXIT_DONE
    differing_step = first_recorded_difference(one, other)
    sentence = recorded_sentence(one, other, differing_step, same_environment(one, other))
    print_lines(["", *fit(sentence, columns())])
    if not replays:
        return EXIT_DONE if differing_step is None else EXIT_DIFFERENT
    with world.agreement():
        require_comparable(one, other)
    return _compare_replays(world, one, other, steps, print_lines)


def _compare_replays(
    world: World,
    one: ComparedRun,
    other: ComparedRun,
    steps: int | None,
    print_lines: Callable[[Sequence[str]], None],
) -> int:
    """Replay two runs from their common start, and print how the steps differ. Return the exit code.

    This call is collective. The second replay ends with the first step that differs.

    Args:
        world: All ranks.
        one: First run.
        other: Second run.
        steps: Number of steps to replay; None to choose it from the records.
        print_lines: Prints lines, on rank 0.
    """
    start = find_start(world, one, other)
    count = _number_of_steps(one, other, start, steps)
    decks = [_deck_on_these_ranks(world, run, start.step) for run in (one, other)]
    if start.step == 0:
        purpose = "its steps are replayed from the model that its run started from"
        for run, (deck, _) in zip((one, other), decks, strict=True):
            checkpoint = run.stored_at(0)
            require_same_source(world, deck, checkpoint.state, checkpoint.path, purpose)
    notes = [*_opening(start, count, decks), *_rollback_sentences((one, other), start, count)]
    print_lines(["", *(line for each in notes for line in fit(each, columns())), "", _HEAD])

    def show_first(replay: ReplayedRun) -> bool:
        print_lines([_step_line("first", replay)])
        return False

    first = _replay(world, one, decks[0][0], start, count, show_first)
    rounding = Rounding.of(*(deck for deck, _ in decks))
    comparison = StepComparison(rounding, same_layout=False, exact=False)
    differences: list[StepDifference] = []
    first_other_bits: StepDifference | None = None

    def compare_second(replay: ReplayedRun) -> bool:
        nonlocal differences, first_other_bits
        if len(replay.steps) == 1:
            comparison.same_layout = replay.layout == first.layout
            comparison.exact = start.equal and _must_be_equal(first, replay)
        tensors = comparison.of(first.steps[len(replay.steps) - 1], replay.steps[-1])
        differing = comparison.first(tensors)
        other_bits = first_of(tensors, bits=True) if comparison.same_layout else None
        first_other_bits = first_other_bits or other_bits
        print_lines([_step_line("second", replay, differing or other_bits)])
        differences = tensors if differing is not None else []
        return differing is not None

    second = _replay(world, other, decks[1][0], start, count, compare_second)
    mismatches = []
    if differences:
        table = phase_table(differences, comparison.same_layout, columns())
        print_lines(["", f"step {second.steps[-1].step}", *table])
    else:
        mismatches = [_mismatch(world, replay, comparison.negligible) for replay in (first, second)]
    result = ComparisonResult(
        one,
        other,
        start,
        first.steps,
        second.steps,
        differences,
        comparison.exact,
        first_other_bits,
        mismatches,
        rounding,
    )
    code, sentences = verdict_of(result)
    print_lines(["", *(line for sentence in sentences for line in fit(sentence, columns()))])
    return code


def _record(run: ComparedRun) -> RunRecord:
    chain = run.history
    return RunRecord(run.path, run.deck, run.rows, chain[-1] if chain else None, run.last)


def _number_of_steps(one: ComparedRun, other: ComparedRun, start: CommonStart, requested: int | None) -> int:
    """Return the number of steps to replay.

    If none is requested, the replay extends to the step in which records or checkpoints differ, and on to the
    next checkpoint. It ends before a step to which a run returned in order to skip samples.
    """
    most = min(run.deck_after(start.step).run.steps for run in (one, other)) - start.step
    rollbacks = [step for run in (one, other) if (step := run.next_rollback(start.step)) is not None]
    most = min([most, *(step - start.step for step in rollbacks)])
    if most < 1:
        raise HpctrainError(
            f"{one.path} and {other.path} end at step {start.step}, so that there is no step to replay"
        )
    if requested is not None:
        return min(requested, most)
    known = [step for step in (start.recorded, start.stored) if step is not None]
    last = min(known) if known else min(start.step + STEPS, one.last, other.last)
    checkpoints = [step for run in (one, other) for step in run.stored if step >= last]
    within = min((step for step in checkpoints if step - start.step <= MOST_STEPS), default=last)
    return max(1, min(within - start.step, MOST_STEPS, most))


def _deck_on_these_ranks(world: World, run: ComparedRun, step: int) -> tuple[Deck, str]:
    """Return the deck of a run's steps after `step`, for these ranks, and a sentence if its layout changes.

    If the layout does not fit the number of ranks, all of them become data ranks.
    """
    with world.agreement():
        deck = run.deck_after(step)
        require_trusted(deck, run.path, run.trust)
        refuse_other_order(deck)
        problems = world_problems(deck, world.size)
        if not problems:
            return deck, ""
        if deck.layout.replicas > 1 or deck.layout.steps_between_syncs > 1:
            raise HpctrainError(
                f"{run.path}: has diverged replicas, which {counted(world.size, 'rank')} cannot hold: "
                f"{problems[0].sentence}; start as many ranks as it had"
            )
        plain = on_one_rank(deck)
        check_world(plain, world.size)
    segments = run.segments(step + 1, step + 1)
    before = f"its layout ({layout_text(segments[0].layout)})" if segments else "its layout"
    return (
        plain,
        f"{run.path} is replayed on {counted(world.size, 'data rank')}, since {before} does not fit",
    )


def _opening(start: CommonStart, count: int, decks: Sequence[tuple[Deck, str]]) -> list[str]:
    where = f"from step {start.step}" if start.step else "from their beginning"
    how = "where both are equal, bit for bit" if start.equal else "where both are equal up to rounding"
    how = how if start.step else "by their decks"
    notes = [note for _, note in decks if note]
    return [f"Replays {counted(count, 'step')} of both {where}, {how}.", *notes]


def _rollback_sentences(runs: Sequence[ComparedRun], start: CommonStart, count: int) -> list[str]:
    """Return the sentences about runs that returned to the last step of the replay and skipped samples."""
    end = start.step + count
    return [
        f"The replay ends there, because {run.path} returned to step {end} and skipped samples."
        for run in runs
        if run.next_rollback(start.step) == end
    ]


def _replay(
    world: World,
    run: ComparedRun,
    deck: Deck,
    start: CommonStart,
    count: int,
    after_step: Callable[[ReplayedRun], bool],
) -> ReplayedRun:
    """Replay `count` steps of a run, or fewer if `after_step` returns True. Collective."""
    known = run.stored_at(start.step)
    state, before = known.state, run.deck_after(start.step)
    # The checkpoint's measured choices are used; its layout may differ from that of the later steps.
    earlier = stored_deck(state, known.path)
    with world.agreement():
        changed = with_stored_choices(
            deck.with_keys(run={"noise_scale_steps": 0}), earlier, state, known.path
        )
    path = known.path if start.step in run.stored else None
    following = [each for step, each in run.step_losses.items() if step > start.step]
    recorded = RecordedLosses(start.step, following, "", run.segments(start.step + 1, start.step + count))
    with open_replay(world, changed, path) as opened:
        reasons = rounding_reasons(opened, before, changed, state, recorded, count)
        layer_context = opened.trainer.engine.stage.layer_context
        replay = ReplayedRun(run, changed, opened.checkpoints.layout, computed_by(layer_context), reasons)
        for _ in range(count):
            replay.steps.append(fingerprints(opened.trainer))
            if after_step(replay):
                break
    return replay


def _must_be_equal(one: ReplayedRun, other: ReplayedRun) -> bool:
    """Return True if two replays must have equal bits: same numerics, layout and kernels."""
    decks = one.deck, other.deck
    same = all(getattr(decks[0], name) == getattr(decks[1], name) for name in NUMERICS_SECTIONS)
    return same and one.layout == other.layout and one.kernels == other.kernels


def _step_line(name: str, replay: ReplayedRun, difference: StepDifference | None = None) -> str:
    """Return the line of the table about the last replayed step."""
    step = replay.steps[-1]
    replayed, recorded = _losses_of(step), replay.run.step_losses.get(step.step)
    gap = "" if recorded is None else f"{loss_difference(recorded, replayed):.1e}"
    gap = "equal" if gap == "0.0e+00" else gap
    losses = f"{_loss_text(recorded):>12}  {_loss_text(replayed):>12}"
    cause = ""
    if difference is not None:
        cause = f"{difference.phase}: {difference.description} ({size_text(difference.size)})"
    return f"{name:<6} {step.step:>8}  {losses}  {gap:>7}  {cause}".rstrip()


def _losses_of(step: StepFingerprints) -> RecordedLoss:
    """Return loss and gradient norm of a replayed step, in the form of a record."""
    return RecordedLoss(step.step, finite(step.metrics[LOSS]), finite(step.metrics[NORM]))


def _loss_text(record: RecordedLoss | None) -> str:
    if record is None:
        return "-"
    return "not finite" if record.loss is None else f"{record.loss:.10f}"


def _mismatch(world: World, replay: ReplayedRun, negligible: Set[str]) -> RecordMismatch:
    """Compare the recorded losses and one checkpoint of a run with its replay. Collective.

    Args:
        world: All ranks.
        replay: The run and its replay.
        negligible: Parameters whose gradients are only rounding errors; see StepComparison.
    """
    run = replay.run
    allowed = LOSS_ROUNDING[replay.deck.precision.compute] if replay.reasons else 0.0
    differing_step, first_recorded, first_replayed = None, None, None
    largest = 0.0
    for step in replay.steps:
        recorded, replayed = run.step_losses.get(step.step), _losses_of(step)
        if recorded is None:
            continue
        gap = loss_difference(recorded, replayed)
        largest = max(largest, gap)
        if gap > allowed and differing_step is None:
            differing_step, first_recorded, first_replayed = step.step, recorded, replayed
    exact, wrong, compared, checkpoint_step = not replay.reasons, list[StepDifference](), 0, None
    for step in replay.steps:
        if step.step not in run.stored or wrong:
            continue
        comparison = StepComparison(Rounding.of(replay.deck), exact, exact, set(negligible))
        stored = checkpoint_fingerprints(world, run.stored[step.step], step.step, "update")
        tensors = comparison.of(state_fingerprints(step, "update"), stored)
        wrong = [each for each in tensors if (not each.equal if exact else each.exceeds_rounding)]
        wrong.sort(key=lambda each: (parameter_of(each.name) in comparison.negligible, -each.size))
        compared, checkpoint_step = len(tensors), step.step
    values = first_recorded, first_replayed, largest
    return RecordMismatch(run, differing_step, *values, replay.reasons, wrong, compared, checkpoint_step)
