"""Temporary files: reading returns what was written, faults are reported, and all files are deleted.

Also tests of memory/offload_folder.py.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hpctrain.errors import EXIT_INPUT_OUTPUT, EXIT_USER, HpctrainError, InputOutputError
from hpctrain.memory.offload_folder import check_disk_space
from hpctrain.memory.scratch import ScratchFiles, ScratchTensor


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFiles]:
    opened = ScratchFiles(tmp_path / "offload", 0)
    yield opened
    opened.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_files_return_what_was_written(scratch: ScratchFiles, dtype: torch.dtype) -> None:
    file = scratch.file("state", 1 << 16)
    values = torch.randn(3, 1000).to(dtype)
    other = torch.arange(500, dtype=torch.int32)
    transfers = [file.start_write(64, values), file.start_write(50_000, other)]
    for transfer in transfers:
        transfer.result()
    found, found_other = torch.empty_like(values), torch.empty_like(other)
    transfers = [file.start_read(64, found), file.start_read(50_000, found_other)]
    for transfer in transfers:
        transfer.result()
    assert torch.equal(found, values)
    assert torch.equal(found_other, other)


def test_slices_of_a_tensor_in_a_file(scratch: ScratchFiles) -> None:
    flat = ScratchTensor(scratch.file("state", 4096), 96, 1000, torch.float32)
    assert torch.equal(flat.load(), torch.zeros(1000))
    flat[100:][200:300].copy_(torch.arange(100.0))
    assert torch.equal(flat[290:410].load()[10:110], torch.arange(100.0))
    assert float(flat.load().sum()) == 4950.0
    assert flat[400:300].numel() == 0
    assert flat[:7].nbytes == 28


def test_disk_space_is_allocated_at_once(scratch: ScratchFiles) -> None:
    file = scratch.file("state", 1 << 20)
    assert file.path.stat().st_blocks * 512 >= 1 << 20


def test_files_are_deleted_when_closed(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    with_close = ScratchFiles(folder, 0)
    path = with_close.file("state", 10).path
    beside = ScratchFiles(folder, 1)
    assert path.exists()
    with_close.close()
    assert not path.exists()
    assert folder.exists()
    beside.close()
    assert not folder.exists()

    forgotten = ScratchFiles(folder, 0)
    forgotten.file("state", 10)
    del forgotten
    assert not folder.exists()


CHILD = """
import os, signal, sys
from pathlib import Path
from hpctrain.memory.scratch import ScratchFiles
scratch = ScratchFiles(Path(sys.argv[1]), 3)
scratch.file("state", 1000)
print(scratch.folder.name, flush=True)
sys.stdin.readline()
if sys.argv[2] == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["crash", "exit"])
def test_files_of_ended_processes_are_deleted_and_those_of_running_ones_stay(
    tmp_path: Path, ending: str
) -> None:
    folder = tmp_path / "offload"
    foreign = folder / "offload-otherhost-1-2-rank0-x"
    foreign.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, folder, ending],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        left = folder / child.stdout.readline().strip()
        check_disk_space(folder, 0)
        assert (left / "state").exists()
        child.stdin.write("\n")
        child.stdin.flush()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not taken note of
        assert left.exists() == (ending == "crash")
        check_disk_space(folder, 0)
        assert not left.exists()
        assert child.wait() == (-signal.SIGKILL if ending == "crash" else 0)
    assert foreign.exists()


def test_a_process_with_a_reused_pid_counts_as_another(tmp_path: Path) -> None:
    import socket

    left = tmp_path / f"offload-{socket.gethostname()}-{os.getpid()}-1-rank0-x"
    left.mkdir()
    check_disk_space(tmp_path, 0)
    assert not left.exists()


def test_a_folder_that_is_too_small_or_not_writable_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"requires 1000 PB on this disk, which has .* free") as caught:
        check_disk_space(tmp_path / "new" / "offload", 10**18)
    assert caught.value.exit_code == EXIT_USER
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    for refused in (lambda folder: check_disk_space(folder, 0), lambda folder: ScratchFiles(folder, 0)):
        with pytest.raises(HpctrainError, match="Not a directory") as caught:
            refused(tmp_path / "file" / "offload")
        assert caught.value.exit_code == EXIT_USER


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit files to `size` bytes, which a process sees like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_raises_an_error(scratch: ScratchFiles) -> None:
    with limited_files(10_000), pytest.raises(InputOutputError, match=r"/state: .*File too large") as caught:
        scratch.file("state", 20_000)
    assert caught.value.exit_code == EXIT_INPUT_OUTPUT
    file = scratch.file("other", 20_000)
    with limited_files(10_000):
        transfer = file.start_write(12_000, torch.ones(10))
        with pytest.raises(InputOutputError, match=r"/other: .* cannot be written: File too large"):
            transfer.result()


def test_a_deleted_or_shrunk_file_raises_an_error(scratch: ScratchFiles) -> None:
    file = scratch.file("state", 8000)
    values = torch.ones(1000)
    os.truncate(file.path, 5000)
    for transfer in (file.start_read(4000, values), file.start_write(0, values)):
        with pytest.raises(InputOutputError, match=r"/state: .* was truncated"):
            transfer.result()
    os.truncate(file.path, 8000)
    file.start_write(0, values).result()
    file.path.unlink()
    for transfer in (file.start_read(0, values), file.start_write(0, values)):
        with pytest.raises(InputOutputError, match=r"/state: .* was removed"):
            transfer.result()


def test_foreign_files_are_not_deleted(tmp_path: Path) -> None:
    """This holds for an existing folder, files beside ours, and the targets of links."""
    folder = tmp_path / "mine"
    folder.mkdir()
    scratch = ScratchFiles(folder, 0)
    scratch.file("state", 10)
    (scratch.folder / "thesis.tex").touch()
    scratch.close()
    assert [path.name for path in scratch.folder.iterdir()] == ["thesis.tex"]
    (scratch.folder / "thesis.tex").unlink()
    scratch.folder.rmdir()
    ScratchFiles(folder, 0).close()
    assert folder.exists()

    import socket

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "state").touch()
    (folder / f"offload-{socket.gethostname()}-{os.getpid()}-1-rank0-x").symlink_to(tmp_path / "precious")
    check_disk_space(folder, 0)
    assert (tmp_path / "precious" / "state").exists()
