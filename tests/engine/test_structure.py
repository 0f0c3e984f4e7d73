"""Limits of the imports and fields of engine/, so that readers can follow how an engine is built."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields

from hpctrain.engine.built_engine import Engine
from hpctrain.engine.stages.stage import Stage, StageSetup, TrainedStage
from hpctrain.engine.update_control import UpdateControl
from tests.launch import ROOT

MOST_IMPORTS = 20
"""Largest number of other modules of hpctrain that a module of `engine/` imports."""
MOST_FIELDS = 12


def imported_modules(source: str) -> set[str]:
    """Return the modules of hpctrain that a module imports, in functions and for types, too."""

    def names() -> Iterator[str]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)

    return {name for name in names() if name.partition(".")[0] == "hpctrain"}


def test_no_module_imports_more_than_a_reader_can_follow() -> None:
    folder = ROOT / "hpctrain" / "engine"
    modules = sorted(folder.rglob("*.py"))
    counts = {
        str(path.relative_to(folder)): len(imported_modules(path.read_text(encoding="utf-8")))
        for path in modules
    }
    assert max(counts.values()) > 5, counts
    assert {name: count for name, count in counts.items() if count > MOST_IMPORTS} == {}


def test_objects_have_few_fields() -> None:
    for each in (Engine, UpdateControl, Stage, TrainedStage, StageSetup):
        assert 0 < len(fields(each)) <= MOST_FIELDS, each
