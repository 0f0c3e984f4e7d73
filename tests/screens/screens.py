"""Files of expected screens: what commands of hpctrain print at 60 and at 100 columns.

A file has the screens of one verb:

    # What is already in the folder of the commands: corpus, run

    $ hpctrain status runs/small
    == 60 columns
        ...
    == 100 columns, exit code 1
        ...

A command is followed by what it prints on stdout and stderr, indented by four blanks. Where both widths give
the same, the block is headed `== 60 and 100 columns`. The commands of a file run in their order, in a folder
with the files of `inputs/` and with what its first line names (`PREPARED`).

Commands run in this process, on one rank. Numbers that a measurement gives may differ from the file, as in
pages of the guide (`tests/guide/commands.py`); a block without such numbers must be the same to the letter.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from unittest import mock

from hpctrain.cli.main import VERBS, main
from hpctrain.comm.error_messages import print_problems, to_hpctrain_error
from hpctrain.comm.verb import single_world
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.guide.commands import same_line

FOLDER = Path(__file__).parent
WIDTHS = (60, 100)
UPDATE = "HPCTRAIN_UPDATE_SCREENS"
"""Environment variable that makes the test rewrite the files; `python -m tests.screens.update` sets it."""
PREPARED = {
    "corpus": "hpctrain prepare tokens.h5 text.txt",
    "run": "hpctrain run deck.toml",
}
"""Commands whose files are already in the folder where the first line of a file names them."""

_PREPARED_LINE = "# What is already in the folder of the commands: "
_INDENT = "    "
_DIGIT = re.compile(r"\d")
_RATES = re.compile(
    r"tokens/s, median (first )?\S+ (second )?\S+|\d[\d.,]*\s?[kKMGT]?\s?(?=tokens/s|FLOP/s)|\d[\d.]*[KMGT]\b"
)
_DIFFERENCES = re.compile(r"(?:[+-]\d[\d.]*%|equal)$", re.MULTILINE)
"""Differences of values, which stand beside the values themselves: those of measured ones vary."""
_SUBSTITUTES = (
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "2026-01-01 00:00:00"),
    (re.compile(r"(?<=\d\.\d\.\d) \([0-9a-f]{8}\)"), " (c0ffee00)"),
    (re.compile(r"\bprocess \d+ on\b"), "process 1234 on"),
    (re.compile(r"(?<=hash )[0-9a-f]{16}"), "0123456789abcdef"),
)


@dataclass
class Screen:
    """A command, and what it prints at each width: lines below a head such as "exit code 2"."""

    command: str
    blocks: dict[int, str] = field(default_factory=dict)


def read_screens(text: str) -> tuple[list[str], list[Screen]]:
    """Return the names of `PREPARED` that a file needs, and its screens."""
    prepared: list[str] = []
    screens: list[Screen] = []
    widths: list[int] = []
    for line in text.splitlines():
        if line.startswith(_PREPARED_LINE):
            prepared = line.removeprefix(_PREPARED_LINE).split(", ")
        elif line.startswith("$ "):
            screens.append(Screen(line[2:]))
            widths = []
        elif line.startswith("== "):
            head, _, rest = line[3:].partition(" columns")
            widths = [int(number) for number in head.split(" and ")]
            screens[-1].blocks |= dict.fromkeys(widths, rest.removeprefix(", ") + "\n")
        elif screens:
            for width in widths:
                screens[-1].blocks[width] += line.removeprefix(_INDENT) + "\n"
    for screen in screens:
        screen.blocks = {width: block.rstrip() + "\n" for width, block in screen.blocks.items()}
    return prepared, screens


def screens_text(prepared: list[str], screens: list[Screen]) -> str:
    """Return the text of a file, which `read_screens` reads."""
    parts = [_PREPARED_LINE + ", ".join(prepared)] if prepared else []
    for screen in screens:
        lines = [f"$ {screen.command}"]
        groups: dict[str, list[int]] = {}
        for width, block in screen.blocks.items():
            groups.setdefault(block, []).append(width)
        for block, widths in groups.items():
            code, _, output = block.partition("\n")
            lines.append(f"== {' and '.join(map(str, widths))} columns{', ' * bool(code)}{code}")
            lines += [(_INDENT + line).rstrip() for line in output.splitlines()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def same_block(expected: str, printed: str) -> bool:
    """Return True if a block is what a file expects, by the rules of this module."""
    if expected == printed:
        return True
    if _DIGIT.search(expected) is None:
        return False
    one, other = (_DIFFERENCES.sub("equal", block) for block in (expected, printed))
    return same_line(*(_RATES.sub("", " ".join(block.split())) for block in (one, other)))


def run_screens(text: str, folders: Callable[[list[str]], Path]) -> list[Screen]:
    """Run the commands of a file at each width.

    Args:
        text: The text of the file.
        folders: Function that makes a folder with what the names of `PREPARED` stand for.

    Returns:
        The screens with what was printed. A block that differs from the file only in measured numbers is
        that of the file.
    """
    prepared, expected = read_screens(text)
    printed = [Screen(screen.command) for screen in expected]
    for width in WIDTHS:
        folder = folders(prepared)
        for old, new in zip(expected, printed, strict=True):
            block = run_command(old.command, folder, width)
            before = old.blocks.get(width, "")
            new.blocks[width] = before if same_block(before, block) else block
    return printed


def run_command(command: str, folder: Path, width: int) -> str:
    """Run a command of hpctrain in a folder, in this process, and return its exit code and output."""
    name, *words = shlex.split(command)
    assert name == "hpctrain", command
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code: object = 0
    before = Path.cwd()
    _forget_help_options()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, {"COLUMNS": str(width)}),
            mock.patch.object(sys, "argv", ["hpctrain", *words]),
            mock.patch("hpctrain.comm.verb.run_verb", _run_verb),
            mock.patch("hpctrain.cli.main.leave", _leave),
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            main()
    except SystemExit as leaving:
        code = leaving.code
    finally:
        os.chdir(before)
    assert isinstance(output.buffer, io.BytesIO)
    text = output.buffer.getvalue().decode().replace(str(folder), "/FOLDER")
    text = text.replace(sys.prefix, "/PYTHON")
    text = text.replace(socket.gethostname(), "HOST")
    for pattern, substitute in _SUBSTITUTES:
        text = pattern.sub(substitute, text)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join([f"exit code {code}" if code else "", *lines]).rstrip() + "\n"


def _forget_help_options() -> None:
    """Make click build --help again: a test that called a verb without its group left it without -h."""
    for command in map(import_module, (f"hpctrain.cli.{module}" for module, _ in VERBS.values())):
        for each in (command.command, *getattr(command.command, "commands", {}).values()):
            each._help_option = None


def _run_verb(verb: Callable[[World], int | None], device: str = "auto") -> NoReturn:
    """Do what `hpctrain.comm.verb.run_verb` does, on one rank, without ending MPI."""
    try:
        code = verb(single_world("cpu")) or 0
    except (HpctrainError, OSError) as error:
        _leave(to_hpctrain_error(error))
    sys.exit(code)


def _leave(error: HpctrainError) -> NoReturn:
    print_problems(error.problems)
    sys.exit(error.exit_code)


def prepare_folder(folder: Path, names: list[str]) -> None:
    """Put the files of `inputs/`, and those of the commands in `PREPARED` that are named, into a folder."""
    shutil.copytree(FOLDER / "inputs", folder, dirs_exist_ok=True)
    for name in names:
        block = run_command(PREPARED[name], folder, WIDTHS[-1])
        assert not block.startswith("exit code"), block


def screen_files() -> list[Path]:
    """Return the files of screens in their order."""
    return sorted(FOLDER.glob("*.txt"))
