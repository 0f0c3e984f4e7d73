"""Runs the commands of a Markdown page as a reader would, and compares their output with the page.

A block of the language `console` has commands, which begin with "$ " (a line that ends with a backslash goes
on), and below each what it prints. A block of another language with a title, as in ```toml title="first.toml"
is a file that the reader writes. Both happen in the order of the page, in one folder per page.

What is printed must equal what is shown, except:

- "..." in a line stands for any text, and a line with only "..." for any number of lines.
- Numbers that a measurement gives (time, memory, rates, percentages: by their unit) may differ, and gradient
  norms, which vary with any change of the text that a page trains on, the guide. Other numbers
  that are not small and whole may differ by `TOLERANCE`, since losses depend on the text of the guide.
- The number of blanks does not matter, nor what bars and lines of tables are drawn by.

Comments above a block tell the test how to run it:

    <!-- test: texts, corpus, run -->   at the beginning of a page: what is already in the folder (`FIXTURES`)
    <!-- test: exit 2 -->               exit code of the last command of the next block
    <!-- test: cluster -->              the next block runs on the virtual cluster only (`make cluster-test`)
    <!-- test: skip needs a GPU -->     the next block is not run; the reason is required
    <!-- test: $ touch runs/first/stop -->   a command that the reader does not see
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.launch import clean_environment, launcher

TOLERANCE = 0.25
"""Relative difference that numbers with a decimal point may have: pages train on the text of the guide."""
SMALLEST_VARYING = 100
"""Smallest whole number that may differ by `TOLERANCE`. Smaller ones count steps or ranks, not tokens."""
SECONDS = 240
"""Time limit of one command."""

_BLOCK = re.compile(
    r"^<!-- test: (?P<note>.*?) -->$|^```(?P<head>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_UNIT = r"(?:[kMGTP]?i?B(?:/s)?|[num]?s|min|h|[kKMG]?\s?tokens/s|[kMGT]?FLOP/s|%|x)\b|%"
_MEASURED = re.compile(
    rf"(?P<number>{_NUMBER})(?P<unit>\s?(?:{_UNIT}))|(?P<norm>(?<=grad norm ){_NUMBER})"
    rf"|(?P<clock>\d+:\d\d(?::\d\d)?)|(?P<plain>{_NUMBER})"
)
_DRAWN = re.compile(r"[\u2500-\u259f\u2800-\u28ff=_-]{3,}|[\u2500-\u259f\u2800-\u28ff]+")


@dataclass
class PageCommand:
    """A command of a page, what the page shows below it, its exit code, and whether it needs a cluster."""

    text: str
    shown: list[str] = field(default_factory=list)
    exit_code: int = 0
    cluster: bool = False


@dataclass
class PageFile:
    """A file that the reader is told to write."""

    name: str
    text: str


def page_fixtures(text: str) -> list[str]:
    """Return the names of `FIXTURES` that the first comment of a page names."""
    first = re.search(r"^<!-- test: ((?:texts|corpus|run|, )+) -->$", text, re.MULTILINE)
    return first[1].split(", ") if first else []


def page_steps(text: str) -> Iterator[PageCommand | PageFile]:
    """Yield the commands and files of a page in their order, without those that are skipped."""
    notes: list[str] = []
    for block in _BLOCK.finditer(text):
        if block["note"] is not None:
            notes.append(block["note"])
            if block["note"].startswith("$ "):
                yield PageCommand(block["note"][2:])
            continue
        language, _, rest = block["head"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        if any(note.startswith("skip ") for note in notes):
            pass
        elif language == "console":
            commands = list(block_commands(block["body"]))
            codes = [int(note.split()[1]) for note in notes if note.startswith("exit ")]
            if codes and commands:
                commands[-1].exit_code = codes[0]
            yield from (replace(command, cluster="cluster" in notes) for command in commands)
        elif title:
            yield PageFile(title[1], block["body"])
        notes = []


def block_commands(body: str) -> Iterator[PageCommand]:
    """Yield the commands of a console block."""
    command: PageCommand | None = None
    goes_on = False
    for line in body.splitlines():
        if goes_on and command is not None:
            command.text += "\n" + line
            goes_on = line.endswith("\\")
        elif line.startswith("$ "):
            if command is not None:
                yield command
            command = PageCommand(line[2:])
            goes_on = line.endswith("\\")
        else:
            assert command is not None, f"output before the first command: {line}"
            command.shown.append(line)
    if command is not None:
        yield command


def reader_environment(folder: Path) -> dict[str, str]:
    """Return the environment of `make shell`: hpctrain and an mpirun that starts more ranks than cores."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    start = " ".join(launcher(1)[:-2])
    (programs / "mpirun").write_text(f'#!/bin/sh\nPATH="${{PATH#*:}}"\nexec {start} "$@"\n')
    (programs / "mpirun").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment() | {"PATH": path, "COLUMNS": "100", "HOME": str(folder)}


