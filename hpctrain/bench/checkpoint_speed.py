"""`hpctrain bench checkpoint`: saving and loading beside plain files and torch.distributed.checkpoint.

In every round all take turns, and what counts is the ratio within a round. A plain file of every rank holds
as many bytes as the rank writes of the checkpoint; reading, a rank reads as many as it loads, beginning with
its own file. What is written is on the disk when the time ends. Before anything is read, by whomever, its
pages leave the page cache, as after a crash; with `warm` they stay. Making room, emptying the cache and
removing files are not timed.

Training goes on by real steps: those during a save are compared with as many steps right after it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from hpctrain.bench.measurement import seconds_of, slowest, with_vocabulary, write_json
from hpctrain.bench.peers.collective_calls import start_gloo, stop_gloo
from hpctrain.bench.peers.torch_checkpoint import TorchCheckpoint
from hpctrain.bench.plain_files import PeakMemory, drop_from_cache, read_plain, write_plain
from hpctrain.checkpoint.background import BackgroundSave
from hpctrain.checkpoint.copy_on_write import HostBuffer
from hpctrain.checkpoint.draft import PIECE_BYTES
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.plan.engine import build_within_memory
from hpctrain.report.terminal import stdout_console
from hpctrain.text import counted, table
from hpctrain.train.hook import Hook
from hpctrain.train.trainer import Trainer
from hpctrain.units import format_bytes, format_seconds

Result = TypeVar("Result")

EXTRA_BYTES = 64 << 20  # what saving and loading may take of a rank's memory beyond `checkpoint.buffer`

PLAIN_WRITE, PLAIN_READ = "plain write", "plain read"
COLLECTIVE, BACKGROUND, TRAINING = "collective", "background", "in training"
LOAD, DCP_SAVE, DCP_LOAD = "load", "dcp save", "dcp load"
SAVES = (PLAIN_WRITE, COLLECTIVE, BACKGROUND, TRAINING, DCP_SAVE)
OF_PLAIN = {COLLECTIVE: 0.70, BACKGROUND: 0.85, LOAD: 0.85}
OF_DCP = {COLLECTIVE: 1.0, LOAD: 1.3}
HELD_UP = 0.10


@dataclass(frozen=True)
class CheckpointRow:
    """One way to write or read the state; lists are by round.

    `bytes` are those of all ranks, `seconds` of the slowest. `of_plain`: the bandwidth over that of plain
    files; `of_dcp`: over torch's. `extra_bytes` is the most memory that a rank took beyond what it held
    before, in any round; None where the system does not tell.
    """

    name: str
    bytes: int
    seconds: list[float]
    of_plain: list[float]
    of_dcp: list[float]
    extra_bytes: int | None


@dataclass(frozen=True)
class TrainingDuringSaves:
    """Training during background saves, by round.

    `held_up`: seconds that the training thread spent in the save. `of_collective`: these over the time of a
    collective save. `steps`: taken until the file was complete. `slower`: their time over that of as many
    without a save.
    """

    held_up: list[float]
    of_collective: list[float]
    steps: list[int]
    slower: list[float]


@dataclass(frozen=True)
class CheckpointBenchOptions:
    """How often to measure, beside what, and where: `folder` exists, and all ranks see it."""

    rounds: int
    dcp: bool = False
    folder: Path = Path()
    warm: bool = False


def bench_checkpoint(
    world: World, path: Path, overrides: Sequence[str], wish: CheckpointBenchOptions, output: Path | None
) -> None:
    """Time saving and loading the state of a deck's engine, in turns with what it is compared with."""
    with world.agreement():
        deck = read_deck(path, overrides)
        if not wish.folder.is_dir():
            raise HpctrainError(f"--dir {wish.folder}: must be an existing folder")
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    if wish.dcp:
        start_gloo(world)
    bench = _Bench(world, deck, wish)
    try:
        for _ in range(1 + wish.rounds):
            bench.round()
    finally:
        bench.close()
    if wish.dcp:
        stop_gloo()
    rows, training = bench.rows(), bench.training()
    with world.agreement():
        if world.rank == 0:
            _show(deck, world, wish, rows, training)
            if output is not None:
                write_json(output, {"rows": [asdict(row) for row in rows], "training": asdict(training)})


