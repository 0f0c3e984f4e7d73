"""The newest good checkpoint, and what is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.create import create, temporary_name
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.names import checkpoint_path, checkpoint_step, checkpoints
from hpctrain.checkpoint.retention import (
    delete_old_checkpoints,
    log_io_errors,
    newest_valid,
    point_to,
    try_point_to,
)
from hpctrain.checkpoint.save import save
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.checkpoint.conftest import entry

KILLED = """
import os, signal, sys
import torch
from hpctrain.checkpoint import draft
from hpctrain.checkpoint.background import BackgroundSave
from hpctrain.checkpoint.names import checkpoint_path
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.copy_on_write import HostBuffer
from hpctrain.checkpoint.save import save
from hpctrain.comm.world import World
from hpctrain.parallel.shards import Shard

world = World.start("cpu")
folder, mode, place, who = sys.argv[1:]
values = torch.ones(600000)
shards = [Shard.replicated(name, (600000,)) for name in "ab"]
held = [TensorRange(f"/model/{shard.name}", shard, values, 0, world.rank, world.size) for shard in shards]

def write(step):
    path, state = checkpoint_path(folder, step), {"step": step}
    if mode == "collective":
        save(path, world.everyone, held, state, 1 << 20)
        return
    pending = BackgroundSave(path, world.everyone, held, state, HostBuffer(2 << 20, torch.device("cpu")))
    pending.protect()
    pending.poll(wait=True)

write(1)
owner = draft if hasattr(draft, place) else draft.Draft
original = getattr(owner, place)

def dying(*arguments):
    result = original(*arguments)
    if who in ("all", str(world.rank)):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, place, dying)