def follow_page(text: str, folder: Path, fixture: Callable[[str, Path], None]) -> list[str]:
    """Do in a folder what a page says, and return the differences from what it shows.

    Args:
        text: The Markdown text.
        folder: An empty folder.
        fixture: Function that puts what a name of `FIXTURES` stands for into a folder.
    """
    for name in page_fixtures(text):
        fixture(name, folder)
    problems = []
    for step in page_steps(text):
        if isinstance(step, PageFile):
            write_file(step, folder)
        elif not step.cluster:
            problems += run_command(step, folder)
    return problems


def write_file(file: PageFile, folder: Path) -> None:
    """Write a file into a folder."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text)


def execute(command: PageCommand, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with stderr in stdout."""
    return subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=reader_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


def run_command(command: PageCommand, folder: Path) -> list[str]:
    """Run a command in a folder, and return how its exit code and output differ from what is expected."""
    done = execute(command, folder)
    return differences(command, done.returncode, done.stdout)


def differences(command: PageCommand, exit_code: int, output: str) -> list[str]:
    """Return a text about how exit code and output of a command differ from the page; [] if they do not."""
    problems = []
    if exit_code != command.exit_code:
        problems.append(f"exit code {exit_code} instead of {command.exit_code}")
    if command.shown and not shows(command.shown, output.splitlines()):
        problems.append("the output differs from the page")
    if not problems:
        return []
    told = "\n".join(f"    {line}" for line in output.splitlines())
    return [f"$ {command.text}\n  {'; '.join(problems)}. It printed:\n{told}"]


def shows(expected: list[str], printed: list[str]) -> bool:
    """Return True if printed lines are what a page shows, by the rules of this module."""
    lines = [line for line in expected if line.strip()]
    rest = [line for line in printed if line.strip()]
    if not lines:
        return not rest
    if lines[0].strip() == "...":
        return any(shows(lines[1:], rest[start:]) for start in range(len(rest) + 1)) if lines[1:] else True
    return bool(rest) and same_line(lines[0], rest[0]) and shows(lines[1:], rest[1:])


def same_line(expected: str, printed: str) -> bool:
    """Return True if a printed line is the one that a page shows, by the rules of this module."""
    pieces = [_words(piece) for piece in expected.split("...")]
    numbers: list[str] = []
    pattern = ""
    for index, piece in enumerate(pieces):
        pattern += ".*?" if index else ""
        position = 0
        for number in _MEASURED.finditer(piece):
            pattern += re.escape(piece[position : number.start()])
            if number["plain"]:
                pattern += f"({_NUMBER})"
                numbers.append(number["plain"])
            elif number["clock"]:
                pattern += r"\d+:\d\d(?::\d\d)?"
            elif number["norm"]:
                pattern += _NUMBER
            else:
                pattern += rf"{_NUMBER}\s?(?:{_UNIT})"
            position = number.end()
        pattern += re.escape(piece[position:])
    match = re.fullmatch(pattern, _words(printed))
    return match is not None and all(map(_close, numbers, match.groups()))


def _words(line: str) -> str:
    """Return a line with single blanks and one mark for each drawing."""
    return " ".join(_DRAWN.sub("─", line).split())


def _close(expected: str, printed: str) -> bool:
    """Return True if a number may stand for another one."""
    if expected == printed:
        return True
    if expected.isdecimal() and int(expected) < SMALLEST_VARYING:
        return False
    one, other = float(expected.replace(",", "")), float(printed.replace(",", ""))
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
