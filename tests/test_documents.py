"""Tests of the code in the documents: decks are valid, commands exist, examples of the API run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import click
import pytest

from hpctrain.api import DeckDefaults
from hpctrain.cli.main import command as hpctrain_command
from hpctrain.deck.read import parse_deck
from hpctrain.deck.resume_rules import resume_rules
from hpctrain.deck.toml import parse_toml
from hpctrain.deck.toml_text import tables_to_toml
from tests.test_readme import DOCUMENTS, ROOT

BASE: dict[str, dict[str, Any]] = {
    "run": {"steps": 200, "evaluate_every": 100},
    "model": {"family": "llama", "layers": 12, "hidden": 512, "heads": 8},
    "data": {"tokens": "corpus.h5"},
    "batch": {"global_size": 64, "sequence": 1024},
}
"""Keys that complete the decks of which documents show only a part."""

MODULE = {"module": "my_model.py:build"}
OPTIONS_WITHOUT_KEY = ("KEY", "RUN", "DECK")


def blocks(path: Path, *languages: str, titled: bool = True) -> list[str]:
    """Return the code blocks of a document that are in one of these languages, also those with a title."""
    found = re.findall(
        r"^```(\w*)([^\n]*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [body for language, rest, body in found if language in languages and (titled or not rest.strip())]


def deck_blocks() -> Iterator[Any]:
    """Yield the decks of documents, but not those with a title: tests/guide/test_commands.py uses these."""
    for path in DOCUMENTS:
        for number, body in enumerate(blocks(path, "toml", titled=False)):
            yield pytest.param(body, id=f"{path.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("body", list(deck_blocks()))
def test_decks_are_valid(body: str) -> None:
    example = parse_toml(body)[0]
    example.pop("include", None)
    tables: dict[str, Any] = {section: dict(table) for section, table in BASE.items()}
    model = example.get("model", {})
    if "preset" in model:
        tables["model"] = {}
    if {"module", "plan", "miniature"} & model.keys():
        tables["model"] = dict(MODULE) | {"vocabulary": 512}
    if "plan" in model:
        tables["layout"] = {"tensor": 2}
    if "policy" in example and "objective" not in example:
        tables |= {"objective": {"kind": "ppo"}, "policy": {"reward": ["judge.h5"]}}
    for section, table in example.items():
        tables[section] = {**tables.get(section, {}), **table} if isinstance(table, dict) else table
    parse_deck(tables_to_toml(tables))


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `hpctrain` in the blocks of a document that show a terminal."""
    for body in blocks(path, "", "sh", "bash", "console"):
        for line in body.replace("\\\n", " ").splitlines():
            is_command = re.match(r"(?:\$ )?(?:mpirun [^|]*?|srun [^|]*?|\S*/)?hpctrain (?!error)[a-z]", line)
            if is_command is None:
                continue
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue
            start = next(index for index, word in enumerate(words) if word.endswith("hpctrain")) + 1
            end = next(
                (index for index, word in enumerate(words) if index > start and re.match(r"[|>&;]|2>", word)),
                len(words),
            )
            yield words[start:end]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_exist(path: Path) -> None:
    context = click.Context(hpctrain_command)
    for words in commands(path):
        verb, rest = words[0], words[1:]
        command: click.Command | None = hpctrain_command
        while isinstance(command, click.Group):
            command = command.get_command(context, verb)
            assert command is not None, words
            if isinstance(command, click.Group):
                verb, rest = rest[0], rest[1:]
        assert command is not None
        inner = click.Context(command, info_name=verb)
        options, _, _ = command.make_parser(inner).parse_args([word for word in rest if word != "..."])
        for argument in options.get("overrides", []):
            key = argument.partition("=")[0].strip()
            known = key in resume_rules() or any(key.startswith(f"{table}.") for table in TABLES)
            assert known or key in {"KEY", "layout", *OPTIONS_WITHOUT_KEY}, argument


TABLES = ("model.arguments", "model.plan", "data.arguments", "model.miniature", "evaluation")


def python_blocks() -> Iterator[Any]:
    for path in DOCUMENTS:
        for number, body in enumerate(blocks(path, "python")):
            yield pytest.param(body, id=f"{path.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("body", list(python_blocks()))
def test_python_compiles_and_passes_existing_arguments(body: str) -> None:
    allowed_arguments = {*DeckDefaults.__annotations__, "world", "fresh", "again"}
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "run":
            assert {str(each.arg) for each in node.keywords} <= allowed_arguments


SMALL_QUICKSTART = """
[run]
title = "quickstart"
steps = 4
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
mlp = 24
experts = 2
experts_per_token = 1
router_normalize = false
[data]
tokens = "tokens.h5"
[batch]
global_size = 2
sequence = 64
[machine]
peak_flops = 1e10
"""


def test_python_of_the_api_runs(tmp_path: Path, launch: Callable[..., CompletedProcess[str]]) -> None:
    """All blocks run in order, with a small model in place of the quickstart's."""
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/quickstart.toml").write_text(SMALL_QUICKSTART)
    (tmp_path / "text.txt").write_text("def f(x): return x\n" * 300)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    example = "\n".join(blocks(ROOT / "hpctrain/guide/reference/python-api.md", "python"))
    (tmp_path / "example.py").write_text(
        f'import hpctrain\nhpctrain.run("inputs/quickstart.toml")\n{example}'
    )
    done = launch(1, "example.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.toml").exists() and (tmp_path / "runs/seed-2/checkpoints/latest").exists()
