"""Selection of the tests that one run of the suite executes.

`make test` decides within minutes, so it leaves out what proves nothing new:

- **Numbers of ranks.** A test whose `mpi` mark admits several numbers runs on the lowest of them that
  proves it: on two ranks where one and two are admitted, since most defects of parallel code do not show on
  one. A test that needs more than its lowest number says so with `@pytest.mark.ranks(4)`.
- **Cases.** A test marked `@pytest.mark.sampled(n)` runs `n` of its cases. Any other MPI test with several
  cases runs a part of them (`case_count`); with three or more parameters this part has every pair of values.
  `@pytest.mark.every_case` exempts a test.
- **Slow tests.** A slow case runs with one commit in several, the slowest with one in `LONGEST_PERIOD`, so
  that a case costs at most `SHARE` seconds per commit on average (`durations.py`).

These choices depend on a seed, by default the commit: each commit runs other cases, and one file in
`ROTATION` also runs on the numbers of ranks that are left out elsewhere. Over some commits everything runs.
`make test-full` executes everything, and so does a run that names tests (`::`, `-k`).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from zlib import crc32

import pytest

from tests.durations import periods

ROOT = Path(__file__).resolve().parent.parent

ALL_CASES = "HPCTRAIN_ALL_CASES"
"""Environment variable that is set where every case runs on every number of ranks (`make test-full`)."""
SEED = "HPCTRAIN_TEST_SEED"
"""Environment variable with the seed of the selection; the abbreviated commit if it is not set."""
RANKS = "HPCTRAIN_TEST_RANKS"
"""Environment variable with the numbers of ranks of a run of the suite, as in "1 2 4 8"."""
VARIABLES = (ALL_CASES, SEED, RANKS)

ROTATION = 12
"""One test file in so many runs on numbers of ranks that are left out elsewhere."""

_MPI_MARK = re.compile(r"pytest\.mark\.mpi\b((?:\([^)]*\))?)")
_RANKS_MARK = re.compile(r"pytest\.mark\.ranks\(([^)]*)\)")
_BOUND = re.compile(r"(min_size|max_size) *= *(\w+)")


@cache
def seed() -> str:
    """Return the seed of the selection: the variable `SEED`, else the commit, else (no repository) "0"."""
    if SEED in os.environ:
        return os.environ[SEED]
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return done.stdout.strip()


def admits(size: int, marks: Sequence[Mapping[str, int]]) -> bool:
    """Return True if a test can run on `size` ranks, by the `min_size` and `max_size` of its `mpi` marks."""
    return all(mark.get("min_size", 1) <= size <= mark.get("max_size", size) for mark in marks)


def proving_size(sizes: Sequence[int], marks: Sequence[Mapping[str, int]]) -> int | None:
    """Return the number of ranks, one of `sizes`, on which a test with these `mpi` marks always runs.

    This is the lowest admitted number above one, or one where no other is admitted.
    """
    admitted = [size for size in sizes if admits(size, marks)]
    return min(admitted, key=lambda size: (size == 1, size), default=None)


class RankSelection:
    """Choice of the MPI tests that run on a given number of ranks.

    Args:
        size: Number of ranks of this run of pytest.
        sizes: Numbers of ranks of the whole run of the suite. If empty, as where pytest was started by hand,
            every test runs that its mark admits.
    """

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        self.size = size
        self.sizes = sizes
        self.everything = not sizes

    @classmethod
    def of(cls, size: int, config: pytest.Config) -> RankSelection:
        """Return the selection of a run on `size` ranks: everything where `takes_all_cases(config)`."""
        numbers = [int(number) for number in os.environ.get(RANKS, "").split()]
        return cls(size, [] if takes_all_cases(config) else numbers)

    def takes_item(self, item: pytest.Item) -> bool:
        """Return True if this run executes `item`."""
        marks = [mark.kwargs for mark in item.iter_markers(name="mpi")]
        if not admits(self.size, marks):
            return False
        if self.everything or self._takes_all_of(item.path):
            return True
        explicit = item.get_closest_marker("ranks")
        if explicit is not None and set(explicit.args) & set(self.sizes):
            return self.size in explicit.args
        return self.size == proving_size(self.sizes, marks)

    def takes_file(self, path: Path) -> bool:
        """Return False if no test of a file runs here, judged by its text: importing a file takes time."""
        text = path.read_text(encoding="utf-8")
        marks = [dict(_BOUND.findall(mark)) for mark in _MPI_MARK.findall(text)]
        if any(not value.isdigit() for mark in marks for value in mark.values()):
            return True  # bounds that are known only to the file
        bounds = [{name: int(value) for name, value in mark.items()} for mark in marks]
        if self.everything or self._takes_all_of(path):
            return any(admits(self.size, [each]) for each in bounds)
        named = [int(number) for mark in _RANKS_MARK.findall(text) for number in re.findall(r"\d+", mark)]
        return self.size in named or any(self.size == proving_size(self.sizes, [each]) for each in bounds)

    def _takes_all_of(self, path: Path) -> bool:
        """Return True if it is this file's turn to run on all numbers of ranks."""
        return not _rank("/".join(path.parts[-2:]), str(self.size)) % ROTATION


