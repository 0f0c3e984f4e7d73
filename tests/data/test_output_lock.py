"""Tests of the lock that keeps two processes from writing the same file."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.data.output_lock import lock_output, lock_path
from hpctrain.data.prepare_any import prepare_any
from hpctrain.errors import HpctrainError


def test_second_process_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    out, alone = tmp_path / "out.h5", world.single_rank_world()

    def prepare_output() -> None:
        prepare_any(alone, out, [str(tmp_path / "a.txt")], {}, lambda _: None, lambda *_: None)

    with lock_output(alone, out, pytest.fail):
        with pytest.raises(
            HpctrainError, match=rf"out\.h5: another .* is writing it \(process {os.getpid()} on "
        ):
            prepare_output()
        assert not out.exists()
    prepare_output()
    assert out.exists()
    assert not lock_path(out).exists()


def test_lock_file_of_a_dead_process_does_not_block(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    lock_path(out).write_text("process 1 on elsewhere")
    with lock_output(world.single_rank_world(), out, pytest.fail):
        assert lock_path(out).read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO])
def test_file_system_without_locks_gives_a_warning(
    code: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    warnings: list[str] = []
    with lock_output(world.single_rank_world(), tmp_path / "out.h5", warnings.append):
        assert [f"does not support locks ({os.strerror(code)})" in line for line in warnings] == [True]
