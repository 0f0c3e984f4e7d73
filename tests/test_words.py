from __future__ import annotations

import shlex
import sys

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.words import command, counted, nearest, require

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
