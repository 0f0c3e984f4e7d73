"""`hpctrain prepare` as a user starts it: alone and under mpirun."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.data.tokens import TokenFile

Launch = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = "from hpctrain.cli.prepare import command; command()"


@pytest.mark.parametrize("ranks", [0, 2])
def test_one_line_says_what_was_made(launch: Launch, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "a.log").write_text("hello\n")
    (tmp_path / "b.log").write_text("world\n")
    done = launch(ranks, "-c", PROGRAM, "out.h5", ".", "--glob", "*.log", "--glob", "*.none")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("out.h5: 14 tokens of 2 documents, vocabulary 257, from 12 bytes in 2 files, ")
    assert TokenFile(tmp_path / "out.h5").read(0, 14).tolist() == [*b"hello\n", 256, *b"world\n", 256]


def test_a_mistake_is_said_once(launch: Launch, tmp_path: Path) -> None:
    done = launch(2, "-c", PROGRAM, "out.h5", "none.txt", "gone")
    assert done.returncode == 3
    assert done.stderr.count("none.txt: no such file or folder") == 1
    assert done.stderr.count("gone: no such file or folder") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.h5").exists()
