"""`hpctrain compare`: where two runs part, told from what is recorded of them, and from a replay of both.

Nothing is written. Each run is replayed by its own deck from the newest checkpoint at which both agree, one
after the other, and every step's fingerprints are compared.
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
    file_prints,
    find_start,
    of_one_rank,
    recorded_alike,
    recorded_part,
    require_comparable,
)
from hpctrain.train.compared_run import ComparedRun, load_run, loss_difference
from hpctrain.train.corpus_comparison import require_same_source
from hpctrain.train.divergence import Rounding, StepComparison, StepDifference, first_of, parameter_of
from hpctrain.train.fingerprints import LOSS, NORM, StepPrints, fingerprints
from hpctrain.train.recorded_losses import Recorded
from hpctrain.train.replay import COMPUTED, ROUNDING, STEPS, engine_of, reasons_of, refuse_other_order
from hpctrain.train.stored_choices import computed_by, with_stored_choices
from hpctrain.train.verdict import (
    ComparisonResult,
    Departure,
    phase_table,
    recorded_sentence,
    size_text,
    verdict_of,
)

MOST_STEPS = 50
"""Replayed, where no number is asked for."""

_HEAD = f"{'run':<6} {'step':>8}  {'recorded':>12}  {'replayed':>12}  {'error':>7}  first difference"


@dataclass
class ReplayedRun:
    """What came of replaying a run: on which layout, by what, why bits may differ from what was recorded, and
    the fingerprints of its steps.
    """

    run: ComparedRun
    deck: Deck
    layout: dict[str, int]
    computed: dict[str, str]
    reasons: list[str]
    steps: list[StepPrints] = field(default_factory=list)


def compare(
    world: World,
    paths: tuple[Path, Path],
    steps: int | None,
    replays: bool,
    show: Callable[[str], None],
    records_only: bool = False,
    trust: CodeTrust = CodeTrust(),  # noqa: B008 - nothing is trusted
) -> int:
    """Show on rank 0 how two runs differ, and where they part; the exit code. Collective.

    0 where they differ by no more than rounding, 1 where they do; with `records_only` alone, always 0.
    HpctrainError on all ranks where they cannot be compared.
    """

    def tell(lines: Sequence[str]) -> None:
        if world.rank == 0 and lines:
            show("\n".join(lines))

    with world.agreement():
        if len({realpath(path) for path in paths}) == 1:
            raise HpctrainError(f"{paths[0]}: is given twice; name two different runs")
    one, other = (load_run(world, path, trust) for path in paths)
    tell(side_by_side(_record(one), _record(other), columns()))
    damaged = [f"Skipped: {each}" for run in (one, other) for each in run.damaged]
    tell([line for each in damaged for line in ("", *fit(each, columns()))])
    if records_only:
        return EXIT_DONE
    parts = recorded_part(one, other)
    alike = recorded_alike(one, other)
    tell(["", *fit(recorded_sentence(one, other, parts, alike), columns())])
    if not replays:
        return EXIT_DONE if parts is None else EXIT_DIFFERENT
    with world.agreement():
        require_comparable(one, other)
    start = find_start(world, one, other)
    count = _count(one, other, start, steps)
    decks = [_here(world, run, start.step) for run in (one, other)]
    if start.step == 0:
        for run, (deck, _) in zip((one, other), decks, strict=True):
            known = run.stored_at(0)
            purpose = "its steps are replayed from the model that its run started from"
            require_same_source(world, deck, known.state, known.path, purpose)
    said = [*_opening(start, count, decks), *_turns((one, other), start, count)]
    tell(["", *(line for each in said for line in fit(each, columns())), "", _HEAD])
    first = _replay(world, one, decks[0][0], start, count, lambda replay: _told(tell, "first", replay))
    rounding = Rounding.of(*(deck for deck, _ in decks))
    comparison = StepComparison(rounding, alike=False, exact=False)
    found: list[StepDifference] = []
    bits: list[StepDifference] = []

    def beside(replay: ReplayedRun) -> bool:
        nonlocal found
        if len(replay.steps) == 1:
            comparison.alike = replay.layout == first.layout
            comparison.exact = start.equal and _computes_alike(first, replay)
        apart = comparison.of(first.steps[len(replay.steps) - 1], replay.steps[-1])
        differing, of_bits = comparison.first(apart), first_of(apart, bits=True)
        if comparison.alike and of_bits is not None and not bits:
            bits.append(of_bits)
        _told(tell, "second", replay, differing or (of_bits if comparison.alike else None))
        found = apart if differing is not None else []
        return differing is not None

    second = _replay(world, other, decks[1][0], start, count, beside)
    if found:
        tell(["", f"step {second.steps[-1].step}", *phase_table(found, comparison.alike, columns())])
    departures = [] if found else [_departure(world, replay, comparison.quiet) for replay in (first, second)]
    steps_of = first.steps, second.steps
    result = ComparisonResult(
        one, other, start, *steps_of, found, comparison.exact, bits, departures, rounding
    )
    code, sentences = verdict_of(result)
    tell(["", *(line for sentence in sentences for line in fit(sentence, columns()))])
    return code


def _record(run: ComparedRun) -> RunRecord:
    chain = run.history
    return RunRecord(run.path, run.deck, run.rows, chain[-1] if chain else None, run.last)


def _count(one: ComparedRun, other: ComparedRun, start: CommonStart, wanted: int | None) -> int:
    """How many steps to replay: to where records or checkpoints differ, and the next checkpoint behind it."""
    most = min(run.deck_after(start.step).run.steps for run in (one, other)) - start.step
    turns = [turn for run in (one, other) if (turn := run.next_rollback(start.step)) is not None]
    most = min(most, *(turn - start.step for turn in turns), most)
    if most < 1:
        raise HpctrainError(
            f"{one.path} and {other.path} end at step {start.step}, so that there is no step to replay"
        )
    if wanted is not None:
        return min(wanted, most)
    known = [step for step in (start.recorded, start.stored) if step is not None]
    last = min(known) if known else min(start.step + STEPS, one.last, other.last)
    behind = [step for run in (one, other) for step in run.stored if step >= last]
    within = min((step for step in behind if step - start.step <= MOST_STEPS), default=last)
    return max(1, min(within - start.step, MOST_STEPS, most))


def _here(world: World, run: ComparedRun, step: int) -> tuple[Deck, str]:
    """The deck of a run's steps behind `step` on these ranks, and what is to be said of its layout."""
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
    return [f"Replays {counted(count, 'step')} of both {where}, {how}.", *(said for _, said in decks if said)]


