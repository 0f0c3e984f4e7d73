"""What is recorded of a run that is compared with another: decks, figures of its steps, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.exchange.source import settled_keys
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
    """A run as `path` names it: a folder, or one of its checkpoints, before which nothing is looked at.

    `rows` are those of its metrics, `figures` losses and norms, which checkpoints tell too, by step; `stored`
    are its checkpoints, by step, that of another run from which it went on among them, without those that it
    left behind. `damaged` are sentences of what could not be read, or was left behind. `trust` says what of
    the code that its decks name may be called.
    """

    path: Path
    folder: Path | None
    rows: Mapping[int, Row]
    figures: Mapping[int, RecordedLoss]
    stored: Mapping[int, CheckpointIndex]
    deck: Deck
    damaged: tuple[str, ...] = ()
    trust: CodeTrust = CodeTrust()  # noqa: RUF009 - nothing is trusted

    @property
    def history(self) -> list[HistorySegment]:
        """The chain of runs that led to its newest checkpoint."""
        return history(self.stored[max(self.stored)].state) if self.stored else []

    @property
    def last(self) -> int:
        """The last step that is known of it."""
        return max((*self.figures, *self.stored), default=0)

    @property
    def from_nothing(self) -> bool:
        """Whether its first step is known to be the first of all."""
        chain = self.history
        return bool(chain) and chain[0].first_step == 1 and chain[0].went_on_from is None

    @property
    def turns(self) -> list[int]:
        """The steps to which it went back, to go on from there with other samples."""
        newest = self.stored[max(self.stored)].state if self.stored else {}
        return rollback_steps(known_spikes(newest, self.rows.values()))

    def turn(self, step: int) -> int | None:
        """The first of these behind `step`."""
        return min((each for each in self.turns if each > step), default=None)

    def segments(self, first: int, last: int) -> list[HistorySegment]:
        """Which runs of the chain made the steps `first` to `last`."""
        return [each for each in self.history if each.first_step <= last and each.last_step >= first]

    def stored_at(self, step: int) -> CheckpointIndex:
        """The checkpoint after so many steps; of the beginning, the first there is."""
        return self.stored[step if step in self.stored else min(self.stored)]

    def deck_behind(self, step: int) -> Deck:
        """That of the steps after `step`: of the next checkpoint, or of the folder, or of that checkpoint."""
        later = [each for each in sorted(self.stored) if each > step]
        if later or self.folder is None or self.rows.keys() <= set(range(step + 1)):
            found = self.stored[later[0] if later else step]
            return stored_deck(found.state, found.path, trust=self.trust)
        return self.deck


def load_run(
    world: World,
    path: Path,
    trust: CodeTrust = CodeTrust(),  # noqa: B008 - nothing is trusted
) -> ComparedRun:
    """Return what is recorded of a run. Collective; HpctrainError on all ranks where `path` is no run's."""
    known: tuple[str | None, list[str], list[Row]] = (None, [], [])
    with world.agreement():
        if world.rank == 0:
            known = _look(path)
    folder, files, rows = world.everyone.broadcast_object(known)
    stored: dict[int, CheckpointIndex] = {}
    damaged: list[str] = []
    for file in map(Path, files):
        _examine(world, file, stored, damaged)
    newest = next((each.state for each in stored.values() if each.path != path), {})
    spikes = known_spikes(newest, rows)
    for step, structure in list(stored.items()):
        if (back := find_rollback(structure.state, spikes)) is not None:
            damaged.append(left_sentence(structure.path, back))
            del stored[step]
    if folder is not None and path.is_dir() and stored:
        for segment in history(stored[max(stored)].state):
            origin = Path(segment.went_on_from) if segment.went_on_from else None
            if segment.first_step - 1 not in stored and _is_there(world, origin):
                assert origin is not None
                _examine(world, origin, stored, damaged, segment.first_step - 1)
    deck = None
    with world.agreement():
        if folder is not None and (Path(folder) / _DECK).is_file() and path.is_dir():
            deck = read_stored_deck(Path(folder) / _DECK, trust, settled_keys)
        elif stored:
            deck = stored_deck(stored[max(stored)].state, stored[max(stored)].path, trust=trust)
        if deck is None:
            why = f" ({damaged[0]})" if damaged else ""
            raise HpctrainError(f"{path}: is no run's folder and no checkpoint{why}; name one of them")
    assert deck is not None
    figures: dict[int, RecordedLoss] = {}
    for structure in stored.values():
        figures |= {each.step: each for each in losses(structure.state)}
    figures |= {each.step: each for each in losses({"losses": [row for row in rows if "loss" in row]})}
    first = 0 if path.is_dir() else min(stored, default=0)
    return ComparedRun(
        path,
        None if folder is None else Path(folder),
        {row["step"]: row for row in rows if "loss" in row and row["step"] > first},
        {step: each for step, each in sorted(figures.items()) if step > first},
        stored,
        deck,
        tuple(damaged),
        trust,
    )


