"""Tests of files that all ranks open through MPI, if MPI or the disk reports errors.

Tests of comm/parallel_files.py and host/hdf5_calls.py.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.comm import parallel_files
from hpctrain.comm.error_messages import error_reason
from hpctrain.comm.parallel_files import descriptors_of, open_on_all_ranks, require_parallel_files
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError


def test_check_leaves_the_folder_empty(world: World, tmp_path: Path) -> None:
    require_parallel_files(world.single_rank_world(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_error_contains_the_message_of_mpi(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    opens = f"{tmp_path}: MPI_File_open cannot open a file on all ranks \\(MPI_ERR_[^)]*\\)"
    monkeypatch.setattr(parallel_files.MPI, "MODE_RDWR", 0)
    with pytest.raises(InputOutputError, match=f"{opens}$"):
        require_parallel_files(world.single_rank_world(), tmp_path)
    monkeypatch.setattr(parallel_files, "SHARED_MEMORY", missing)
    monkeypatch.setattr(parallel_files.MPI, "get_vendor", lambda: ("Open MPI", (4, 1, 4)))
    with pytest.raises(
        InputOutputError, match=f"{opens}; {missing} cannot be written to on this node: .*sharedfp"
    ):
        require_parallel_files(world.single_rank_world(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_message_of_mpi_is_extracted_from_an_error_of_hdf5() -> None:
    error = OSError(
        "Unable to open file (MPI_File_open failed: MPI error string is 'MPI_ERR_OTHER: not listed')"
    )
    assert error_reason(error) == "MPI_File_open failed: MPI_ERR_OTHER: not listed"


def test_full_shared_memory_is_reported_before_a_file_is_opened(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 3, 3, 10, 10, 10, 0, 255))
    monkeypatch.setattr(parallel_files.MPI, "get_vendor", lambda: ("Open MPI", (4, 1, 4)))
    monkeypatch.setattr(parallel_files.os, "statvfs", lambda _: full)
    monkeypatch.delenv("OMPI_MCA_sharedfp", raising=False)
    with pytest.raises(InputOutputError, match=r"/dev/shm is full on this node: .*OMPI_MCA_sharedfp=.sm"):
        require_parallel_files(world.single_rank_world(), tmp_path)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_locked_semaphore_and_failing_disk_do_not_block_ranks(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / f"{uuid.uuid4().hex}.h5"
    path = world.everyone.broadcast_object(path)
    if world.rank == 0:
        (parallel_files.SHARED_MEMORY / f"sem.OMPIO_{path.name}").write_bytes(bytes(32))
        with h5py.File(path, "w", libver=("v108", "v108")) as file:
            file.create_dataset("values", data=np.zeros(world.size))
    world.everyone.barrier()
    other_descriptors, failed = descriptors_of(path), False
    with open_on_all_ranks(path, world.everyone) as file:
        if world.rank == 0:
            read_only = os.open(path, os.O_RDONLY)
            for descriptor in descriptors_of(path) - other_descriptors - {read_only}:
                os.dup2(read_only, descriptor)
            os.close(read_only)
        try:
            h5py.Group(file)["values"][world.rank] = 1.0
        except OSError:
            failed = True
    assert failed == (world.rank == 0)
    world.everyone.barrier()
    with h5py.File(path, "r") as file:
        assert file["values"][()].tolist() == [0.0, 1.0]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_missing_file_is_refused(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "a.h5"
    raises = pytest.raises(InputOutputError, match=r"a\.h5: cannot be opened: ")
    with raises, open_on_all_ranks(path, world.everyone):
        pass