class _Bench:
    """An engine whose state is saved and loaded, and what was measured."""

    def __init__(self, world: World, deck: Deck, wish: CheckpointBenchOptions) -> None:
        deck = with_vocabulary(deck)
        vocabulary = deck.model.vocabulary
        assert vocabulary is not None
        self.world, self.deck, self.wish = world, deck, wish
        engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
        batches = Batches(SyntheticSource(deck.batch.sequence, vocabulary, deck.run.seed), deck.run.seed)
        self.trainer = Trainer(deck, engine, batches)
        self._train(1)  # moments that are not zero
        self.stored = {**asdict(self.trainer.state), **deck_state(deck)}
        self.entries = training_entries(engine.state(), writing=True)
        self.loaded = training_entries(t for t in engine.state() if t.resume_mode != "never")
        self.write_bytes = _bytes([entry.part(*entry.share()) for entry in self.entries])
        self.read_bytes = _bytes(self.loaded)
        self.dcp: TorchCheckpoint | None = None
        if wish.dcp:
            names = world.everyone.all_gather_object([entry.dataset for entry in self.loaded])
            self.dcp = TorchCheckpoint(world, self.entries, set().union(*names))
        self.piece_bytes = min(PIECE_BYTES, deck.checkpoint.buffer)
        self.buffer: HostBuffer | None = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, list[int | None]] = defaultdict(list)
        self.held_up: list[float] = []
        self.steps: list[int] = []
        self.alone: list[float] = []
        self.trained: PeakMemory | None = None
        folder = None
        with world.agreement():
            if world.rank == 0:
                folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=wish.folder)
        self.folder = Path(world.everyone.broadcast_object(folder))

    def close(self) -> None:
        """Remove what was written."""
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def round(self) -> None:
        """Everything once; collective. Of the first round, which fills caches, the memory alone counts."""
        everyone = self.world.everyone
        with self._fresh() as folder:
            files = [folder / f"rank-{rank}" for rank in range(everyone.size)]
            files = files[everyone.rank :] + files[: everyone.rank]
            self._measure(PLAIN_WRITE, lambda: self._alone(lambda: write_plain(files[0], self.write_bytes)))
            self._forget(folder)
            self._measure(PLAIN_READ, lambda: self._alone(lambda: read_plain(files, self.read_bytes)))
        with self._fresh() as folder:
            path = folder / "collective.h5"
            entries, stored, piece = self.entries, self.stored, self.piece_bytes
            self._measure(COLLECTIVE, lambda: save(path, everyone, entries, stored, piece))
            self._forget(folder)
            self._measure(LOAD, lambda: load(path, everyone, self.loaded, buffer_bytes=self.piece_bytes))
        with self._fresh() as folder:
            if self.trained is None:
                self.trained = PeakMemory()
                self._train(2)
                self.trained.stop()
            self._measure(TRAINING, lambda: self._train_during_save(folder), beyond=self.trained)
            self.alone.append(seconds_of(self.world, lambda: self._train(self.steps[-1])))
        with self._fresh() as folder:
            self._measure(BACKGROUND, lambda: self._begin(folder).poll(wait=True))
        if self.dcp is not None:
            dcp = self.dcp
            with self._fresh() as folder:
                self._measure(DCP_SAVE, lambda: dcp.save(folder))
                self._forget(folder)
                self._measure(DCP_LOAD, lambda: dcp.load(folder))

    def rows(self) -> list[CheckpointRow]:
        """What was measured; collective, the same on all ranks."""
        bandwidth: dict[str, list[float]] = {}
        rows = []
        for name, seconds in self.seconds.items():
            moved = self.write_bytes if name in SAVES else self.read_bytes
            if name == DCP_LOAD and self.dcp is not None:
                moved = self.dcp.read_bytes
            gathered = self.world.everyone.all_gather_object((moved, self.extra[name]))
            total = sum(each for each, _ in gathered)
            extras = [extra for _, extras in gathered for extra in extras]
            known = [extra for extra in extras if extra is not None]
            bandwidth[name] = [total / each for each in seconds[1:]]
            peak = max(known) if len(known) == len(extras) else None
            rows.append(CheckpointRow(name, total, seconds[1:], [], [], peak))
        for row in rows:
            saving = row.name in SAVES
            for ratios, other in (
                (row.of_plain, PLAIN_WRITE if saving else PLAIN_READ),
                (row.of_dcp, DCP_SAVE if saving else DCP_LOAD),
            ):
                others = bandwidth.get(other, [])
                ratios += [a / b for a, b in zip(bandwidth[row.name], others, strict=False)]
        return rows

    def training(self) -> TrainingDuringSaves:
        """What background saves cost the training beside them, the same on all ranks."""
        collective, during = self.seconds[COLLECTIVE][1:], self.seconds[TRAINING][1:]
        return TrainingDuringSaves(
            self.held_up[1:],
            [a / b for a, b in zip(self.held_up[1:], collective, strict=True)],
            self.steps[1:],
            [a / b for a, b in zip(during, self.alone[1:], strict=True)],
        )

    def _train_during_save(self, folder: Path) -> None:
        """Begin to save, and train until the file is complete."""
        held_up, count = 0.0, 0

        def timed(act: Callable[..., Result], *arguments: object) -> Result:
            nonlocal held_up
            began = time.perf_counter()
            result = act(*arguments)
            held_up += time.perf_counter() - began
            return result

        class Protection(Hook):
            @contextmanager
            def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
                timed(pending.protect, False)
                yield

            def before_update(self) -> None:
                timed(pending.protect)

        pending = timed(self._begin, folder)
        protection = Protection()
        self.trainer.hooks.append(protection)
        complete = False
        while not complete:
            self._train(1)
            count += 1
            complete = timed(pending.poll)
        self.trainer.hooks.remove(protection)
        self.held_up.append(slowest(self.world, held_up))
        self.steps.append(count)

    def _begin(self, folder: Path) -> BackgroundSave:
        if self.buffer is None:
            self.buffer = HostBuffer(self.deck.checkpoint.buffer, self.world.device)
        path = folder / "background.h5"
        return BackgroundSave(path, self.world.everyone, self.entries, self.stored, self.buffer)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step(self.deck.batch.global_size)

    def _measure(self, name: str, run: Callable[[], object], beyond: PeakMemory | None = None) -> None:
        """Time it; the extra memory is that beyond what the rank holds, or beyond another peak."""
        memory = PeakMemory()
        self.seconds[name].append(seconds_of(self.world, run))
        self.extra[name].append(memory.stop(beyond))

    def _alone(self, run: Callable[[], None]) -> None:
        """Errors of the system are those of all ranks."""
        with self.world.agreement():
            run()

    @contextmanager
    def _fresh(self) -> Iterator[Path]:
        """An empty folder, removed afterwards."""
        folder = self.folder / "measured"
        with self.world.agreement():
            if self.world.rank == 0:
                folder.mkdir()
        yield folder
        self.world.everyone.barrier()
        with self.world.agreement():
            if self.world.rank == 0:
                shutil.rmtree(folder)

    def _forget(self, folder: Path) -> None:
        if not self.wish.warm:
            self.world.everyone.barrier()
            self._alone(lambda: drop_from_cache(folder))


