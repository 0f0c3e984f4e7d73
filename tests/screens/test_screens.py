"""Tests that every verb prints the screens in its file; `tests/screens/screens.py` describes the files."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli.main import VERBS
from tests.screens.screens import (
    UPDATE,
    Screen,
    prepare_folder,
    read_screens,
    run_screens,
    same_block,
    screen_files,
    screens_text,
)

Folders = Callable[[list[str]], Path]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """Function that returns a folder with what names of PREPARED stand for. Each folder is made once."""
    folders: dict[tuple[str, ...], Path] = {}

    def make(names: list[str]) -> Path:
        key = tuple(names)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("prepared")
            prepare_folder(folders[key], names)
        return folders[key]

    return make


@pytest.fixture
def folders(prepared: Folders, tmp_path: Path) -> Folders:
    """Function that returns a new copy of a prepared folder, always under the same path."""

    def copy(names: list[str]) -> Path:
        folder = tmp_path / "screens"
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(prepared(names), folder))

    return copy


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("path", screen_files(), ids=lambda path: path.stem)
def test_screens_are_as_in_the_file(path: Path, folders: Folders) -> None:
    text = path.read_text(encoding="utf-8")
    printed = screens_text(read_screens(text)[0], run_screens(text, folders))
    if os.environ.get(UPDATE):
        path.write_text(printed, encoding="utf-8")
        return
    difference = difflib.unified_diff(
        text.splitlines(),
        printed.splitlines(),
        f"{path.name} (expected)",
        f"{path.name} (printed)",
        "",
        "",
        2,
    )
    lines = "\n".join(difference)
    assert text == printed, f"{lines}\n\nIf this is intended: python -m tests.screens.update {path.stem}"


def test_every_verb_has_its_screens() -> None:
    assert {path.stem for path in screen_files()} == {*VERBS, "hpctrain"}
    for path in screen_files():
        first = read_screens(path.read_text(encoding="utf-8"))[1][0]
        verb = "" if path.stem == "hpctrain" else f" {path.stem}"
        assert first.command == f"hpctrain{verb} --help"


def test_a_file_is_read_as_it_is_written() -> None:
    screens = [
        Screen("hpctrain a", {60: "\none\n\n  two\n", 100: "\none\n\n  two\n"}),
        Screen("hpctrain b", {60: "exit code 2\n$ x\n", 100: "\n== y\n"}),
    ]
    text = screens_text(["corpus", "run"], screens)
    assert "== 60 and 100 columns\n    one\n\n      two\n" in text
    assert "== 60 columns, exit code 2\n    $ x\n" in text
    assert read_screens(text) == (["corpus", "run"], screens)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("\nwaits 12 ms", "\nwaits\n900 ms", True),
        ("\nwaits 12 ms", "\nwaited 12 ms", False),
        ("\nwaits long", "\nwaits  long", False),
        ("exit code 1\n12 ms", "exit code 2\n12 ms", False),
    ],
)
def test_measured_numbers_may_differ(expected: str, printed: str, same: bool) -> None:
    assert same_block(expected, printed) is same
