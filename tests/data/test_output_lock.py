"""Two processes that make one output: the second one is refused."""

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


def test_the_second_is_refused_and_the_first_goes_on(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    out, alone = tmp_path / "out.h5", world.alone()

    def make() -> None:
        prepare_any(alone, out, [str(tmp_path / "a.txt")], {}, lambda _: None, lambda *_: None)

    with lock_output(alone, out, pytest.fail):
        with pytest.raises(
            HpctrainError, match=rf"out\.h5: another .* is writing it \(process {os.getpid()} on "
        ):
            make()
        assert not out.exists()
    make()
    assert out.exists()
    assert not lock_path(out).exists()


def test_what_a_dead_process_left_does_not_block(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    lock_path(out).write_text("process 1 on elsewhere")
    with lock_output(world.alone(), out, pytest.fail):
        assert lock_path(out).read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_told(
    code: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with lock_output(world.alone(), tmp_path / "out.h5", said.append):
        assert [f"does not support locks ({os.strerror(code)})" in line for line in said] == [True]
