"""Peak memory of variants of a training step, each in new processes.

The peak of a process never decreases, so that variants in the same processes have no peaks of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hpctrain.bench.measurement import wait_asleep
from hpctrain.bench.peers.peer_process import without_launcher
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.commands import module_command
from hpctrain.host.mpi_library import MPI

if TYPE_CHECKING:
    from hpctrain.bench.training_speed import TrainingBenchOptions


def measure_peak_memory(
    world: World, path: Path, overrides: Sequence[str], options: TrainingBenchOptions, names: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Measure the peak memory of variants of hpctrain. Collective.

    Rank 0 starts a job with mpirun for each variant, which has as many ranks and takes two steps. All ranks
    sleep in the meantime.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        options: Options of the benchmark.
        names: Names of the variants.

    Returns:
        Peak bytes of a rank, and of all ranks of the node, by name.

    Raises:
        HpctrainError: The ranks are on several nodes, or a job failed.
    """
    if world.nodes > 1:
        raise HpctrainError(f"--memory: requires one node, but the ranks are on {world.nodes}")
    peaks: dict[str, tuple[int, int]] = {}
    with world.agreement():
        if world.rank == 0:
            peaks = {name: _run_job(world.size, path, overrides, options, name) for name in names}
        wait_asleep(world)
    return {
        name: (resident, node) for name, (resident, node) in world.everyone.broadcast_object(peaks).items()
    }


def _run_job(
    ranks: int, path: Path, overrides: Sequence[str], options: TrainingBenchOptions, name: str
) -> tuple[int, int]:
    """Measure one variant in a job of its own, and return its peak bytes of a rank and of the node."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        changes = [f"--set={each}" for each in overrides] + [f"--variant={each}" for each in options.variants]
        flags = ["--data-parallel"] * options.data_parallel + ["--no-sync"] * options.no_sync
        measure = ["--steps=1", "--rounds=1", f"--only={name}", f"--json={results}"]
        verb = module_command(arguments=["bench", "train", str(path), *changes, *flags, *measure])
        done = subprocess.run(
            [*(launch_command(ranks) if ranks > 1 else []), *verb],
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
        row = json.loads(results.read_text(encoding="utf-8"))["rows"][0]
    return row["peak_bytes"], row["node_bytes"] or 0


def launch_command(ranks: int) -> list[str]:
    """Return the start of a command line that runs a program on so many ranks of this node.

    Raises:
        HpctrainError: The launcher is not in PATH.
    """
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if launcher is None:
        raise HpctrainError("--memory: requires mpirun or mpiexec in PATH")
    flags = ["--oversubscribe", "--bind-to", "none"] if MPI.get_vendor()[0] == "Open MPI" else []
    return [launcher, *flags, "-n", str(ranks)]
