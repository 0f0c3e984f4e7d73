"""Assertions of the program have no effect, so that `python -O`, which removes them, computes the same."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpctrain.checkpoint.verify import verify
from hpctrain.comm.world import World
from tests.launch import ROOT

PURE_FUNCTIONS = {
    *("all", "any", "isinstance", "isfinite", "len", "map", "max", "min", "prod", "set", "sum", "tuple"),
    *("can_cache", "fewest_blocks", "on_host", "rank_count"),  # of hpctrain
}
PURE_METHODS = {
    *("any", "dim", "is_contiguous", "numel", "storage_offset", "stride"),  # of tensors and arrays
    *("endswith", "join", "keys", "split", "startswith", "values"),  # of text and mappings
}
"""What the condition of an assertion may call: only what changes nothing and reads no file."""

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
    """Names of cached properties, which compute, and keep, their value when they are first read."""
    return {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).endswith("cached_property") for each in node.decorator_list)
    }


def effects(condition: ast.expr, lazy: set[str]) -> Iterator[str]:
    """Parts of the condition of an assertion that may have an effect: calls, assignments, and cached
    properties that are evaluated for nothing but their truth.
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


def with_effects(trees: dict[Path, ast.Module], lazy: set[str]) -> list[str]:
    return [
        f"{path}:{node.lineno}: {effect}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for effect in effects(node.test, lazy)
    ]


def test_assertions_of_the_program_have_no_effect() -> None:
    files = sorted((ROOT / "hpctrain").rglob("*.py"))
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}
    assert len(trees) > 500
    found = with_effects(trees, lazy_properties(trees))
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
def test_an_effect_in_an_assertion_is_found(condition: str) -> None:
    assert with_effects({Path("a.py"): ast.parse(f"assert {condition}")}, {"forms"})


@pytest.mark.parametrize("condition", ["x is not None", "isinstance(x, int) and len(x) == y.numel()"])
def test_conditions_without_effects_pass(condition: str) -> None:
    assert not with_effects({Path("a.py"): ast.parse(f"assert {condition}")}, {"forms"})


def test_a_run_without_assertions(
    tmp_path: Path, launch: Callable[..., CompletedProcess[str]], world: World
) -> None:
    """Training, a checkpoint, its resumption, export and import in an optimized process, whose files are
    sound.
    """
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "deck.toml").write_text(DECK)
    (tmp_path / "program.py").write_text(PROGRAM)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    done = launch(0, "-O", "program.py", cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in ("runs/optimized/checkpoints/step-00000003.h5", "imported.h5"):
        verify(tmp_path / path, world.everyone)
