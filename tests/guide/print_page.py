"""Prints the commands of a page with their real output: `python -m tests.guide.print_page PAGE.md`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.guide.commands import PageFile, execute, page_fixtures, page_steps, write_file
from tests.guide.test_commands import copy_fixture


def print_page(path: Path) -> None:
    """Do what a page says in a temporary folder, and print each command with its exit code and output."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as origin, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in page_fixtures(text):
            copy_fixture(Path(origin), each, folder)
        for step in page_steps(text):
            if isinstance(step, PageFile):
                write_file(step, folder)
                continue
            done = execute(step, folder)
            code = f"  # exit code {done.returncode}" if done.returncode else ""
            print(f"$ {step.text}{code}\n{done.stdout}", flush=True)


if __name__ == "__main__":
    print_page(Path(sys.argv[1]))
