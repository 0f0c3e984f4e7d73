"""Tests that the commands in the pages of the guide and in the README run and print what the pages show."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hpctrain.guide.pages import FOLDER
from tests.guide.commands import (
    PageCommand,
    PageFile,
    block_commands,
    follow_page,
    page_steps,
    run_command,
    same_line,
    shows,
)
from tests.selection import ROOT

PAGES = sorted(
    path
    for path in (*FOLDER.glob("*/*.md"), ROOT / "README.md")
    if "```console" in path.read_text(encoding="utf-8")
)

DECK = """
[run]
title = "first"
steps = 40
[model]
family = "llama"
layers = 2
hidden = 64
heads = 4
vocabulary = 512
[data]
tokens = "corpus.h5"
[batch]
global_size = 8
sequence = 128
[learning_rate]
peak = 3e-3
warmup = 4
[checkpoint]
every = 20
"""

FIXTURES = {
    "texts": "hpctrain guide --write texts",
    "corpus": "hpctrain prepare corpus.h5 texts --glob '*.md' --train-bpe 512",
    "run": "mpirun -n 2 hpctrain run first.toml",
}
"""Commands that make what pages start from: text, a token file of it, and a short run of `first.toml`."""


def copy_fixture(origin: Path, name: str, folder: Path) -> None:
    """Put what a name of FIXTURES stands for into a folder.

    Args:
        origin: Folder in which fixtures are made, each once.
        name: The name.
        folder: Folder of the page.
    """
    (origin / "first.toml").write_text(DECK)
    for each in list(FIXTURES)[: list(FIXTURES).index(name) + 1]:
        if not (origin / f".{each}").exists():
            assert run_command(PageCommand(FIXTURES[each]), origin) == []
            (origin / f".{each}").touch()
    omitted = () if name == "run" else ("runs",)
    shutil.copytree(origin, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*omitted))


@pytest.fixture(scope="session")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Function that puts what a name of FIXTURES stands for into a folder."""
    return partial(copy_fixture, tmp_path_factory.mktemp("reader"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_does_what_it_shows(path: Path, tmp_path: Path, fixture: Callable[[str, Path], None]) -> None:
    problems = follow_page(path.read_text(encoding="utf-8"), tmp_path, fixture)
    assert not problems, "\n\n".join([f"{path}:", *problems])


def test_page_is_read_into_commands_and_files() -> None:
    text = """# Title
<!-- test: $ mkdir x -->
```toml title="a.toml"
[run]
```
<!-- test: exit 2 -->
```console
$ one \\
    --two
output

$ three
```
<!-- test: skip needs a GPU -->
```console
$ four
```
<!-- test: cluster -->
```console
$ sbatch five
```
"""
    assert list(page_steps(text)) == [
        PageCommand("mkdir x"),
        PageFile("a.toml", "[run]\n"),
        PageCommand("one \\\n    --two", ["output", ""]),
        PageCommand("three", exit_code=2),
        PageCommand("sbatch five", cluster=True),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("loss 5.20, 12 s", "loss 5.31, 900 ms", True),
        ("loss 5.20", "loss 7.2", False),
        ("step 10 of 20", "step 11 of 20", False),
        ("12 steps", "12 stops", False),
        ("4128 tokens", "4301 tokens", True),
        ("grad norm   0.573  lr 7.50e-04", "grad norm  1.2  lr 7.50e-04", True),
        ("4128 tokens", "9301 tokens", False),
        ("1.2 GB  left", "800 MB left", True),
        ("at ... tokens", "at 12,345 tokens", True),
        ("wrote x.h5", "wrote y.h5", False),
        ("0:01:02 ███▏ ---", "0:00:09 ██ -----------", True),
        ("12%", "7.5%", True),
        ("10.8K tokens/s  mfu   6%  left 4 s", " 3.1K tokens/s  mfu  2%  left 12 s", True),
        ("950 tokens/s", "3.1K tokens/s", True),
    ],
)
def test_line_is_compared(expected: str, printed: str, same: bool) -> None:
    assert same_line(expected, printed) is same


def test_lines_are_left_out() -> None:
    assert shows(["a", "...", "d"], ["a", "b", "c", "d"])
    assert not shows(["a", "...", "d"], ["a", "b", "c"])
    assert not shows(["a"], ["a", "b"])


def test_block_has_commands_only() -> None:
    with pytest.raises(AssertionError, match="before the first command"):
        list(block_commands("output\n$ one\n"))
