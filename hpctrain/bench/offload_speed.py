"""`hpctrain bench offload`: update of optimizer state in files, compared with disk and processor alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import publish, time_by_turns, with_vocabulary
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.offload_allocators import offload_folder, open_scratch
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.memory.scratch import THREADS, ScratchFile, Transfer
from hpctrain.plan.engine import build_within_memory
from hpctrain.units import format_bytes, format_seconds

CHUNK_BYTES = 16 << 20
"""Size of a transfer when the disk is measured alone."""


@dataclass(frozen=True)
class OffloadResult:
    """Results: medians over the rounds, of the slowest rank.

    Attributes:
        bytes_moved: Bytes that a rank reads and writes in an update.
        disk_seconds: Seconds to read and write as many bytes alone.
        compute_seconds: Seconds of the update with the state in memory.
        update_seconds: Seconds of the update with the state in files.
        share: Sum of `disk_seconds` and `compute_seconds` relative to `update_seconds`; above 1 if they
            overlap.
    """

    bytes_moved: int
    disk_seconds: float
    compute_seconds: float
    update_seconds: float
    share: float

    def lines(self) -> list[str]:
        """Return the results as lines of text."""
        rate = format_bytes(self.bytes_moved / self.disk_seconds)
        return [
            f"optimizer state moved per rank  {format_bytes(self.bytes_moved)}",
            f"disk alone, {THREADS} threads           {format_seconds(self.disk_seconds)} ({rate}/s)",
            f"update alone, state in memory   {format_seconds(self.compute_seconds)}",
            f"sum of both                     {format_seconds(self.disk_seconds + self.compute_seconds)}",
            f"update, state in files          {format_seconds(self.update_seconds)}",
            f"sum / update, state in files    {self.share:.0%} (above 100%: disk and update overlap)",
        ]


def bench_offload(
    world: World, path: Path, overrides: Sequence[str], rounds: int, output: Path | None
) -> None:
    """Measure updates of a deck's optimizer with its state in files and in memory. Collective.

    The files are in the folder of a run, or in the nearest existing folder above it. They are removed in the
    end.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        rounds: Number of rounds.
        output: File for the results; None for no file.
    """
    with world.agreement():
        deck = read_deck(path, overrides, read_source=read_source_keys)
    folder = offload_folder(deck).absolute()
    existing = next(parent for parent in (*folder.parents, folder) if parent.exists())
    deck = deck.with_keys(memory={"offload_dir": str(existing / folder.name)})
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    file_engine, memory_engine = (_build_engine(deck, world, device) for device in ("disk", "device"))
    (state_files,) = file_engine.scratch
    size = sum(file.stat().st_size for file in state_files.folder.glob("optimizer-*"))
    scratch = open_scratch(deck, world, size)
    with world.agreement():
        file = scratch.file("measured", size)
    buffers = [torch.zeros(min(CHUNK_BYTES, size), dtype=torch.uint8) for _ in range(THREADS)]
    seconds = time_by_turns(
        world,
        {
            "disk": lambda: _read_and_write(file, buffers),
            "memory": lambda: memory_engine.stage.optimizer.step(1e-6, 1.0),
            "files": lambda: file_engine.stage.optimizer.step(1e-6, 1.0),
        },
        rounds,
    )
    shares = [(a + b) / c for a, b, c in zip(*seconds.values(), strict=True)]
    disk, memory, files = map(median, seconds.values())
    results = OffloadResult(2 * size, disk, memory, files, median(shares))
    scratch.close()
    file_engine.close()
    publish(world, results.lines(), asdict(results), output)


def _build_engine(deck: Deck, world: World, device: str) -> Engine:
    """Return an engine with random gradients, whose optimizer state is on a device of `memory.optimizer`."""
    deck = with_vocabulary(deck).with_keys(memory={"optimizer": device, "parameters": "device"})
    engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
    for bucket in engine.stage.buckets:
        bucket.owned_gradients.normal_(std=1e-3)
    return engine


def _read_and_write(file: ScratchFile, buffers: Sequence[torch.Tensor]) -> None:
    """Read a file completely, then write it, with as many transfers at a time as there are buffers."""
    chunk = buffers[0].numel()
    for start in (file.start_read, file.start_write):
        transfers: list[Transfer] = []
        for number, first in enumerate(range(0, file.size, chunk)):
            if number >= len(buffers):
                transfers[number - len(buffers)].result()
            part = buffers[number % len(buffers)][: file.size - first]
            transfers.append(start(first, part))
        for transfer in transfers:
            transfer.result()
