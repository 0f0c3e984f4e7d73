"""Wording of messages: commands, corrections of names, lists, tables and control characters.

Tests of text.py and errors.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.deck.sources import toml_value
from hpctrain.deck.toml import tomllib
from hpctrain.errors import HpctrainError, require
from hpctrain.text import command, control_problem, counted, escaped, fitted, nearest, table
from hpctrain.watch.statuses import statuses_text

VERBS = ["run", "resume", "deck", "plan", "plot", "status", "inspect", "export", "import", "schedule"]


@pytest.mark.parametrize("folder", ["runs/a", "my run", "a'b", "$(rm x)", "`x`", "-x"])
def test_commands_are_quoted_for_the_shell(folder: str) -> None:
    shown = command("resume", folder)
    assert shown.startswith("`hpctrain resume ")
    assert shlex.split(shown[1:-1]) == ["hpctrain", "resume", folder]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resum", "resume"),
        ("statsu", "status"),
        ("inport", "import"),
        ("sched", "schedule"),
        ("plans", "plan"),
        ("rnu", "run"),
        ("rum", "run"),
        ("test", None),
        ("train", None),
        ("frobnicate", None),
        ("r", None),
        ("", None),
    ],
)
def test_only_near_names_are_meant(name: str, meant: str | None) -> None:
    assert nearest(name, VERBS) == meant


def test_nouns_have_their_plurals() -> None:
    told = [counted(2, noun) for noun in ("rank", "batch", "process")]
    assert told == ["2 ranks", "2 batches", "2 processes"] and counted(1, "process") == "1 process"


def test_a_missing_package_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    require("json", "reading")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HpctrainError) as caught:
        require("matplotlib", "drawing pictures")
    assert caught.value.problems == (
        "drawing pictures needs the package matplotlib, which is not installed: pip install matplotlib",
    )


ROWS = [("run", "state", "step"), ("runs/a", "running", "5/20"), ("runs/b", "", "20/20")]


def test_a_table_that_fits_is_one() -> None:
    assert fitted(ROWS, (0, 1), 22) == table(ROWS, (0, 1)) == fitted(ROWS, (0, 1), None)
    assert max(map(len, table(ROWS, (0, 1)))) == 22


def test_rows_that_do_not_fit_are_lists() -> None:
    assert fitted(ROWS, (0, 1), 21) == [
        "runs/a",
        "  state  running",
        "  step   5/20",
        "runs/b",
        "  step   20/20",
    ]


CONTROL = "\x00\t\n\r\x1b\x7f\x85\x9b\u200f\u2028\u2029\u202e\u2066\udcff\ufffe\U0001ffff"
HARMLESS = "a\u00a0é漢字🚀\u200d'\"$`\\#%"


def test_they_are_told_by_their_numbers() -> None:
    assert all(control_problem(character) for character in CONTROL)
    assert not control_problem(HARMLESS)
    assert control_problem("a\nb\n") == "has a control character (U+000A); leave it out"
    assert (
        control_problem("\x1b\n\r\t") == "has control characters (U+001B, U+000A, U+000D, ...); leave it out"
    )


def test_they_are_shown_as_escapes() -> None:
    assert escaped("a\tb\n\x1b[2J\u2028\U0001ffff") == r"a\tb\n\u001B[2J\u2028\U0001FFFF"
    assert escaped("a\tb\n", allowed="\n") == "a\\tb\n"
    assert escaped(HARMLESS) == HARMLESS
    assert not control_problem(escaped(CONTROL))
    assert HpctrainError(["a\nb", "\x9b"]).problems == (r"a\nb", r"\u009B")


def test_toml_has_them_as_escapes_too() -> None:
    text = CONTROL.replace("\udcff", "") + HARMLESS
    line = toml_value(text)
    assert not control_problem(line)
    assert tomllib.loads(f"a = {line}") == {"a": text}


def test_a_status_that_somebody_wrote_steers_no_terminal() -> None:
    row = {"folder": "x\x1b[2J", "state": "done", "reason": "a\nb", "job": "j\u2028"}
    text = statuses_text([row])
    assert len(text.splitlines()) == 4
    assert not control_problem(text.replace("\n", ""))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ru\x1bn"], r"unknown verb \"ru\u001Bn\""),
        (["run", "--\x1bx", "d.toml"], r"--\x1bx"),
        (["run", "d.toml", "--set", "run.\x85title=\x1b"], r"run.\u0085title"),
        (["deck", "d.toml", "--set", "run.title=a\nb"], r"has a control character (U+000A)"),
    ],
)
def test_messages_show_what_was_typed(
    arguments: list[str], told: str, tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "d.toml").write_text("")
    done = launch(0, "-m", "hpctrain", *arguments)
    assert done.returncode == 2
    assert told.replace('\\"', '"') in done.stderr
    assert not control_problem(done.stderr.replace("\n", ""))
