"""Replay of steps after a checkpoint, to compare their losses with the recorded ones (`hpctrain replay`).

No checkpoints, metrics or logs are written. Files with offloaded state are temporary.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.provenance import HistorySegment, RecordedLoss, history
from hpctrain.checkpoint.same_model import require_same_model
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.checkpoint.versions import library_versions
from hpctrain.comm.world import World
from hpctrain.deck.code import trust_of
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_DIFFERENT, EXIT_DONE, HpctrainError
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.report.contents import layout_text
from hpctrain.report.terminal import columns, fit
from hpctrain.train.corpus_comparison import corpus_key, same_corpus
from hpctrain.train.recorded_losses import RecordedLosses, find_recorded_losses, newest_checkpoint_with_losses
from hpctrain.train.run_construction import open_run
from hpctrain.train.stored_choices import computed_by, record_of, with_stored_choices
from hpctrain.train.trainer import MakeTrainer, make_trainer
from hpctrain.train.training_loop import Run
from hpctrain.watch.run_files import remove_replayed

STEPS = 10
"""Default of the largest number of replayed steps."""
LOSS_ROUNDING = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2, "fp8": 3e-2}
"""Relative difference of a loss that counts as rounding, by precision."""

# Keys that decide which samples a step takes.
_BATCH = ("batch.global_size", "batch.sequence", "batch.ramp_from", "batch.ramp_steps")
_SAMPLES = ("run.seed", "data.validation", *_BATCH)
NUMERICS_SECTIONS = (
    "model",
    "layout",
    "batch",
    "optimizer",
    "learning_rate",
    "precision",
    "memory",
    "communication",
)
"""Sections on which the last bits of a loss depend."""


def replay(
    world: World,
    path: Path,
    steps: int | None,
    overrides: Sequence[str],
    against: Path | None,
    show: Callable[[str], None],
    trainer_factory: MakeTrainer = make_trainer,
) -> int:
    """Replay steps after a checkpoint, and compare each loss with the recorded one. Collective.

    Args:
        world: The world.
        path: The checkpoint, or a run folder, which stands for its newest checkpoint before recorded losses.
        steps: Number of steps; None for up to STEPS.
        overrides: `--set` arguments.
        against: Metrics file or later checkpoint with the losses, if not in the run folder.
        show: Prints lines, on rank 0.
        trainer_factory: Function that makes the trainer.

    Returns:
        The exit code: 0 if all losses are equal, 1 if they differ. On the same ranks, layout and versions,
        they must be equal bit for bit, otherwise up to rounding.

    Raises:
        HpctrainError: There is nothing to replay; raised on all ranks.
    """
    if world.everyone.broadcast_object(path.is_dir()):
        path = newest_checkpoint_with_losses(world, path, steps, against)
    state = read_state(path, world.everyone)
    recorded = find_recorded_losses(world, path, state, against)
    with world.agreement():
        # A run that continued to more steps than in this checkpoint's deck has another learning rate.
        changes = [f"run.steps={segment.steps}" for segment in recorded.segments[:1] if segment.steps]
        original = stored_deck(state, path, changes)
        # The noise scale is not compared, and other ranks may not be able to measure it.
        trust = trust_of(overrides)
        deck = stored_deck(state, path, [*changes, "run.noise_scale_steps=0", *overrides], trust)
        require_trusted(deck, path, trust)
        _refuse_other_samples(original, deck)
        require_same_model(deck, original, path)
        refuse_other_order(deck)
    count = _steps(path, recorded, steps)
    with world.agreement():
        deck = with_stored_choices(deck, original, state, path)
    with open_replay(world, deck, path, trainer_factory) as run:
        with world.agreement():
            if not same_corpus(state, run.corpus):
                key, what = corpus_key(deck)
                other = f"is not the {what} that {path} was trained on, so that no recorded loss can be"
                raise HpctrainError(deck.problem(key, f"{other} reproduced; name that {what}"))
        reasons = rounding_reasons(run, original, deck, state, recorded, count)
        if world.rank == 0:
            layout = layout_text(run.checkpoints.layout)
            opening = (
                f"replays {deck.run.title} from step {run.trainer.state.step}, {layout}; "
                f"recorded losses from {recorded.source}"
            )
            show("\n".join(fit(opening, columns())))
            show(f"{'step':>8}  {'recorded':>14}  {'replayed':>14}  relative difference")
        rows = []
        for expected in recorded.losses[:count]:
            result = run.trainer.train_step()
            rows.append((expected, result.loss))
            if world.rank == 0:
                show(_row(expected, result.loss))
    code, verdict = judge(rows, deck.precision.compute, reasons)
    if world.rank == 0:
        show("\n".join(fit(verdict, columns())))
    return code


def judge(
    rows: Sequence[tuple[RecordedLoss, float]], precision: str, reasons: Sequence[str]
) -> tuple[int, str]:
    """Return the exit code and a sentence about recorded and replayed losses.

    Args:
        rows: Pairs of recorded and replayed losses.
        precision: Precision of the run.
        reasons: Reasons why bits may differ; if there are none, they must be equal.
    """
    allowed = LOSS_ROUNDING[precision]
    differences = [(expected.step, difference(expected.loss, loss)) for expected, loss in rows]
    largest = max(gap for _, gap in differences)
    what = "The replayed loss is" if len(rows) == 1 else f"The {len(rows)} replayed losses are"
    if largest == 0.0:
        return EXIT_DONE, f"{what} equal to the recorded, bit for bit."
    if largest <= allowed and reasons:
        return EXIT_DONE, (
            f"{what} equal to the recorded up to rounding (at most {largest:.1e}, allowed: {allowed:g}), as "
            f"expected with {' and '.join(reasons)}."
        )
    step, gap = next((step, gap) for step, gap in differences if gap > (allowed if reasons else 0.0))
    if largest <= allowed:
        return EXIT_DIFFERENT, (
            f"{what} equal to the recorded only up to rounding (step {step} is the first to differ, by "
            f"{gap:.1e}), although layout, ranks and versions are the same. The machines differ, or there "
            "was a fault."
        )
    by = f"by {gap:.1e}" if isfinite(gap) else "one of the two is not finite"
    verdict = f"The replayed losses differ from the recorded: step {step} is the first to differ, {by}."
    return EXIT_DIFFERENT, verdict


def difference(recorded: float | None, replayed: float) -> float:
    """Return the relative difference: 0 if both losses are not finite, infinity if one of them is not."""
    if recorded is None or not isfinite(replayed):
        return 0.0 if recorded is None and not isfinite(replayed) else float("inf")
    if recorded == replayed:
        return 0.0
    return abs(replayed - recorded) / abs(recorded) if recorded else float("inf")


def _row(expected: RecordedLoss, replayed: float) -> str:
    gap = difference(expected.loss, replayed)
    recorded = "not finite" if expected.loss is None else f"{expected.loss:.10f}"
    return (
        f"{expected.step:>8}  {recorded:>14}  {replayed:>14.10f}  "
        f"{'equal' if gap == 0.0 else f'{gap:.1e}':>19}"
    )


def refuse_other_order(deck: Deck) -> None:
    """Raise HpctrainError if the order of updates cannot be reproduced (asynchronous servers)."""
    keys = deck.communication.server
    if keys is not None and (keys.mode == "async" or (keys.mode == "stale" and keys.staleness)):
        sentence = "has an order of updates that cannot be reproduced"
        raise HpctrainError(deck.problem("communication.server.mode", sentence))


def _refuse_other_samples(original: Deck, deck: Deck) -> None:
    problems = [
        deck.problem(
            key,
            f"changes which samples a step takes (it was {original.value(key)}), so that no recorded "
            "loss can come out again; leave it as it was",
        )
        for key in _SAMPLES
        if deck.value(key) != original.value(key)
    ]
    if problems:
        raise HpctrainError(problems)


def _steps(path: Path, recorded: RecordedLosses, requested: int | None) -> int:
    """Return the number of steps to replay; raise HpctrainError if too few are recorded."""
    known = len(recorded.losses)
    if known == 0:
        raise HpctrainError(
            f"{path}: no loss beyond its step {recorded.step} is recorded in {recorded.source}; name a "
            "metrics.jsonl, or a later checkpoint of the same run, by --against"
        )
    if requested is not None and requested > known:
        raise HpctrainError(
            f"--steps {requested}: only {known} beyond step {recorded.step} are recorded in {recorded.source}"
        )
    return min(STEPS, known) if requested is None else requested


@contextmanager
def open_replay(
    world: World, deck: Deck, path: Path | None, trainer_factory: MakeTrainer = make_trainer
) -> Iterator[Run]:
    """Open the run of a deck, from a checkpoint or from its start, in a temporary folder. Collective."""
    with _temporary_folder(world) as folder:
        changed = deck.with_keys(
            run={"dir": folder, "trace": False},
            memory={"offload_dir": deck.memory.offload_dir or folder},
            stability={"verify_layout": False},
        )
        run = open_run(world, changed, path, trainer_factory=trainer_factory)
        try:
            yield run
        finally:
            run.trainer.close()
            run.trainer.engine.close()
            run.corpus.close()


@contextmanager
def _temporary_folder(world: World) -> Iterator[str]:
    """Yield the name of a new temporary folder, which is removed at the end. Collective."""
    name = world.everyone.broadcast_object(f"hpctrain-replay-{secrets.token_hex(8)}")
    folder = Path(tempfile.gettempdir()) / name
    try:
        yield str(folder)
    finally:
        if world.rank == 0:
            remove_replayed(folder)


def rounding_reasons(
    run: Run, original: Deck, deck: Deck, state: Mapping[str, Any], recorded: RecordedLosses, count: int
) -> list[str]:
    """Return the reasons why the last bits may differ from those of the recorded run."""
    segments = [segment for segment in recorded.segments if segment.first_step <= recorded.step + count]
    segments = segments or history(state)[-1:]
    if segments:  # compare the layouts of these runs, not that of the checkpoint
        axes = {name: None for name in segments[0].layout if name in type(deck.layout).model_fields}
        original, deck = (each.with_keys(layout=axes) for each in (original, deck))
    changed = [name for name in NUMERICS_SECTIONS if getattr(original, name) != getattr(deck, name)]
    reasons = []
    if "layout" in changed or any(segment.layout != run.checkpoints.layout for segment in segments):
        reasons.append("another layout")
    elif state.get("ranks") != run.world.size and not segments:
        reasons.append("another number of ranks")
    reasons += _other_kernels(run.trainer.engine.stage.layer_context, state, recorded, segments)
    reasons += [f"other keys of [{name}]" for name in changed if name != "layout"]
    here = library_versions()
    for name in ("hpctrain", "torch"):
        there = {segment.versions.get(name) for segment in segments} or {state["versions"].get(name)}
        reasons += [f"another version of {name}"] if there != {here[name]} else []
    return reasons


def _other_kernels(
    layer_context: LayerContext,
    state: Mapping[str, Any],
    recorded: RecordedLosses,
    segments: Sequence[HistorySegment],
) -> list[str]:
    """Return the reasons that are other kernels than in the recorded segments, or before them."""
    here, reasons = computed_by(layer_context), []
    before = {
        "products": layer_context.products.kernels.stored_choices != (state.get("products") or {}),
        "functions": layer_context.functions.library_checksums != record_of(state.get("compiled")),
    }
    for name, differs in before.items():
        others = [each.first_step for each in segments if each.computed.get(name, here[name]) != here[name]]
        if others and others[0] > recorded.step + 1:
            reasons.append(f"{name} that something else computed from step {others[0]} on")
        elif others or (differs and not (segments and all(name in each.computed for each in segments))):
            reasons.append(f"{name} that something else computes")
    return reasons
