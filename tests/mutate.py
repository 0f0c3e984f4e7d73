"""Mutation check of the suite: does it notice a wrong sign, a dropped sum or a swapped dim in the core?

`python -m tests.mutate --count 60 --seed 1` draws places of the packages that compute, changes one at a
time in a copy of the project, and runs the tests of that package and of the layouts: first as `make
test` selects them, then, where these pass, all of them on all numbers of ranks. It prints a line for
each mutation, and how many were found by the selection and by all tests. `--list` only prints the
mutations. `--first 20` goes on with the 20th of them after an interruption.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launch import clean_environment, launcher
from tests.selection import ALL_CASES, RANKS, ROOT, SEED, seed

PACKAGES = ("parallel", "model", "sharding", "pipeline", "optim", "objective", "memory", "checkpoint")
LAYOUTS = tuple(
    f"tests/train/test_{name}.py" for name in ("layouts", "mixture_layouts", "documents", "ledger")
)
"""Tests of whole steps on layouts and of what these send, which run for mutations of any package."""
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "add_", "mul_", "copy_"}
SECONDS = 600
"""Time limit of one run of tests; a mutation that makes it hang counts as found."""


@dataclass(frozen=True)
class Mutation:
    """One replacement of text in a source file."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def apply(self, source: str) -> str:
        """Return `source` with the replacement."""
        lines = source.splitlines(keepends=True)
        first, last = lines[self.line - 1], lines[self.end_line - 1]
        before = first.encode()[: self.column].decode()
        after = last.encode()[self.end_column :].decode()
        lines[self.line - 1 : self.end_line] = [before + self.text + after]
        return "".join(lines)

    def describe(self, source: str) -> str:
        """Return the place, and the line before and after."""
        old = source.splitlines()[self.line - 1].strip()
        new = self.apply(source).splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {old}  ->  {new}"


def mutations(path: Path) -> Iterator[Mutation]:
    """Yield the possible mutations of one file."""
    source = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))

    def replacing(node: ast.expr | ast.stmt, text: str) -> Mutation:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Mutation(name, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            left, right = (ast.get_source_segment(source, side) for side in (node.left, node.right))
            if (
                not isinstance(node.left, (ast.Constant, ast.List, ast.Tuple, ast.JoinedStr))
                and "\n" not in f"{left}{right}"
            ):
                yield replacing(node, f"{left} {'-' if isinstance(node.op, ast.Add) else '+'} {right}")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Mult)):
            yield replacing(node, "pass")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr in COLLECTIVES:
                yield replacing(node, "pass")
        elif (
            isinstance(node, ast.keyword)
            and node.arg in {"dim", "axis"}
            and isinstance(node.value, ast.Constant)
        ) and isinstance(node.value.value, int):
            yield replacing(node.value, "1" if node.value.value == 0 else "0")


def draw(count: int, number: int) -> list[Mutation]:
    """Return `count` mutations drawn by the seed `number`, as evenly over the packages as they have files."""
    generator = random.Random(number)
    files = [path for name in PACKAGES for path in sorted((ROOT / "hpctrain" / name).rglob("*.py"))]
    choices = {path: found for path in files if (found := list(mutations(path)))}
    chosen = generator.sample(sorted(choices), count)
    return [generator.choice(choices[path]) for path in chosen]


def commands(mutation: Mutation, everything: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the test commands for a mutation, the quickest ones first, and the environment of each."""
    package, stem = Path(mutation.path).parts[1:-1], Path(mutation.path).stem
    folder = Path("tests", *package)
    own = folder / f"test_{stem}.py"
    places = [str(own)] if (ROOT / own).exists() else []
    wider = [str(folder), *LAYOUTS]
    environment = {ALL_CASES: "yes"} if everything else {SEED: seed()}
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.mpi_plugin"]
    sizes = (0, 2, 1, 4)
    for targets in (places, wider) if places and not everything else (wider,):
        for size in sizes:
            if not size:
                yield [*pytest, "-m", "not mpi", *targets], environment
                continue
            start = launcher(size) if size > 1 else []
            yield [*start, *pytest, "--with-mpi", "-m", "mpi", *targets], environment | {RANKS: "1 2 4 8"}


def finds(folder: Path, mutation: Mutation, everything: bool) -> str:
    """Return the command that noticed the mutation in the copy `folder`, or "" if all tests passed."""
    for command, environment in commands(mutation, everything):
        variables = clean_environment() | environment | {"PYTHONPATH": str(folder)}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = -9
        if code not in {0, 5}:  # 5: no test of this file on so many ranks
            return " ".join(command[-4:])
    return ""


def main(words: Sequence[str]) -> int:
    """Draw mutations, run the tests of each, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="number of mutations")
    parser.add_argument("--seed", type=int, default=1, help="seed by which they are drawn")
    parser.add_argument("--first", type=int, default=1, help="number of the first mutation to try")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args(words)
    found = {"selection": 0, "all": 0}
    chosen = draw(options.count, options.seed)[options.first - 1 :]
    with tempfile.TemporaryDirectory(prefix="hpctrain-mutate-") as name:
        folder = Path(name)
        for part in (
            "hpctrain",
            "tests",
            "inputs",
            "jobs",
            "containers",
            "pyproject.toml",
            "README.md",
            "Makefile",
        ):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        for number, mutation in enumerate(chosen, options.first):
            source = (ROOT / mutation.path).read_text(encoding="utf-8")
            print(f"{number}. {mutation.describe(source)}", flush=True)
            if options.list:
                continue
            (folder / mutation.path).write_text(mutation.apply(source), encoding="utf-8")
            by = finds(folder, mutation, everything=False)
            found["selection"] += bool(by)
            by_all = by or finds(folder, mutation, everything=True)
            found["all"] += bool(by_all)
            print(
                f"   {'found' if by else 'found by all tests only' if by_all else 'MISSED'} {by_all}",
                flush=True,
            )
            (folder / mutation.path).write_text(source, encoding="utf-8")
    print(f"{found['selection']} of {len(chosen)} found by the selection, {found['all']} by all tests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
