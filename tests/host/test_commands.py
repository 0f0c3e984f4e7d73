"""Tests of commands that start another Python interpreter in a folder whose files hide standard modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.host.commands import code_command, module_command
from hpctrain.watch import service
from tests.launch import clean_environment

PACKAGE = Path(service.__file__).parents[1]
NAMES = ("json", "runpy", "random", "statistics", "hpctrain", "numpy", "click")
ISOLATED = {"host/commands.py", "host/c_libraries.py"}
"""Files that may start Python by themselves; the second one does so with `-I`."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (code_command("import json, random; print(json.loads(sys.argv[1]))", ["[1]"]), "[1]\n"),
        (module_command(arguments=["--version"]), "hpctrain "),
    ],
)
def test_modules_of_the_current_folder_are_not_imported(
    command: list[str], output: str, folder: Path
) -> None:
    environment = clean_environment()
    del environment["PYTHONPATH"]
    plain = [sys.executable, "-c", "import json"]
    wrong = subprocess.run(plain, cwd=folder, env=environment, capture_output=True, text=True)
    assert "of the current folder" in wrong.stderr
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(output), done.stderr


def test_no_other_module_starts_python() -> None:
    """All other uses of sys.executable must go through these commands, or pass `-I`."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List | ast.Tuple) and any(
                isinstance(each, ast.Attribute) and each.attr == "executable" for each in node.elts
            ):
                names.add(str(file.relative_to(PACKAGE)))
    assert names == ISOLATED
