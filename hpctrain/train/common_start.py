"""Start of a comparison of two runs: the newest equal checkpoints of one step, or the start of the runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.file_fingerprints import file_fingerprints
from hpctrain.comm.world import World
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks.fingerprint import Fingerprint
from hpctrain.sharding.state import MODEL
from hpctrain.train.compared_run import ComparedRun, first_difference
from hpctrain.train.corpus_comparison import CORPUS
from hpctrain.train.divergence import Rounding, StepComparison, StepDifference
from hpctrain.train.fingerprints import StepFingerprints, TensorFingerprint
from hpctrain.train.replay import LOSS_ROUNDING


@dataclass(frozen=True)
class CommonStart:
    """Step after which two runs are replayed.

    Attributes:
        step: The step; 0 for the start of the runs.
        equal: True if both runs are equal there, bit for bit.
        stored: First later step whose checkpoints differ, if any.
        recorded: First later step whose recorded losses or norms differ, if any.
    """

    step: int
    equal: bool
    stored: int | None
    recorded: int | None


def same_environment(one: ComparedRun, other: ComparedRun) -> bool:
    """Return True if both runs had one layout, the same versions and kernels, so that bits are comparable."""
    environments = [
        {
            (str(sorted(each.layout.items())), str(sorted(each.versions.items())), str(each.computed))
            for each in chain
        }
        for chain in (one.history, other.history)
    ]
    return len(environments[0]) == 1 and environments[0] == environments[1]


def first_recorded_difference(one: ComparedRun, other: ComparedRun) -> int | None:
    """Return the first step whose recorded losses or norms differ by more than is expected."""
    rounding = max(LOSS_ROUNDING[run.deck.precision.compute] for run in (one, other))
    return first_difference(one, other, 0.0 if same_environment(one, other) else rounding)


def require_comparable(one: ComparedRun, other: ComparedRun) -> None:
    """Raise HpctrainError if the runs have different models or data, or no checkpoint."""
    for run in (one, other):
        if not run.stored:
            why = f" ({run.damaged[0]})" if run.damaged else ""
            raise HpctrainError(
                f"{run.path}: has no checkpoint{why}, so that it cannot be replayed; compare records with "
                "`--no-replay`"
            )
        if run.deck.communication.server is not None:
            sentence = "cannot be replayed (compare records with `--no-replay`)"
            raise HpctrainError(run.deck.problem("communication.server.mode", sentence))
        if run.deck.objective.kind in POLICY_KINDS:
            sentence = (
                "trains on generated answers, so that steps of two runs cannot be compared (compare records "
                "with `--no-replay`, or one run with itself by `hpctrain replay`)"
            )
            raise HpctrainError(run.deck.problem("objective.kind", sentence))
    shapes = [_models(run.stored[max(run.stored)]) for run in (one, other)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        here, there = (shape.get(name) for shape in shapes)
        if here != there:
            texts = [f"{list(each)}" if each is not None else "missing" for each in (here, there)]
            raise HpctrainError(
                f"{one.path} and {other.path} have different models: {name} is {texts[0]} in the first and "
                f"{texts[1]} in the second; name runs of one model, or compare records with `--no-replay`"
            )
    corpora = [run.stored[max(run.stored)].state.get(CORPUS) for run in (one, other)]
    if None not in corpora and corpora[0] != corpora[1]:
        raise HpctrainError(
            f"{one.path} and {other.path} were trained on different data, so that no step is the same; "
            "name runs with the same data, or compare records with `--no-replay`"
        )


def find_start(world: World, one: ComparedRun, other: ComparedRun) -> CommonStart:
    """Return the common start; raise HpctrainError on all ranks if there is none. Collective."""
    recorded, end = first_recorded_difference(one, other), min(one.last, other.last)
    limit = end if recorded is None else recorded
    steps = sorted(step for step in one.stored.keys() & other.stored.keys() if step < limit or step == end)
    steps = [step for step in steps if recorded is None or step < recorded]
    low, high = 0, len(steps)  # checkpoints before `low` agree, those from `high` on differ
    equal: dict[int, bool] = {}
    while low < high:
        middle = (low + high) // 2
        step = steps[middle]
        differences = compare_files(world, one, other, step)
        equal[step] = all(each.equal for each in differences)
        must_be_equal = same_environment(one, other)
        if equal[step] or not (must_be_equal or any(each.exceeds_rounding for each in differences)):
            low = middle + 1
        else:
            high = middle
    later = steps[low] if low < len(steps) else None
    agreeing = [step for step in steps[:low] if step < end]
    if agreeing:
        step = agreeing[-1]
        if step not in equal:
            equal[step] = all(each.equal for each in compare_files(world, one, other, step))
        return CommonStart(step, equal[step], later, recorded)
    if one.is_complete and other.is_complete and one.path.is_dir() and other.path.is_dir():
        for run in (one, other):
            if 0 in run.rollbacks:  # its steps have other samples than a new run
                raise HpctrainError(
                    f"{run.path}: returned to its beginning and skipped samples there, so that its steps "
                    "can only be replayed from checkpoints, but the runs have none in common; compare "
                    "records with `--no-replay`"
                )
        return CommonStart(0, True, later, recorded)
    raise HpctrainError(
        f"{one.path} and {other.path} have no equal checkpoints of one step, and not both are known from "
        "their beginning; name checkpoints that both resumed from, or compare records with `--no-replay`"
    )


def compare_files(world: World, one: ComparedRun, other: ComparedRun, step: int) -> list[StepDifference]:
    """Compare the checkpoints of both runs after a step. Collective."""
    steps = [checkpoint_fingerprints(world, run.stored[step], step, "start") for run in (one, other)]
    exact = same_environment(one, other)
    return StepComparison(Rounding.of(one.deck, other.deck), exact, exact).of(*steps)


def checkpoint_fingerprints(
    world: World, structure: CheckpointIndex, step: int, phase: str
) -> StepFingerprints:
    """Return the fingerprints of a checkpoint, as of one rank with the whole state. Collective."""
    totals = file_fingerprints(structure, world.everyone)
    return StepFingerprints(step, [_tensor_fingerprint(phase, name, each) for name, each in totals.items()])


def state_fingerprints(step: StepFingerprints, phase: str) -> StepFingerprints:
    """Return the fingerprints of weights and state in a phase, as of one rank with the whole state."""
    tensors = [replace(each, bits=(each.total,)) for each in step.tensors]
    return StepFingerprints(
        step.step, [each for each in tensors if each.phase == phase and each.name.startswith("/")]
    )


def _tensor_fingerprint(phase: str, name: str, total: Fingerprint) -> TensorFingerprint:
    return TensorFingerprint(
        phase, name, (total.bits,), total.bits, total.sketch, total.broken, total.elements
    )


def _models(structure: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's parameters."""
    before = f"/{MODEL}/"
    return {
        name.removeprefix(before): each.shape
        for name, each in structure.datasets.items()
        if name.startswith(before)
    }