def left_out_cases(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that this run leaves out; the same on all ranks."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        ordered = sorted(cases, key=lambda item: _rank(item.nodeid))
        turns = periods().get(name, 1)
        taken = {item for item in _chosen(ordered) if not _rank("turn", item.nodeid) % turns}
        yield from (item for item in cases if item not in taken)


def _chosen(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Return the cases of one test that run, of `cases` in the order of the seed."""
    mark = cases[0].get_closest_marker("sampled")
    if mark is not None:
        (count,) = mark.args
        return cases[:count]
    if cases[0].get_closest_marker("mpi") is None or cases[0].get_closest_marker("every_case") is not None:
        return cases
    rows = [_values(item) for item in cases]
    strength = 2 if len(rows[0]) > 2 else 0
    chosen = covering(rows, strength, case_count(len(rows)))
    return [cases[number] for number in chosen]


def _values(item: pytest.Item) -> tuple[int, ...]:
    """Return the number of the value of each parameter of a case, in the order of the parameters' names."""
    call = getattr(item, "callspec", None)
    return tuple(number for _, number in sorted(call.indices.items())) if call else ()


def case_count(cases: int) -> int:
    """Return how many cases of an MPI test run at least: all of two, two of a few, a fifth of many."""
    return max(min(cases, 2), min(cases // 4 + 1, 3), cases // 5)


def covering(rows: Sequence[tuple[int, ...]], strength: int, least: int) -> list[int]:
    """Choose rows in which each combination of values of `strength` columns occurs that occurs in all rows.

    Args:
        rows: Values of one case each, as many in each row. Columns that are equal up to the names of their
            values count as one, since `parametrize(("a", "b"), [...])` varies both together.
        strength: Number of columns whose combinations are covered: 2 for pairs, 1 for single values. With a
            single column nothing is covered.
        least: Number of rows that are chosen at least.

    Returns:
        The numbers of the chosen rows. Of rows that cover equally many new combinations the first is chosen.
    """
    columns = {tuple(_renamed(column)): column for column in zip(*rows, strict=True)}
    distinct = list(zip(*columns.values(), strict=True)) or [()] * len(rows)
    strength = min(strength, len(columns) - 1)
    left = {
        number: set(combinations(enumerate(row), strength)) if strength > 0 else set()
        for number, row in enumerate(distinct)
    }
    missing = set().union(*left.values())
    chosen: list[int] = []
    while missing or len(chosen) < least:
        best = max(left, key=lambda number: len(left[number] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def _renamed(column: Sequence[int]) -> Iterator[int]:
    """Yield the values of a column, numbered in the order of their first occurrence."""
    numbers: dict[int, int] = {}
    for value in column:
        yield numbers.setdefault(value, len(numbers))


def takes_all_cases(config: pytest.Config) -> bool:
    """Return True if all cases run: in `make test-full`, and where the command line names tests."""
    named = config.getoption("keyword") or any("::" in argument for argument in config.args)
    return bool(named or os.environ.get(ALL_CASES))


def repeat_command(item: pytest.Item, size: int | None) -> str:
    """Return the command that repeats this case on `size` ranks (None: without MPI) at any commit."""
    return f"make test RANKS={size or ''} ARGS='{item.nodeid}'"


def _rank(*words: str) -> int:
    """Return a number that orders or draws by the seed."""
    return crc32(" ".join((seed(), *words)).encode())
