"""Removal of shared memory that killed jobs left: the next job removes it, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.host.shared_memory_cleanup import FOLDER, LOCK_PREFIX, MARKER_PREFIX, remove_stale_segments
from tests.conftest import clean_environment, launcher

NAME = "vader_segment.node.0.1a2b0001.0"


@pytest.fixture
def dead_job(tmp_path: Path) -> Callable[..., Path]:
    """`dead_job(NAME, ...)` creates files of these names and the marker of a dead job that names them."""

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).touch()
        entries = [(name, (tmp_path / name).stat().st_ino) for name in names]
        marker = tmp_path / f"{MARKER_PREFIX}{os.getuid()}.0"
        marker.write_text(json.dumps(entries))
        return marker

    return make


def test_segments_of_a_dead_job_are_removed(tmp_path: Path, dead_job: Callable[..., Path]) -> None:
    other = tmp_path / NAME.replace("1a2b", "3c4d")
    other.touch()  # no marker names it
    marker = dead_job(NAME)
    assert remove_stale_segments(tmp_path) == [NAME]
    assert not marker.exists()
    assert other.exists()
    assert not (tmp_path / NAME).exists()


def test_a_rank_goes_on_only_when_no_other_removes_files(
    tmp_path: Path, dead_job: Callable[..., Path]
) -> None:
    dead_job(NAME)
    removed: list[str] = []
    rank = threading.Thread(target=lambda: removed.extend(remove_stale_segments(tmp_path)))
    with (tmp_path / f"{LOCK_PREFIX}{os.getuid()}").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        rank.start()
        rank.join(0.2)
        assert rank.is_alive()
        assert (tmp_path / NAME).exists()
    rank.join()
    assert removed == [NAME]


def test_segments_of_a_living_job_stay(tmp_path: Path, dead_job: Callable[..., Path]) -> None:
    with dead_job(NAME).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        assert remove_stale_segments(tmp_path) == []
    assert (tmp_path / NAME).exists()


def test_files_other_than_those_of_the_marker_stay(tmp_path: Path, dead_job: Callable[..., Path]) -> None:
    precious = tmp_path / "precious"
    dead_job("precious", NAME)
    (tmp_path / "new").touch()
    (tmp_path / "new").replace(tmp_path / NAME)  # another file of that name
    assert remove_stale_segments(tmp_path) == []
    assert precious.exists()
    assert (tmp_path / NAME).exists()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.touch()
    marker = dead_job(NAME)
    marker.write_text(json.dumps([[f"../{outside.name}", outside.stat().st_ino]]))
    assert remove_stale_segments(tmp_path) == []
    assert outside.exists()
    marker.write_text("[[1, {")
    assert remove_stale_segments(tmp_path) == []


def test_segments_that_a_process_has_mapped_stay(tmp_path: Path, dead_job: Callable[..., Path]) -> None:
    dead_job(NAME)
    maps = tmp_path / "proc" / "17" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(f"7f0-7f1 rw-s 00000000 00:19 42                         {tmp_path / NAME}\n")
    assert remove_stale_segments(tmp_path, tmp_path / "proc") == []
    assert (tmp_path / NAME).exists()


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no /dev/shm")
def test_the_next_job_removes_segments_of_a_killed_one(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]], python: list[str]
) -> None:
    program = """
import os, time
from pathlib import Path
from hpctrain.comm.world import World
world = World.start("cpu")
Path(f"pid.{world.rank}.new").write_text(str(os.getpid()))
os.rename(f"pid.{world.rank}.new", f"pid.{world.rank}")
time.sleep(120)
"""
    with subprocess.Popen(
        [*launcher(2), *python, "-c", program], cwd=tmp_path, env=clean_environment()
    ) as job:
        pids = [tmp_path / f"pid.{rank}" for rank in range(2)]
        until = time.monotonic() + 60
        while not all(path.exists() for path in pids):
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        ranks = [int(path.read_text()) for path in pids]
        maps = "".join(Path(f"/proc/{rank}/maps").read_text() for rank in ranks)
        for process in (job.pid, *ranks):
            os.kill(process, signal.SIGKILL)
    until = time.monotonic() + 10  # a killed process takes a moment to end, longer on a busy machine
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    segments = {path for path in FOLDER.glob("vader_segment.*") if str(path) in maps}
    if not segments:
        pytest.skip("this MPI leaves nothing in /dev/shm")
    names = [str(path) for path in segments]
    program = f"""
from pathlib import Path
from hpctrain.comm import world
start_mpi = world.start_mpi
def start():
    print("left:", *(name for name in {names} if Path(name).exists()))
    start_mpi()
world.start_mpi = start
world.World.start("cpu")
"""
    done = launch(0, "-c", program, own_end=True)
    assert (done.returncode, done.stdout) == (0, "left:\n"), done.stderr
    assert not [path for path in segments if path.exists()]
    assert not [path for path in FOLDER.glob(f"{MARKER_PREFIX}*") if segments_of(path) & segments]


def segments_of(marker: Path) -> set[Path]:
    """What a marker names; nothing of one that another job has just removed."""
    try:
        return {FOLDER / name for name, _ in json.loads(marker.read_text())}
    except OSError:
        return set()
