"""What is said where MPI cannot open a file for all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.comm import parallel_files
from hpctrain.comm.outcome import reason
from hpctrain.comm.parallel_files import require_parallel_files
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError


def test_a_folder_that_can_be_written_stays_empty(world: World, tmp_path: Path) -> None:
    require_parallel_files(world.alone(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_mpi_says_is_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    opens = "gone: MPI_File_open cannot open a file on all ranks \\(MPI_ERR_[^)]*\\)"
    with pytest.raises(InputOutputError, match=f"{opens}$"):
        require_parallel_files(world.alone(), gone)
    monkeypatch.setattr(parallel_files, "SHARED_MEMORY", gone)
    monkeypatch.setattr(parallel_files.MPI, "get_vendor", lambda: ("Open MPI", (4, 1, 4)))
    with pytest.raises(
        InputOutputError, match=f"{opens}; {gone} cannot be written to on this node: .*sharedfp"
    ):
        require_parallel_files(world.alone(), gone)


def test_what_mpi_says_within_an_error_of_hdf5_is_told() -> None:
    error = OSError(
        "Unable to open file (MPI_File_open failed: MPI error string is 'MPI_ERR_OTHER: not listed')"
    )
    assert reason(error) == "MPI_File_open failed: MPI_ERR_OTHER: not listed"


def test_full_shared_memory_is_told_before_a_file_is_opened(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 3, 3, 10, 10, 10, 0, 255))
    monkeypatch.setattr(parallel_files.MPI, "get_vendor", lambda: ("Open MPI", (4, 1, 4)))
    monkeypatch.setattr(parallel_files.os, "statvfs", lambda _: full)
    monkeypatch.delenv("OMPI_MCA_sharedfp", raising=False)
    with pytest.raises(InputOutputError, match=r"/dev/shm is full on this node: .*OMPI_MCA_sharedfp=.sm"):
        require_parallel_files(world.alone(), tmp_path)
