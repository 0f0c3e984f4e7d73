"""Test that assertions in hpctrain have no side effects, since `python -O` removes them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from tests.launch import ROOT

PURE_FUNCTIONS = {
    *("all", "any", "isinstance", "issubclass", "isfinite", "len", "map", "max", "min", "prod", "set", "sum"),
    "tuple",
    *("can_cache", "has_gpt_layers", "minimum_blocks", "on_host", "rank_count"),  # of hpctrain
}
PURE_METHODS = {
    *("any", "dim", "is_contiguous", "numel", "storage_offset", "stride"),  # of tensors and arrays
    *("endswith", "join", "keys", "split", "startswith", "values"),  # of text and mappings
}
"""Methods that an assertion may call. Like PURE_FUNCTIONS, they change nothing and read no file."""

DECK = """\
[run]
title = "optimized"
steps = 2
log_every = 1
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
[data]
tokens = "tokens.h5"
[batch]
global_size = 4
sequence = 16
[checkpoint]
every = 1
"""
PROGRAM = """\
from pathlib import Path

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.comm.world import World
from hpctrain.train.run import resume, run_deck

assert False, "assertions are on"
world = World.start("cpu")
require = lambda found, right: found == right or exit(f"{found} is not {right}")
require(run_deck(world, Path("deck.toml"), []), 0)
require(resume(world, Path("runs/optimized"), ["run.steps=3"]), 0)
export_model(world, Path("runs/optimized/checkpoints/step-00000003.h5"), Path("exported"), None, 1 << 30)
import_model(world, Path("exported"), Path("imported.h5"))
"""


def lazy_properties(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of cached properties, which compute their value when they are first read."""
    return {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).endswith("cached_property") for each in node.decorator_list)
    }


def side_effects(condition: ast.expr, lazy: set[str]) -> Iterator[str]:
    """Yield the parts of an assertion's condition that may have side effects.

    These are calls, assignments, and cached properties of which only the truth value is used.
    """
    for node in ast.walk(condition):
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = node.func
            pure = isinstance(called, ast.Name) and called.id in PURE_FUNCTIONS
            if not pure and not (isinstance(called, ast.Attribute) and called.attr in PURE_METHODS):
                yield ast.unparse(node)
    for operand in [condition, *(each for node in ast.walk(condition) for each in operands(node))]:
        if isinstance(operand, ast.Attribute) and operand.attr in lazy:
            yield ast.unparse(operand)


def operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def assertions_with_side_effects(trees: dict[Path, ast.Module], lazy: set[str]) -> list[str]:
    return [
        f"{path}:{node.lineno}: {effect}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for effect in side_effects(node.test, lazy)
    ]


def test_assertions_have_no_side_effects() -> None:
    files = sorted((ROOT / "hpctrain").rglob("*.py"))
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}
    assert len(trees) > 500
    found = assertions_with_side_effects(trees, lazy_properties(trees))
    assert not found, "calls in assertions, which `python -O` leaves out:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "condition",
    [
        "tensors.setdefault(name, kind) == kind",
        "(count := len(names)) > 1",
        "file.read(8) == magic",
        "all(check(each) for each in names)",
        "source.forms",
        "handlers[0]()",
    ],
)
def test_side_effect_is_detected(condition: str) -> None:
    assert assertions_with_side_effects({Path("a.py"): ast.parse(f"assert {condition}")}, {"forms"})


@pytest.mark.parametrize("condition", ["x is not None", "isinstance(x, int) and len(x) == y.numel()"])
def test_pure_conditions_pass(condition: str) -> None:
    assert not assertions_with_side_effects({Path("a.py"): ast.parse(f"assert {condition}")}, {"forms"})


def test_run_without_assertions(
    tmp_path: Path, launch: Callable[..., CompletedProcess[str]], world: World
) -> None:
    """Train, resume, export and import with `python -O`, and verify the files."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "deck.toml").write_text(DECK)
    (tmp_path / "program.py").write_text(PROGRAM)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    done = launch(0, "-O", "program.py", cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in ("runs/optimized/checkpoints/step-00000003.h5", "imported.h5"):
        verify(tmp_path / path, world.everyone)
