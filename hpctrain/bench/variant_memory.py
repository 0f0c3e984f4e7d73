"""The memory of variants of ours, each alone in fresh processes: a process's peak never goes down again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from hpctrain.bench.peers.peer_process import without_launcher
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.commands import module_command
from hpctrain.host.mpi_library import MPI

if TYPE_CHECKING:
    from hpctrain.bench.training_speed import TrainingBenchOptions

_NAP = 0.05


def measure_afresh(
    world: World, path: Path, overrides: Sequence[str], wish: TrainingBenchOptions, names: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Of each of the named variants the most that a rank had resident and that the node's ranks had together,
    in two steps of a job of as many ranks, started by mpirun. Collective; the ranks sleep meanwhile.

    HpctrainError where the ranks are not all on one node, or no such job can be started.
    """
    if world.nodes > 1:
        raise HpctrainError(f"--memory: requires one node, but the ranks are on {world.nodes}")
    found: dict[str, tuple[int, int]] = {}
    with world.agreement():
        if world.rank == 0:
            found = {name: _of_one(world.size, path, overrides, wish, name) for name in names}
        _sleep(world)
    return {
        name: (resident, node) for name, (resident, node) in world.everyone.broadcast_object(found).items()
    }


def _of_one(
    ranks: int, path: Path, overrides: Sequence[str], wish: TrainingBenchOptions, name: str
) -> tuple[int, int]:
    with TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        changes = [f"--set={each}" for each in overrides] + [f"--variant={each}" for each in wish.variants]
        flags = ["--data-parallel"] * wish.data_parallel + ["--no-sync"] * wish.no_sync
        measure = ["--steps=1", "--rounds=1", f"--only={name}", f"--json={figures}"]
        verb = module_command(arguments=["bench", "train", str(path), *changes, *flags, *measure])
        done = subprocess.run(
            [*(launch(ranks) if ranks > 1 else []), *verb],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise HpctrainError(
                f"--memory: the process of {name} ended with exit code {done.returncode}: {lines[0]}"
            )
        row = json.loads(figures.read_text(encoding="utf-8"))["rows"][0]
    return row["peak_bytes"], row["node_bytes"] or 0


def launch(ranks: int) -> list[str]:
    """What starts so many ranks on this node, by this MPI's launcher; HpctrainError where it is not found."""
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if launcher is None:
        raise HpctrainError("--memory: requires mpirun or mpiexec in PATH")
    anywhere = ["--oversubscribe", "--bind-to", "none"] if MPI.get_vendor()[0] == "Open MPI" else []
    return [launcher, *anywhere, "-n", str(ranks)]


def _sleep(world: World) -> None:
    """Wait for all ranks, unlike a barrier without keeping a core busy. Collective."""
    work = world.everyone.start_all_reduce(torch.zeros(1))
    while not work.test():
        time.sleep(_NAP)
    work.wait()
