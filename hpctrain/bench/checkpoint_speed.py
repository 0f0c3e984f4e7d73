"""`hpctrain bench checkpoint`: saving and loading, compared with plain files and those of torch.

Each round measures everything once. Only ratios within a round are meaningful. Each rank writes a plain file
of as many bytes as it writes of the checkpoint, and reads as many bytes as it loads, from its own file first.
Times of writing include the flush to the disk. Before reading, the files are dropped from the page cache, as
after a crash, unless `warm` is set. Creating folders, dropping caches and removing files are not timed.

Training steps during a background save are compared with as many steps right after it.
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

from hpctrain.bench.measurement import publish, seconds_of, slowest, with_vocabulary
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
from hpctrain.text import counted, table
from hpctrain.train.hook import Hook
from hpctrain.train.trainer import Trainer
from hpctrain.units import format_bytes, format_seconds

Result = TypeVar("Result")

EXTRA_BYTES = 64 << 20
"""Target of the memory that a rank needs for saving and loading in addition to `checkpoint.buffer`."""

PLAIN_WRITE, PLAIN_READ = "plain write", "plain read"
COLLECTIVE, BACKGROUND, TRAINING = "collective", "background", "in training"
LOAD, DCP_SAVE, DCP_LOAD = "load", "dcp save", "dcp load"
SAVES = (PLAIN_WRITE, COLLECTIVE, BACKGROUND, TRAINING, DCP_SAVE)
PLAIN_TARGETS = {COLLECTIVE: 0.70, BACKGROUND: 0.85, LOAD: 0.85}
"""Targets of the bandwidth relative to that of plain files."""
DCP_TARGETS = {COLLECTIVE: 1.0, LOAD: 1.3}
"""Targets of the bandwidth relative to that of torch.distributed.checkpoint."""
BLOCKED_TARGET = 0.10
"""Target of the time for which a background save stops training, relative to that of a collective save."""


@dataclass(frozen=True)
class CheckpointRow:
    """Results of one way to write or read the state.

    Attributes:
        name: Name of the operation.
        bytes: Bytes of all ranks together.
        seconds: Seconds of the slowest rank, by round.
        of_plain: Bandwidth relative to that of plain files, by round.
        of_dcp: Bandwidth relative to that of torch.distributed.checkpoint, by round; empty without it.
        extra_bytes: Largest growth of a rank's memory in any round; None if the system does not report it.
    """

    name: str
    bytes: int
    seconds: list[float]
    of_plain: list[float]
    of_dcp: list[float]
    extra_bytes: int | None


@dataclass(frozen=True)
class TrainingDuringSaves:
    """Training during background saves.

    Attributes:
        held_up: Seconds for which the save stopped the training thread, by round.
        of_collective: These seconds relative to the time of a collective save, by round.
        steps: Steps until the file was complete, by round.
        slower: Time of these steps relative to as many steps without a save, by round.
    """

    held_up: list[float]
    of_collective: list[float]
    steps: list[int]
    slower: list[float]


@dataclass(frozen=True)
class CheckpointBenchOptions:
    """Options of `hpctrain bench checkpoint`.

    Attributes:
        rounds: Number of rounds.
        dcp: Also measure torch.distributed.checkpoint.
        folder: Existing folder for temporary files, which all ranks share.
        warm: Read files that may be in the page cache.
    """

    rounds: int
    dcp: bool = False
    folder: Path = Path()
    warm: bool = False


def bench_checkpoint(
    world: World, path: Path, overrides: Sequence[str], options: CheckpointBenchOptions, output: Path | None
) -> None:
    """Measure saving and loading the training state of a deck, and print a table. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        options: What to measure, and where.
        output: File for the results; None for no file.
    """
    with world.agreement():
        deck = read_deck(path, overrides)
        if not options.folder.is_dir():
            raise HpctrainError(f"--dir {options.folder}: must be an existing folder")
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    if options.dcp:
        start_gloo(world)
    bench = _CheckpointBench(world, deck, options)
    try:
        for _ in range(1 + options.rounds):
            bench.round()
    finally:
        bench.close()
    if options.dcp:
        stop_gloo()
    rows, training = bench.rows(), bench.training()
    lines = _result_lines(deck, world, options, rows, training)
    publish(world, lines, {"rows": [asdict(row) for row in rows], "training": asdict(training)}, output)


class _CheckpointBench:
    """Engine whose state is saved and loaded, with the measurements of all rounds."""

    def __init__(self, world: World, deck: Deck, options: CheckpointBenchOptions) -> None:
        deck = with_vocabulary(deck)
        vocabulary = deck.model.vocabulary
        assert vocabulary is not None
        self.world, self.deck, self.options = world, deck, options
        engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
        batches = Batches(SyntheticSource(deck.batch.sequence, vocabulary, deck.run.seed), deck.run.seed)
        self.trainer = Trainer(deck, engine, batches)
        self._train(1)  # fills the moments of the optimizer
        self.stored = {**asdict(self.trainer.state), **deck_state(deck)}
        self.entries = training_entries(engine.state(), writing=True)
        self.loaded = training_entries(t for t in engine.state() if t.resume_mode != "never")
        self.write_bytes = _bytes([entry.part(*entry.share()) for entry in self.entries])
        self.read_bytes = _bytes(self.loaded)
        self.dcp: TorchCheckpoint | None = None
        if options.dcp:
            names = world.everyone.all_gather_object([entry.dataset for entry in self.loaded])
            self.dcp = TorchCheckpoint(world, self.entries, set().union(*names))
        self.piece_bytes = min(PIECE_BYTES, deck.checkpoint.buffer)
        self.buffer: HostBuffer | None = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, list[int | None]] = defaultdict(list)
        self.blocked: list[float] = []
        self.steps_during_save: list[int] = []
        self.seconds_without_save: list[float] = []
        self.training_memory: PeakMemory | None = None
        folder = None
        with world.agreement():
            if world.rank == 0:
                folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder)
        self.folder = Path(world.everyone.broadcast_object(folder))

    def close(self) -> None:
        """Remove the files of the benchmark."""
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def round(self) -> None:
        """Measure everything once. Collective.

        The first round fills caches, and only its memory counts.
        """
        everyone = self.world.everyone
        with self._empty_folder() as folder:
            files = [folder / f"rank-{rank}" for rank in range(everyone.size)]
            files = files[everyone.rank :] + files[: everyone.rank]
            self._measure(PLAIN_WRITE, lambda: self._agree(lambda: write_plain(files[0], self.write_bytes)))
            self._drop_from_cache(folder)
            self._measure(PLAIN_READ, lambda: self._agree(lambda: read_plain(files, self.read_bytes)))
        with self._empty_folder() as folder:
            path = folder / "collective.h5"
            entries, stored, piece = self.entries, self.stored, self.piece_bytes
            self._measure(COLLECTIVE, lambda: save(path, everyone, entries, stored, piece))
            self._drop_from_cache(folder)
            self._measure(LOAD, lambda: load(path, everyone, self.loaded, buffer_bytes=self.piece_bytes))
        with self._empty_folder() as folder:
            if self.training_memory is None:
                self.training_memory = PeakMemory()
                self._train(2)
                self.training_memory.stop()
            self._measure(TRAINING, lambda: self._train_during_save(folder), beyond=self.training_memory)
            seconds = seconds_of(self.world, lambda: self._train(self.steps_during_save[-1]))
            self.seconds_without_save.append(seconds)
        with self._empty_folder() as folder:
            self._measure(BACKGROUND, lambda: self._start_save(folder).poll(wait=True))
        if self.dcp is not None:
            dcp = self.dcp
            with self._empty_folder() as folder:
                self._measure(DCP_SAVE, lambda: dcp.save(folder))
                self._drop_from_cache(folder)
                self._measure(DCP_LOAD, lambda: dcp.load(folder))

    def rows(self) -> list[CheckpointRow]:
        """Return the results of all operations, the same on all ranks. Collective."""
        bandwidth: dict[str, list[float]] = {}
        rows = []
        for name, seconds in self.seconds.items():
            local_bytes = self.write_bytes if name in SAVES else self.read_bytes
            if name == DCP_LOAD and self.dcp is not None:
                local_bytes = self.dcp.read_bytes
            gathered = self.world.everyone.all_gather_object((local_bytes, self.extra[name]))
            total = sum(count for count, _ in gathered)
            growths = [growth for _, growths in gathered for growth in growths]
            known = [growth for growth in growths if growth is not None]
            bandwidth[name] = [total / each for each in seconds[1:]]
            peak = max(known) if len(known) == len(growths) else None
            rows.append(CheckpointRow(name, total, seconds[1:], [], [], peak))
        for row in rows:
            saving = row.name in SAVES
            for ratios, reference in (
                (row.of_plain, PLAIN_WRITE if saving else PLAIN_READ),
                (row.of_dcp, DCP_SAVE if saving else DCP_LOAD),
            ):
                references = bandwidth.get(reference, [])
                ratios += [a / b for a, b in zip(bandwidth[row.name], references, strict=False)]
        return rows

    def training(self) -> TrainingDuringSaves:
        """Return by how much background saves slow down training, the same on all ranks."""
        collective, during = self.seconds[COLLECTIVE][1:], self.seconds[TRAINING][1:]
        return TrainingDuringSaves(
            self.blocked[1:],
            [a / b for a, b in zip(self.blocked[1:], collective, strict=True)],
            self.steps_during_save[1:],
            [a / b for a, b in zip(during, self.seconds_without_save[1:], strict=True)],
        )

    def _train_during_save(self, folder: Path) -> None:
        """Start a background save, and train until the file is complete."""
        blocked, count = 0.0, 0

        def timed(act: Callable[..., Result], *arguments: object) -> Result:
            nonlocal blocked
            start = time.perf_counter()
            result = act(*arguments)
            blocked += time.perf_counter() - start
            return result

        class SaveProtection(Hook):
            @contextmanager
            def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
                timed(pending.protect, False)
                yield

            def before_update(self) -> None:
                timed(pending.protect)

        pending = timed(self._start_save, folder)
        protection = SaveProtection()
        self.trainer.hooks.append(protection)
        complete = False
        while not complete:
            self._train(1)
            count += 1
            complete = timed(pending.poll)
        self.trainer.hooks.remove(protection)
        self.blocked.append(slowest(self.world, blocked))
        self.steps_during_save.append(count)

    def _start_save(self, folder: Path) -> BackgroundSave:
        if self.buffer is None:
            self.buffer = HostBuffer(self.deck.checkpoint.buffer, self.world.device)
        path = folder / "background.h5"
        return BackgroundSave(path, self.world.everyone, self.entries, self.stored, self.buffer)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step(self.deck.batch.global_size)

    def _measure(self, name: str, run: Callable[[], object], beyond: PeakMemory | None = None) -> None:
        """Record time and memory of an operation. Collective.

        Args:
            name: Name of the operation.
            run: Function that performs it.
            beyond: Measurement above whose peak the memory counts; None for the memory before the operation.
        """
        memory = PeakMemory()
        self.seconds[name].append(seconds_of(self.world, run))
        self.extra[name].append(memory.stop(beyond))

    def _agree(self, run: Callable[[], None]) -> None:
        """Call a function of each rank, and raise its errors on all ranks."""
        with self.world.agreement():
            run()

    @contextmanager
    def _empty_folder(self) -> Iterator[Path]:
        """Yield an empty folder that is removed afterwards. Collective."""
        folder = self.folder / "measured"
        with self.world.agreement():
            if self.world.rank == 0:
                folder.mkdir()
        yield folder
        self.world.everyone.barrier()
        with self.world.agreement():
            if self.world.rank == 0:
                shutil.rmtree(folder)

    def _drop_from_cache(self, folder: Path) -> None:
        if not self.options.warm:
            self.world.everyone.barrier()
            self._agree(lambda: drop_from_cache(folder))


def _bytes(entries: Sequence[TensorRange]) -> int:
    return sum(entry.values.nbytes for entry in entries)


def _result_lines(
    deck: Deck,
    world: World,
    options: CheckpointBenchOptions,
    rows: Sequence[CheckpointRow],
    training: TrainingDuringSaves,
) -> list[str]:
    """Return the results as a table with sentences."""
    stored = format_bytes(next(row.bytes for row in rows if row.name == PLAIN_WRITE))
    setting = f"{counted(world.size, 'rank')}, {counted(options.rounds, 'round')}"
    cached = "may be in the page cache" if options.warm else "are not in the page cache"
    head = ["operation", "MB/s", "of plain", "range", "target", "of dcp", "target", "extra memory"]
    limit = format_bytes(deck.checkpoint.buffer + EXTRA_BYTES, binary=True)
    of_collective, slower = training.of_collective, training.slower
    return [
        f"{deck.run.title}: checkpoint of {stored}, {deck.precision.format_name}, "
        f"layout.zero = {deck.layout.zero}, {setting}; files that are read {cached}",
        *table([head, *map(_cells, rows)]),
        f"{TRAINING}: a background save during training steps; extra memory: peak of a rank above its "
        f"memory before, target {limit} (checkpoint.buffer and 64 MiB)",
        f"a background save stops training for {format_seconds(median(training.held_up))}, "
        f"{median(of_collective):.1%} of the time of a collective save "
        f"({min(of_collective):.1%} to {max(of_collective):.1%}; target {BLOCKED_TARGET:.0%})",
        f"it takes {median(training.steps):.0f} steps, each {median(slower):.2f} times "
        f"as long as without a save ({min(slower):.2f} to {max(slower):.2f})",
    ]


def _cells(row: CheckpointRow) -> list[str]:
    return [
        row.name,
        f"{median(row.bytes / seconds for seconds in row.seconds) / 1e6:.0f}",
        f"{median(row.of_plain):.0%}",
        f"{min(row.of_plain):.0%} to {max(row.of_plain):.0%}",
        f"{PLAIN_TARGETS[row.name]:.0%}" if row.name in PLAIN_TARGETS else "",
        f"{median(row.of_dcp):.2f}" if row.of_dcp and row.name not in (PLAIN_WRITE, PLAIN_READ) else "",
        f"{DCP_TARGETS[row.name]:.2f}" if row.of_dcp and row.name in DCP_TARGETS else "",
        "n/a" if row.extra_bytes is None else format_bytes(row.extra_bytes, binary=True),
    ]
