"""Each test runs on the number of ranks that proves it; sampled cases change with the commit."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import durations, selection
from tests.durations import LONGEST_PERIOD, SHARE, period
from tests.launch import ROOT, clean_environment
from tests.selection import (
    ALL_CASES,
    RANKS,
    ROTATION,
    SEED,
    RankSelection,
    case_count,
    covering,
    left_out_cases,
    proving_size,
)

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([{}], 2),
        ([{"max_size": 1}], 1),
        ([{"min_size": 2, "max_size": 4}], 2),
        ([{"min_size": 3}], 4),
        ([{"min_size": 8}], 8),
        ([{"min_size": 1}, {"max_size": 1}], 1),
        ([{"min_size": 5, "max_size": 7}], None),
    ],
)
def test_the_lowest_number_above_one_that_the_marks_admit(
    marks: list[dict[str, int]], expected: int | None
) -> None:
    assert proving_size(SIZES, marks) == expected


TESTS = """
import pytest

@pytest.mark.mpi
def test_any(): pass

@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_named(): pass

@pytest.mark.mpi(min_size=3)
def test_many(): pass
"""


def selected(size: int, path: Path, sizes: tuple[int, ...] = SIZES) -> bool:
    return RankSelection(size, sizes).takes_file(path)


def test_a_file_is_imported_only_where_one_of_its_tests_runs(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    turns = [size for size in SIZES if RankSelection(size, SIZES)._takes_all_of(path)]
    assert [size for size in SIZES if selected(size, path)] == sorted({1, 2, 4, *turns})
    assert all(selected(size, path, ()) for size in SIZES)
    path.write_text("@pytest.mark.mpi(max_size=number)\n")
    assert all(selected(size, path) for size in SIZES)


def test_over_many_commits_each_file_runs_on_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("@pytest.mark.mpi\n")
    turns = 0
    for number in range(100 * ROTATION):
        monkeypatch.setattr(selection, "seed", lambda number=number: str(number))
        turns += selected(4, path)
    assert 60 < turns < 140


CASES = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(12))
def test_some(number): assert number < 0
"""


def run_cases(folder: Path, *arguments: str, **environment: str) -> tuple[list[str], str]:
    """Run a file whose cases all fail, and return the numbers of the cases that ran, and the output."""
    (folder / "test_cases.py").write_text(CASES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "tests.conftest", *arguments],
        cwd=ROOT,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    numbers = [line.partition("[")[2].partition("]")[0] for line in lines if line.startswith("FAILED")]
    return numbers, done.stdout


def test_each_seed_runs_other_cases_and_every_failure_tells_how_to_repeat_it(tmp_path: Path) -> None:
    file = str(tmp_path)
    first, output = run_cases(tmp_path, file, **{SEED: "one"})
    assert len(first) == 2
    assert "HPCTRAIN_TEST_SEED=one" in output
    assert f"::test_some[{first[0]}]'" in output.partition("run it again")[2]
    assert run_cases(tmp_path, file, **{SEED: "one"})[0] == first
    assert run_cases(tmp_path, file, **{SEED: "two"})[0] != first


def test_all_cases_run_where_they_are_named_or_asked_for(tmp_path: Path) -> None:
    named, _ = run_cases(tmp_path, f"{tmp_path / 'test_cases.py'}::test_some", **{SEED: "one"})
    everything, _ = run_cases(tmp_path, str(tmp_path), **{SEED: "one", ALL_CASES: "yes", RANKS: "1 2"})
    assert len(named) == len(everything) == 12


@pytest.mark.parametrize(("cases", "count"), [(1, 1), (2, 2), (3, 2), (7, 2), (8, 3), (15, 3), (40, 8)])
def test_a_part_of_the_cases_runs(cases: int, count: int) -> None:
    assert case_count(cases) == count


def test_pairs_of_values_are_covered_by_fewer_rows() -> None:
    rows = list(product(range(3), range(4), range(2), range(3)))
    chosen = [rows[number] for number in covering(rows, 2, 4)]
    for first, second in combinations(range(4), 2):
        assert {(row[first], row[second]) for row in chosen} == {(row[first], row[second]) for row in rows}
    assert len(chosen) < len(rows) / 3


def test_columns_that_vary_together_are_one() -> None:
    rows = [(number, 7 - number, other) for number in range(8) for other in range(2)]
    assert len(covering(rows, 2, 1)) == 8  # each value of either column, once
    assert len(covering([row[:2] for row in rows[::2]], 2, 3)) == 3  # one column: as many as are asked for
    assert covering([()], 0, 1) == [0]


def test_a_case_of_some_seconds_runs_with_one_commit_in_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["test_it.py::test_fast", *(f"test_it.py::test_slow[{number}]" for number in range(40))]
    items: list[Any] = [Mock(nodeid=name, get_closest_marker=lambda _: None) for name in names]
    monkeypatch.setattr(selection, "periods", lambda: {"test_it.py::test_slow": 4})
    left_out = Counter[str]()
    for number in range(100):
        monkeypatch.setattr(selection, "seed", lambda number=number: str(number))
        left_out.update(item.nodeid for item in left_out_cases(items))
    assert set(left_out) == set(names[1:])
    assert all(60 < count < 90 for count in left_out.values())


def test_no_case_costs_more_than_its_share_of_a_commit_on_average() -> None:
    seconds = [0.5 * SHARE, SHARE, 1.1 * SHARE, 3 * SHARE, 100.0]
    assert [period(each) for each in seconds] == [1, 1, 2, 3, LONGEST_PERIOD]


def test_new_seconds_replace_those_of_the_tests_that_ran(tmp_path: Path) -> None:
    here = "tests/test_selection.py"
    kept, changed, fast = (
        f"{here}::{test.__name__}"
        for test in (test_a_part_of_the_cases_runs, test_columns_that_vary_together_are_one, selected)
    )
    (tmp_path / "table").write_text(
        f"9.0 tests/gone.py::test_a\n8.0 {here}::test_gone\n2.0 {kept}\n3.0 {changed}\n"
    )
    measured = [(f"{changed}[1]", 4.0), (f"{changed}[2]", 5.0), (fast, 0.1)]
    durations.record(measured, tmp_path / "table")
    assert durations.read(tmp_path / "table") == {kept: 2.0, changed: 4.5}


def test_the_table_names_tests_that_exist() -> None:
    assert [name for name in durations.read() if not durations.is_test(name)] == []
