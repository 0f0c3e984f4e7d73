"""Fixtures of all tests; `tests/mpi_plugin.py` keeps the ranks of a run under mpirun together."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hpctrain.comm.world import World

ROOT = Path(__file__).resolve().parent.parent

# One thread a rank: tests share few cores, and sums must not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing a test does may ask a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(ROOT))
pytest_plugins = ["tests.mpi_plugin"]


@pytest.fixture(scope="session")
def world() -> World:
    """This rank's World, one object for all tests; on the CPU unless HPCTRAIN_TEST_DEVICE says otherwise."""
    from hpctrain.comm.world import World

    return World.start(os.environ.get("HPCTRAIN_TEST_DEVICE", "cpu"))


@pytest.fixture
def mpi_tmp_path(tmp_path: Path, world: World) -> Path:
    """A fresh folder that all ranks share, made by rank 0."""
    return world.communicator.bcast(tmp_path)


def launcher(ranks: int) -> list[str]:
    """The command that starts `ranks` ranks: mpirun or $MPIRUN, with the flags of its kind for few cores."""
    program = shlex.split(os.environ.get("MPIRUN", "mpirun"))
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "open-mpi" in version else []
    return [*program, *flags, "-n", str(ranks)]


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher put there, so that a child may start as a world of its own."""
    marks = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_", "MPI_LOCAL", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
    return kept | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`launch(ranks, *arguments, timeout=60, cwd=tmp_path, **environment)` runs `python *arguments`.

    Under mpirun with `ranks` ranks, or without mpirun where `ranks` is 0; for tests without the mpi mark.
    Returns the CompletedProcess with its text; when the time is up the job is killed and the test fails.
    """

    def run(
        ranks: int, *arguments: str | Path, timeout: float = 60.0, cwd: Path = tmp_path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [*(launcher(ranks) if ranks else []), sys.executable, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            pytest.fail(f"not done after {timeout} s: {shlex.join(command)}\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run