write(2)
"""


def test_names(tmp_path: Path) -> None:
    assert checkpoint_path(tmp_path, 100) == tmp_path / "step-00000100.h5"
    assert checkpoint_step(checkpoint_path(tmp_path, 123_456_789)) == 123_456_789
    assert checkpoint_step("notes.h5") is None
    assert checkpoints(tmp_path / "none") == []
    for name in (
        "step-00000002.h5",
        "step-00000010.h5",
        ".step-00000011.h5.tmp",
        "step-3.h5",
        "step-100000000.h5",
    ):
        (tmp_path / name).touch()
    assert [checkpoint_step(path) for path in checkpoints(tmp_path)] == [100_000_000, 10, 2]


@pytest.mark.mpi
def test_damaged_ones_are_passed_over(
    world: World, mpi_tmp_path: Path, flip: Callable[[Path, int], None]
) -> None:
    group = world.everyone
    held = [entry("a", torch.arange(5000.0), copy=group.rank, copies=group.size)]
    assert newest_valid(mpi_tmp_path / "none", group) == (None, [])
    for step in (1, 2, 3, 4):
        save(checkpoint_path(mpi_tmp_path, step), group, held, {"step": step})
    if group.rank == 0:
        flip(checkpoint_path(mpi_tmp_path, 3), checkpoint_path(mpi_tmp_path, 3).stat().st_size - 9000)
        checkpoint_path(mpi_tmp_path, 4).write_bytes(b"")
    group.barrier()
    found, warnings = newest_valid(mpi_tmp_path, group)
    assert found == checkpoint_path(mpi_tmp_path, 2)
    assert len(warnings) == 2
    assert "step-00000004.h5: truncated" in warnings[0]
    assert "step-00000003.h5: /model/a is damaged" in warnings[1]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("problem", ["PermissionError", "EIO", "EIO later", "folder"])
def test_unreadable_ones_are_passed_over(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """On one rank as on several; and they keep no new checkpoint from being the newest."""
    group = world.everyone
    held = [entry("a", torch.arange(5000.0), copy=group.rank, copies=group.size)]
    for step in (1, 2, 3):
        save(checkpoint_path(mpi_tmp_path, step), group, held, {"step": step})
    newest = checkpoint_path(mpi_tmp_path, 3)
    told = break_file(newest, problem, monkeypatch, world)
    found, warnings = newest_valid(mpi_tmp_path, group)
    assert found == checkpoint_path(mpi_tmp_path, 2)
    assert warnings == [f"{newest}: {told}; skipped"]
    with pytest.raises(HpctrainError, match=rf"^{newest}: {told}$"):
        newest_valid(mpi_tmp_path, group, strict=True)
    if problem == "EIO later":  # its structure is good
        return
    delete_old_checkpoints(mpi_tmp_path, 1, group)
    group.barrier()
    assert [checkpoint_step(path) for path in checkpoints(mpi_tmp_path)] == [3, 2]


def break_file(path: Path, problem: str, monkeypatch: pytest.MonkeyPatch, world: World) -> str:
    """Make a checkpoint unreadable in some way, for root too; what is told of it. Collective."""
    world.everyone.barrier()
    if problem == "folder":
        if world.rank == 0:
            path.unlink()
            path.mkdir()
        world.everyone.barrier()
        return "a folder, not a checkpoint file"
    number = errno.EACCES if problem == "PermissionError" else errno.EIO
    error = OSError(number, os.strerror(number), str(path))
    if problem == "EIO later":
        read = os.preadv

        def fail(descriptor: int, *rest: Any) -> int:
            if Path(f"/proc/self/fd/{descriptor}").resolve() == path.resolve():
                raise OSError(number, os.strerror(number))
            return read(descriptor, *rest)

        monkeypatch.setattr(os, "preadv", fail)
        return f"cannot be read at byte {first_byte(path)}: {error.strerror}"
    opened = os.open

    def refuse(name: Any, *arguments: Any, **keywords: Any) -> int:
        if name == path:
            raise error
        return opened(name, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    return f"cannot be read: {error.strerror}"


def first_byte(path: Path) -> int:
    """Where the elements of the only tensor begin."""
    (stored,) = examine(path).datasets.values()
    return stored.offset


@pytest.mark.mpi
def test_the_newest_good_ones_are_kept(world: World, mpi_tmp_path: Path) -> None:
    group = world.everyone
    held = [entry("a", torch.arange(50.0), copy=group.rank, copies=group.size)]
    for step in range(1, 6):
        save(checkpoint_path(mpi_tmp_path, step), group, held, {"step": step})
    if group.rank == 0:
        checkpoint_path(mpi_tmp_path, 4).write_bytes(b"damaged")
        (mpi_tmp_path / "notes.h5").touch()
    group.barrier()

    def steps() -> list[int | None]:
        group.barrier()
        found = [checkpoint_step(path) for path in checkpoints(mpi_tmp_path)]
        group.barrier()
        return found

    delete_old_checkpoints(mpi_tmp_path, 9, group)
    assert steps() == [5, 4, 3, 2, 1]
    delete_old_checkpoints(mpi_tmp_path, 2, group)
    assert steps() == [5, 4, 3]
    delete_old_checkpoints(mpi_tmp_path, 1, group)
    assert steps() == [5]
    group.barrier()
    if group.rank == 0:
        checkpoint_path(mpi_tmp_path, 5).write_bytes(b"damaged")
    group.barrier()
    delete_old_checkpoints(mpi_tmp_path, 1, group)
    assert steps() == [5]


def test_a_run_that_went_back_gives_up_what_lies_beyond(world: World, tmp_path: Path) -> None:
    group = world.everyone

    def save_step(step: int) -> None:
        save(checkpoint_path(tmp_path, step), group, [entry("a", torch.arange(50.0))], {"step": step})
        point_to(checkpoint_path(tmp_path, step), group)

    def steps() -> list[int | None]:
        return [checkpoint_step(path) for path in checkpoints(tmp_path)]

    for step in (4, 8, 12, 6):
        save_step(step)
    assert steps() == [6, 4, 12, 8]
    assert newest_valid(tmp_path, group)[0] == checkpoint_path(tmp_path, 6)
    delete_old_checkpoints(tmp_path, 3, group)
    assert steps() == [6, 4, 12]
    delete_old_checkpoints(tmp_path, 1, group)
    assert steps() == [6]
    # One that is complete, to which the run had no time to point, is the newest.
    save(checkpoint_path(tmp_path, 7), group, [entry("a", torch.arange(50.0))], {"step": 7})
    assert steps() == [7, 6]


def test_what_a_run_gave_up_stays_so_when_it_comes_by(world: World, tmp_path: Path) -> None:
    """Also where there is no time to delete it, and where a copy has lost the times."""
    group = world.everyone
    for step in (4, 6, 7, 9):
        checkpoint_path(tmp_path, step).write_text("")
    for age, step in enumerate((8, 6, 4, 9, 7)):  # back to 4, which is not written again, on to 6 and to 8
        checkpoint_path(tmp_path, step).write_text("")
        os.utime(checkpoint_path(tmp_path, step), (1000 - age, 1000 - age))

    def steps() -> list[int | None]:
        return [checkpoint_step(path) for path in checkpoints(tmp_path)]

    point_to(checkpoint_path(tmp_path, 8), group)
    assert steps() == [8, 6, 4, 9, 7]
    os.utime(checkpoint_path(tmp_path, 4), (2000, 2000))
    assert steps() == [8, 7, 6, 4, 9]
    (tmp_path / "latest").unlink()
    assert steps() == [9, 8, 7, 6, 4]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mode", "place", "who"),
    [
        ("collective", "create", "0"),
        ("collective", "_add", "1"),
        ("collective", "store", "all"),
        ("collective", "sync_and_verify", "1"),
        ("collective", "complete", "0"),
        ("collective", "publish", "0"),
        ("background", "_add", "1"),
        ("background", "store", "0"),
        ("background", "sync_and_verify", "all"),
        ("background", "complete", "0"),
    ],
)
def test_killed_while_writing(
    mode: str,
    place: str,
    who: str,
    world: World,
    tmp_path: Path,
    launch: Callable[..., CompletedProcess[str]],
) -> None:
    """SIGKILL after a stage of writing: the job ends, the newest good file is whole, a new save clears up."""
    script, folder = tmp_path / "killed.py", tmp_path / "run"
    script.write_text(KILLED)
    done = launch(2, script, folder, mode, place, who, timeout=60)
    assert done.returncode not in (0, 2, 3), done.stderr
    group = world.single_rank_world().everyone
    # Only when all is done it has its name.
    newest = 2 if place == "publish" else 1
    good = [checkpoint_path(folder, step) for step in range(1, newest + 1)]
    left = [] if newest == 2 else [temporary_name(checkpoint_path(folder, 2))]
    assert sorted(folder.iterdir()) == left + good
    found, warnings = newest_valid(folder, group)
    assert found == good[-1]
    assert not warnings
    assert read_state(found)["step"] == newest
    save(checkpoint_path(folder, 3), group, [], {})
    assert sorted(folder.iterdir()) == [*good, checkpoint_path(folder, 3)]


def test_leftovers_are_those_of_the_same_kind(tmp_path: Path) -> None:
    """A run's save deletes what its earlier saves left; another file's, what had its own name."""
    for name in (".step-00000001.h5.tmp", ".other.h5.tmp", ".model.h5.tmp"):
        (tmp_path / name).write_text(name)
    create(tmp_path / ".model.h5.tmp", {}, {})
    assert {path.name for path in tmp_path.iterdir()} == {
        ".step-00000001.h5.tmp",
        ".other.h5.tmp",
        ".model.h5.tmp",
    }
    create(tmp_path / ".step-00000002.h5.tmp", {}, {})
    assert {path.name for path in tmp_path.iterdir()} == {
        ".step-00000002.h5.tmp",
        ".other.h5.tmp",
        ".model.h5.tmp",
    }


@pytest.mark.mpi(min_size=1, max_size=1)
def test_what_a_run_does_not_write_is_kept(world: World, mpi_tmp_path: Path) -> None:
    """Links and folders with the names of checkpoints; a file called as the link to the newest is."""
    group = world.everyone
    (mpi_tmp_path / "precious").write_text("years of work")
    checkpoint_path(mpi_tmp_path, 1).symlink_to("precious")
    checkpoint_path(mpi_tmp_path, 2).mkdir()
    (mpi_tmp_path / "latest").write_text("mine")
    for step in (3, 4):
        save(checkpoint_path(mpi_tmp_path, step), group, [entry("a", torch.arange(5.0))], {"step": step})
    assert delete_old_checkpoints(mpi_tmp_path, 1, group) == [checkpoint_path(mpi_tmp_path, 3)]
    point_to(checkpoint_path(mpi_tmp_path, 4), group)
    assert (mpi_tmp_path / "latest").read_text() == "mine"
    (mpi_tmp_path / "latest").unlink()
    point_to(checkpoint_path(mpi_tmp_path, 4), group)
    assert (mpi_tmp_path / "latest").resolve() == checkpoint_path(mpi_tmp_path, 4)


def test_what_a_run_can_do_without_is_a_warning(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = world.single_rank_world().everyone
    for step in (1, 2, 3):
        save(checkpoint_path(tmp_path, step), group, [entry("a", torch.ones(3))], {"step": step})

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    with log_io_errors():
        delete_old_checkpoints(tmp_path, 1, group)
    try_point_to(checkpoint_path(tmp_path, 3), group)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/step-00000002.h5: cannot be deleted: Input/output error; the run continues",
        f"{tmp_path}/step-00000001.h5: cannot be deleted: Input/output error; the run continues",
        f"{tmp_path}/latest: cannot link to step-00000003.h5: Input/output error; the run continues",
    ]
