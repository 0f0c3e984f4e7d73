"""`hpctrain inspect` and `hpctrain replay` as a user starts them: what goes to stdout, and the exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from tests.report.test_inspect import write

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkpoints(world: World, tmp_path: Path) -> tuple[Path, Path]:
    """Two files whose tensors differ in two elements."""
    one, other = tmp_path / "one.h5", tmp_path / "other.h5"
    write(world.single_rank_world().everyone, one)
    write(world.single_rank_world().everyone, other, grown=1.0)
    return one, other


def test_exit_codes_and_output(launch: Launch, checkpoints: tuple[Path, Path]) -> None:
    one, other = checkpoints
    done = launch(0, "-m", "hpctrain", "inspect", one, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 7
    done = launch(2, "-m", "hpctrain", "inspect", one, "--verify", "--diff", other)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("2 of the 4 tensors") == 1
    assert "hpctrain: error" not in done.stderr
    done = launch(0, "-m", "hpctrain", "replay", one)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hpctrain: error: {one}: no loss beyond its step 7 is recorded in ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", [0, 2])
def test_an_unreadable_file_is_told_in_one_sentence(
    launch: Launch, checkpoints: tuple[Path, Path], ranks: int
) -> None:
    one, _ = checkpoints
    program = f"""
import errno, os, sys
opened = os.open
def refuse(name, *arguments, **keywords):
    if str(name) == {str(one)!r}:
        raise PermissionError(errno.EACCES, "Permission denied", str(name))
    return opened(name, *arguments, **keywords)
os.open = refuse
sys.argv = ["hpctrain", "inspect", {str(one)!r}]
from hpctrain.cli.main import main
main()
"""
    done = launch(ranks, "-c", program)
    assert done.returncode == 3, done.stderr
    assert f"hpctrain: error: {one}: cannot be read: Permission denied" in done.stderr.splitlines()
    assert done.stderr.count("hpctrain: error") == 1
    assert "Traceback" not in done.stderr


def test_a_reader_who_has_seen_enough_is_no_fault(launch: Launch, checkpoints: tuple[Path, Path]) -> None:
    one, _ = checkpoints
    program = f"""
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.argv = ["hpctrain", "inspect", {str(one)!r}]
from hpctrain.cli.main import main
main()
"""
    done = launch(0, "-c", program)
    assert (done.returncode, done.stderr) == (1, "")
