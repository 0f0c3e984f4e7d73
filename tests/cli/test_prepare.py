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


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_is_left_out_is_said_once(launch: Launch, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "b.txt").write_bytes(b"\0\1\2")
    (tmp_path / "c.png").write_bytes(b"\0\1\2")
    done = launch(ranks, "-c", PROGRAM, "out.h5", ".")
    assert done.returncode == 0, done.stderr
    assert "from 6 bytes in 1 file, " in done.stdout
    assert done.stderr.count("left out by name: 1 file (c.png); --glob selects others\n") == 1
    assert done.stderr.count("left out as binary: 1 file (b.txt); --binary reads them\n") == 1
    done = launch(0, "-c", PROGRAM, "out.h5", "b.txt", "--binary", "--force")
    assert done.returncode == 0, done.stderr
    assert TokenFile(tmp_path / "out.h5").read(0, 4).tolist() == [0, 1, 2, 256]


def test_rows_are_prepared_alike(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2", "response": "4"}\n')
    done = launch(2, "-c", PROGRAM, "out.h5", "--chat", "--template", "plain", "a.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out.h5: 24 tokens of 1 conversation, 3 of them learned, vocabulary 257, ")
    assert TokenFile(tmp_path / "out.h5").kind == "chat"


def test_a_mistake_is_said_once(launch: Launch, tmp_path: Path) -> None:
    done = launch(2, "-c", PROGRAM, "out.h5", "none.txt", "gone")
    assert done.returncode == 3
    assert done.stderr.count("none.txt: no such file or folder") == 1
    assert done.stderr.count("gone: no such file or folder") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (".", ".: is a folder (name a file)"),
        ("/", "/: is a folder (name a file)"),
        ("", ".: is a folder (name a file)"),
        ("a\nb.h5", "a\\nb.h5: has a control character (U+000A); leave it out"),
    ],
)
def test_an_output_that_is_no_file_is_a_sentence(
    launch: Launch, tmp_path: Path, ranks: int, name: str, problem: str
) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    done = launch(ranks, "-c", PROGRAM, name, "a.txt", "--force")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(f"hpctrain: error: {problem}\n") == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
