"""A plain dense step on one rank enters few files and functions: what is off is not on its path."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.train.run import run_deck
from hpctrain.train.step import Step, StepResult, TrainState
from tests.data.preparing import prepare
from tests.launch import ROOT

SOURCES = f"{ROOT / 'hpctrain'}/"
MOST_FILES = 45
MOST_FUNCTIONS = 205
"""Bounds, without comprehensions and lambdas. A change that needs more must take something off the path."""
OBSERVED_STEP = 3

DECK = """
[run]
steps = 4
evaluate_sequences = 4
dir = "{folder}/run"
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 4
[data]
tokens = "{folder}/tokens.h5"
[batch]
global_size = 4
micro_size = 2
sequence = 32
[machine]
peak_flops = 1e10
compile = false
"""


class EnteredFunctions:
    """Functions of hpctrain that are called while it records."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> EnteredFunctions:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.codes.add(frame.f_code)

    def names_by_file(self) -> dict[str, list[str]]:
        """Return the sorted names of the functions by file, without comprehensions and lambdas."""
        names: dict[str, list[str]] = {}
        for code in self.codes:
            if not code.co_name.startswith("<"):
                file = code.co_filename.removeprefix(SOURCES)
                names.setdefault(file, []).append(f"{code.co_name}:{code.co_firstlineno}")
        return {file: sorted(each) for file, each in sorted(names.items())}


def test_a_plain_step_enters_few_files_and_functions(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    prepare(world, tmp_path / "tokens.h5", [str(tmp_path / "text.txt")])
    (tmp_path / "deck.toml").write_text(DECK.format(folder=tmp_path))
    entered = EnteredFunctions()
    make_step = Step.__call__

    def observed(step: Step, state: TrainState, *arguments: Any) -> StepResult:
        if state.step + 1 != OBSERVED_STEP:
            return make_step(step, state, *arguments)
        with entered:
            return make_step(step, state, *arguments)

    monkeypatch.setattr(Step, "__call__", observed)
    assert run_deck(world, tmp_path / "deck.toml", []) == 0
    names = entered.names_by_file()
    functions = sum(map(len, names.values()))
    for file, each in names.items():
        print(f"{file} ({len(each)}): {', '.join(each)}")
    print(f"{len(names)} files, {functions} functions")
    assert names
    assert len(names) <= MOST_FILES
    assert functions <= MOST_FUNCTIONS
