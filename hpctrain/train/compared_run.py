"""Records of a run that is compared with another one: decks, losses of its steps, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.checkpoint.names import checkpoint_step, current_checkpoints
from hpctrain.checkpoint.provenance import HistorySegment, RecordedLoss, history, losses
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.world import World
from hpctrain.deck.code import CodeTrust
from hpctrain.deck.read import read_stored_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError, require_exists
from hpctrain.fault_checks.spikes import Spike, recorded_spikes
from hpctrain.hdf5 import format_of
from hpctrain.report.metric_rows import METRICS_FILE, Row, read_metrics
from hpctrain.train.rollback_history import find_rollback, rollback_steps

_DECK = "deck.toml"


@dataclass(frozen=True)
class ComparedRun:
    """Records of a run that is compared.

    Attributes:
        path: Run folder, or a checkpoint. Everything before that checkpoint is ignored.
        folder: Run folder, if any.
        rows: Rows of its metrics, by step.
        step_losses: Losses and gradient norms by step, from metrics and checkpoints.
        stored: Checkpoints by step. They include those of other runs that it was resumed from, and exclude
            those that a rollback made invalid.
        deck: Newest deck.
        damaged: Sentences about files that cannot be read, or that a rollback made invalid.
        trust: Code that may be called if a deck names it.
    """

    path: Path
    folder: Path | None
    rows: Mapping[int, Row]
    step_losses: Mapping[int, RecordedLoss]
    stored: Mapping[int, CheckpointIndex]
    deck: Deck
    damaged: tuple[str, ...] = ()
    trust: CodeTrust = CodeTrust()  # noqa: RUF009 - nothing is trusted

    @property
    def history(self) -> list[HistorySegment]:
        """Chain of runs that led to its newest checkpoint."""
        return history(self.stored[max(self.stored)].state) if self.stored else []

    @property
    def last(self) -> int:
        """Last recorded step."""
        return max((*self.step_losses, *self.stored), default=0)

    @property
    def is_complete(self) -> bool:
        """True if the run is known to have started from new weights, not from a checkpoint."""
        chain = self.history
        return bool(chain) and chain[0].first_step == 1 and chain[0].went_on_from is None

    @property
    def rollbacks(self) -> list[int]:
        """Steps to which the run returned after spikes; it continued from there with other samples."""
        newest = self.stored[max(self.stored)].state if self.stored else {}
        return rollback_steps(known_spikes(newest, self.rows.values()))

    def next_rollback(self, step: int) -> int | None:
        """Return the first such step after `step`, if any."""
        return min((each for each in self.rollbacks if each > step), default=None)

    def segments(self, first: int, last: int) -> list[HistorySegment]:
        """Return the runs of the chain that made the steps `first` to `last`."""
        return [each for each in self.history if each.first_step <= last and each.last_step >= first]

    def stored_at(self, step: int) -> CheckpointIndex:
        """Return the checkpoint after `step` steps, or the first one if there is none (for step 0)."""
        return self.stored[step if step in self.stored else min(self.stored)]

    def deck_after(self, step: int) -> Deck:
        """Return the deck of the steps after `step`: that of the next checkpoint, the folder, or `step`."""
        later = [each for each in sorted(self.stored) if each > step]
        if later or self.folder is None or self.rows.keys() <= set(range(step + 1)):
            checkpoint = self.stored[later[0] if later else step]
            return stored_deck(checkpoint.state, checkpoint.path, trust=self.trust)
        return self.deck


def load_run(
    world: World,
    path: Path,
    trust: CodeTrust = CodeTrust(),  # noqa: B008 - nothing is trusted
) -> ComparedRun:
    """Return the records of a run. Collective.

    Raises:
        HpctrainError: `path` is neither a run folder nor a checkpoint; raised on all ranks.
    """
    known: tuple[str | None, list[str], list[Row]] = (None, [], [])
    with world.agreement():
        if world.rank == 0:
            known = _list_files(path)
    folder, files, rows = world.everyone.broadcast_object(known)
    stored: dict[int, CheckpointIndex] = {}
    damaged: list[str] = []
    for file in map(Path, files):
        _add_checkpoint(world, file, stored, damaged)
    newest = next((each.state for each in stored.values() if each.path != path), {})
    spikes = known_spikes(newest, rows)
    for step, structure in list(stored.items()):
        if (back := find_rollback(structure.state, spikes)) is not None:
            damaged.append(rollback_sentence(structure.path, back))
            del stored[step]
    if folder is not None and path.is_dir() and stored:
        for segment in history(stored[max(stored)].state):
            source = Path(segment.went_on_from) if segment.went_on_from else None
            if segment.first_step - 1 not in stored and _exists(world, source):
                assert source is not None
                _add_checkpoint(world, source, stored, damaged, segment.first_step - 1)
    deck = None
    with world.agreement():
        if folder is not None and (Path(folder) / _DECK).is_file() and path.is_dir():
            deck = read_stored_deck(Path(folder) / _DECK, trust, read_source_keys)
        elif stored:
            deck = stored_deck(stored[max(stored)].state, stored[max(stored)].path, trust=trust)
        if deck is None:
            why = f" ({damaged[0]})" if damaged else ""
            raise HpctrainError(f"{path}: is no run's folder and no checkpoint{why}; name one of them")
    assert deck is not None
    step_losses: dict[int, RecordedLoss] = {}
    for structure in stored.values():
        step_losses |= {each.step: each for each in losses(structure.state)}
    step_losses |= {each.step: each for each in losses({"losses": [row for row in rows if "loss" in row]})}
    first = 0 if path.is_dir() else min(stored, default=0)
    return ComparedRun(
        path,
        None if folder is None else Path(folder),
        {row["step"]: row for row in rows if "loss" in row and row["step"] > first},
        {step: each for step, each in sorted(step_losses.items()) if step > first},
        stored,
        deck,
        tuple(damaged),
        trust,
    )


def known_spikes(newest: Mapping[str, Any], rows: Iterable[Row]) -> list[Spike]:
    """Return the spikes of a run, from the state of its newest checkpoint and from its metrics."""
    spikes = recorded_spikes(newest)
    of_rows = (Spike.of(row.get("went_back")) for row in rows)
    return [*spikes, *(spike for spike in of_rows if spike is not None and spike not in spikes)]


def rollback_sentence(path: Path, back: int) -> str:
    """Return a sentence about a checkpoint that a rollback to step `back` made invalid."""
    return f"{path}: the run returned to step {back} after it had written this, and continued without it"


def _list_files(path: Path) -> tuple[str | None, list[str], list[Row]]:
    """Return the folder of a run, its checkpoints from the newest on, and its metrics. Called on rank 0."""
    require_exists(path, "run folder or checkpoint")
    if path.is_dir():
        folder, files = path, current_checkpoints(path / "checkpoints")
    elif format_of(path) is not None:
        checkpoints = current_checkpoints(path.parent) if checkpoint_step(path) is not None else []
        step = checkpoint_step(path) or 0
        files = [path, *(each for each in checkpoints if (checkpoint_step(each) or 0) > step)]
        folder = path.absolute().parent.parent
        if path.absolute().parent.name != "checkpoints":
            return None, list(map(str, files)), []
    else:
        raise HpctrainError(f"{path}: is no run's folder and no checkpoint; name one of them")
    metrics = folder / METRICS_FILE
    rows = read_metrics(metrics) if metrics.is_file() else []
    return str(folder), list(map(str, files)), rows


def _exists(world: World, path: Path | None) -> bool:
    exists: bool = world.everyone.broadcast_object(path is not None and path.is_file())
    return exists


def _add_checkpoint(
    world: World, path: Path, stored: dict[int, CheckpointIndex], damaged: list[str], step: int | None = None
) -> None:
    """Add a checkpoint to `stored` if it is readable and of a training run, after `step` if that is given."""
    try:
        structure = examine(path, world.everyone)
    except HpctrainError as error:
        damaged.append(error.problems[0])
        return
    stored_step = structure.state.get("step")
    has_deck = isinstance(structure.state.get("deck"), str)
    if isinstance(stored_step, int) and has_deck and step in (None, stored_step):
        stored.setdefault(stored_step, structure)


def first_difference(one: ComparedRun, other: ComparedRun, allowed: float) -> int | None:
    """Return the first step whose recorded losses or norms have a relative difference above `allowed`."""
    both = sorted(one.step_losses.keys() & other.step_losses.keys())
    return next(
        (step for step in both if loss_difference(one.step_losses[step], other.step_losses[step]) > allowed),
        None,
    )


def loss_difference(one: RecordedLoss, other: RecordedLoss) -> float:
    """Return the larger of the relative differences of loss and gradient norm."""
    return max(relative_difference(one.loss, other.loss), relative_difference(one.grad_norm, other.grad_norm))


def relative_difference(one: float | None, other: float | None) -> float:
    """Return the relative difference of two values; None stands for a value that is not finite."""
    values = [None if each is None or not isfinite(each) else each for each in (one, other)]
    if values[0] is None or values[1] is None:
        return 0.0 if values[0] is values[1] else float("inf")
    if values[0] == values[1]:
        return 0.0
    return abs(values[0] - values[1]) / max(abs(values[0]), abs(values[1]))