def _turns(runs: Sequence[ComparedRun], start: CommonStart, count: int) -> list[str]:
    """Why the replays end where they do, if a run went back there."""
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
    stepped: Callable[[ReplayedRun], bool],
) -> ReplayedRun:
    """Replay `count` steps of a run, or fewer, where one tells to stop. Collective."""
    known = run.stored_at(start.step)
    state, before = known.state, run.deck_after(start.step)
    # What was measured is the checkpoint's, whose run may have been on another layout than the steps behind.
    earlier = stored_deck(state, known.path)
    with world.agreement():
        changed = with_stored_choices(
            deck.with_keys(run={"noise_scale_steps": 0}), earlier, state, known.path
        )
    path = known.path if start.step in run.stored else None
    following = [each for step, each in run.step_losses.items() if step > start.step]
    recorded = Recorded(start.step, following, "", run.segments(start.step + 1, start.step + count))
    with engine_of(world, changed, path) as opened:
        reasons = reasons_of(opened, before, changed, state, recorded, count)
        layer_context = opened.trainer.engine.stage.layer_context
        replay = ReplayedRun(run, changed, opened.checkpoints.layout, computed_by(layer_context), reasons)
        for _ in range(count):
            replay.steps.append(fingerprints(opened.trainer))
            if stepped(replay):
                break
    return replay


def _computes_alike(one: ReplayedRun, other: ReplayedRun) -> bool:
    """Whether two replays must have the same bits for as long as they compute the same."""
    decks = one.deck, other.deck
    same = all(getattr(decks[0], name) == getattr(decks[1], name) for name in COMPUTED)
    return same and one.layout == other.layout and one.computed == other.computed


def _told(
    tell: Callable[[Sequence[str]], None],
    name: str,
    replay: ReplayedRun,
    differs: StepDifference | None = None,
) -> bool:
    """Tell of a step that was replayed; the replay goes on."""
    prints = replay.steps[-1]
    here, known = _recorded_loss(prints), replay.run.step_losses.get(prints.step)
    gap = "" if known is None else f"{loss_difference(known, here):.1e}"
    texts = [_loss(None if each is None else each) for each in (known, here)]
    what = "" if differs is None else f"{differs.phase}: {differs.told} ({size_text(differs.size)})"
    gap = "equal" if gap == "0.0e+00" else gap
    tell([f"{name:<6} {prints.step:>8}  {texts[0]:>12}  {texts[1]:>12}  {gap:>7}  {what}".rstrip()])
    return False


def _recorded_loss(prints: StepPrints) -> RecordedLoss:
    """Those of a replayed step."""
    return RecordedLoss(prints.step, finite(prints.metrics[LOSS]), finite(prints.metrics[NORM]))


def _loss(record: RecordedLoss | None) -> str:
    if record is None:
        return "-"
    return "not finite" if record.loss is None else f"{record.loss:.10f}"


def _departure(world: World, replay: ReplayedRun, quiet: Set[str]) -> Departure:
    """Where a run's own records are not what its replay gives; see StepComparison. Collective."""
    run = replay.run
    allowed = ROUNDING[replay.deck.precision.compute] if replay.reasons else 0.0
    step, known, here = None, None, None
    largest = 0.0
    for prints in replay.steps:
        recorded, replayed = run.step_losses.get(prints.step), _recorded_loss(prints)
        if recorded is None:
            continue
        gap = loss_difference(recorded, replayed)
        largest = max(largest, gap)
        if gap > allowed and step is None:
            step, known, here = prints.step, recorded, replayed
    exact, wrong, compared, behind = not replay.reasons, list[StepDifference](), 0, None
    for prints in replay.steps:
        if prints.step not in run.stored or wrong:
            continue
        comparison = StepComparison(Rounding.of(replay.deck), exact, exact, set(quiet))
        file = file_prints(world, run.stored[prints.step], prints.step, "update")
        stored = comparison.of(of_one_rank(prints, "update"), file)
        wrong = [each for each in stored if (not each.equal if exact else each.beyond)]
        wrong.sort(key=lambda each: (parameter_of(each.name) in comparison.quiet, -each.size))
        compared, behind = len(stored), prints.step
    return Departure(run, step, known, here, largest, replay.reasons, wrong, compared, behind)