def _bytes(entries: Sequence[TensorRange]) -> int:
    return sum(entry.values.nbytes for entry in entries)


def _show(
    deck: Deck,
    world: World,
    wish: CheckpointBenchOptions,
    rows: Sequence[CheckpointRow],
    training: TrainingDuringSaves,
) -> None:
    console = stdout_console()
    stored = next(row.bytes for row in rows if row.name == PLAIN_WRITE)
    console.print(
        f"{deck.run.title}: checkpoint of {format_bytes(stored)}, {deck.precision.format_name}, "
        "layout.zero = "
        f"{deck.layout.zero}, {counted(world.size, 'rank')}, {counted(wish.rounds, 'round')}; files "
        "that are read " + ("may be in the page cache" if wish.warm else "are not in the page cache")
    )
    head = ["operation", "MB/s", "of plain", "range", "target", "of dcp", "target", "extra memory"]
    console.print("\n".join(table([head, *map(_cells, rows)])))
    limit = format_bytes(deck.checkpoint.buffer + EXTRA_BYTES, binary=True)
    console.print(
        f"{TRAINING}: a background save during training steps; extra memory: peak of a rank above its "
        "memory before, "
        f"target {limit} (checkpoint.buffer and 64 MiB)"
    )
    console.print(
        f"a background save stops training for {format_seconds(median(training.held_up))}, "
        f"{median(training.of_collective):.1%} of the time of a collective save "
        f"({min(training.of_collective):.1%} to {max(training.of_collective):.1%}; target {HELD_UP:.0%})"
    )
    console.print(
        f"it takes {median(training.steps):.0f} steps, each {median(training.slower):.2f} times "
        f"as long as without a save ({min(training.slower):.2f} to {max(training.slower):.2f})"
    )


def _cells(row: CheckpointRow) -> list[str]:
    return [
        row.name,
        f"{median(row.bytes / seconds for seconds in row.seconds) / 1e6:.0f}",
        f"{median(row.of_plain):.0%}",
        f"{min(row.of_plain):.0%} to {max(row.of_plain):.0%}",
        f"{OF_PLAIN[row.name]:.0%}" if row.name in OF_PLAIN else "",
        f"{median(row.of_dcp):.2f}" if row.of_dcp and row.name not in (PLAIN_WRITE, PLAIN_READ) else "",
        f"{OF_DCP[row.name]:.2f}" if row.of_dcp and row.name in OF_DCP else "",
        "n/a" if row.extra_bytes is None else format_bytes(row.extra_bytes, binary=True),
    ]
