"""Ranks of srun that MPI could not join are reported before MPI starts."""

from __future__ import annotations

import _ctypes  # a library, in the place of that of MPI
from pathlib import Path

import pytest

from hpctrain.host.launcher import describe_missing_pmix, find_unsafe_start

STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}
BATCH = {"SLURM_STEP_ID": "4294967291", "SLURM_STEPID": "4294967291"}


@pytest.mark.parametrize(
    ("environment", "vendor", "lost"),
    [
        (STEP, "Open MPI", True),
        (STEP | {"PMI_RANK": "0", "PMI_SIZE": "4"}, "Open MPI", True),  # --mpi=pmi2
        (STEP, "MPICH", False),  # has ways of its own
        (STEP | {"PMIX_RANK": "0"}, "Open MPI", False),
        (STEP | {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI", False),  # mpirun inside a step
        (STEP | BATCH, "Open MPI", False),
        ({}, "Open MPI", False),
    ],
)
def test_srun_without_pmix_is_reported(environment: dict[str, str], vendor: str, lost: bool) -> None:
    told = describe_missing_pmix(environment, vendor, [_ctypes.__file__])
    assert told.startswith("srun started 4 ranks without PMIx") == lost
    assert bool(told) == lost


def test_an_open_mpi_with_components_for_slurm_needs_no_pmix(tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so.40"
    library.symlink_to(_ctypes.__file__)
    assert describe_missing_pmix(STEP, "Open MPI", [str(library)])
    (tmp_path / "openmpi" / "lib").mkdir(parents=True)
    (tmp_path / "openmpi" / "lib" / "mca_pmix_s1.so").touch()
    assert not describe_missing_pmix(STEP, "Open MPI", [str(library)])
    assert not describe_missing_pmix(STEP, "Open MPI", [])


@pytest.mark.parametrize(
    ("environment", "nodes", "unsafe"),
    [
        (STEP | {"PMIX_RANK": "0"}, 2, True),
        (STEP | {"PMIX_RANK": "0", "SLURM_PMIX_FENCE": "mixed"}, 2, True),
        (STEP | {"PMIX_RANK": "0", "SLURM_PMIX_FENCE": "ring"}, 2, False),
        (STEP | {"PMIX_RANK": "0"}, 1, False),
        (STEP | {"PMI_RANK": "0"}, 2, False),
        (STEP | {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 2, False),  # mpirun inside a step
    ],
)
def test_a_start_without_a_barrier_is_reported(environment: dict[str, str], nodes: int, unsafe: bool) -> None:
    assert bool(find_unsafe_start(environment, nodes)) == unsafe