def known_spikes(newest: Mapping[str, Any], rows: Iterable[Row]) -> list[Spike]:
    """The spikes that a run had, by the state of its newest checkpoint and its metrics."""
    found = recorded_spikes(newest)
    of_rows = (Spike.of(row.get("went_back")) for row in rows)
    return [*found, *(spike for spike in of_rows if spike is not None and spike not in found)]


def left_sentence(path: Path, back: int) -> str:
    """What there is to say of a checkpoint that a run left behind."""
    return f"{path}: the run went back to step {back} after it had written this, and left it behind"


def _look(path: Path) -> tuple[str | None, list[str], list[Row]]:
    """The folder of a run, its checkpoints, the newest first, and its metrics; on rank 0."""
    require_exists(path, "run folder or checkpoint")
    if path.is_dir():
        folder, files = path, current_checkpoints(path / "checkpoints")
    elif format_of(path) is not None:
        beside = current_checkpoints(path.parent) if checkpoint_step(path) is not None else []
        step = checkpoint_step(path) or 0
        files = [path, *(each for each in beside if (checkpoint_step(each) or 0) > step)]
        folder = path.absolute().parent.parent
        if path.absolute().parent.name != "checkpoints":
            return None, list(map(str, files)), []
    else:
        raise HpctrainError(f"{path}: is no run's folder and no checkpoint; name one of them")
    metrics = folder / METRICS_FILE
    rows = read_metrics(metrics) if metrics.is_file() else []
    return str(folder), list(map(str, files)), rows


def _is_there(world: World, path: Path | None) -> bool:
    there: bool = world.everyone.broadcast_object(path is not None and path.is_file())
    return there


def _examine(
    world: World, path: Path, stored: dict[int, CheckpointIndex], damaged: list[str], step: int | None = None
) -> None:
    """Add a checkpoint, where it can be read, and is of a training run, of that step."""
    try:
        structure = examine(path, world.everyone)
    except HpctrainError as error:
        damaged.append(error.problems[0])
        return
    found = structure.state.get("step")
    if isinstance(found, int) and isinstance(structure.state.get("deck"), str) and step in (None, found):
        stored.setdefault(found, structure)


def part_at(one: ComparedRun, other: ComparedRun, allowed: float) -> int | None:
    """The first step whose recorded loss or norm are further apart than `allowed`, relative to them."""
    both = sorted(one.figures.keys() & other.figures.keys())
    return next(
        (step for step in both if figures_apart(one.figures[step], other.figures[step]) > allowed), None
    )


def figures_apart(one: RecordedLoss, other: RecordedLoss) -> float:
    """The larger of the relative differences of loss and norm."""
    return max(relative(one.loss, other.loss), relative(one.grad_norm, other.grad_norm))


def relative(one: float | None, other: float | None) -> float:
    """The difference of two figures over the larger one; None stands for one that is not finite."""
    values = [None if each is None or not isfinite(each) else each for each in (one, other)]
    if values[0] is None or values[1] is None:
        return 0.0 if values[0] is values[1] else float("inf")
    if values[0] == values[1]:
        return 0.0
    return abs(values[0] - values[1]) / max(abs(values[0]), abs(values[1]))
