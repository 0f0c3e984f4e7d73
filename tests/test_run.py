"""`make test` fails where any part of it fails, runs all parts, and says what came of each."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_environment
from tests.run import NO_TESTS, Outcome, Part, verdict

RANKS = ("1", "2")
TITLES = {"serial": "serial", "1": "1 rank", "2": "2 ranks"}
TESTS = """
import os, pytest

FAILS, HOW = "{fails}", "{how}"

def verdict(ranks):
    if ranks == FAILS and HOW == "dies":
        os._exit(9)
    if ranks == FAILS and HOW == "leaves":
        os._exit(0)
    if ranks == FAILS and HOW == "aborts":
        from hpctrain.host.mpi_library import MPI
        assert MPI.COMM_WORLD.rank == 0, "this rank fails"
        MPI.COMM_WORLD.Barrier()
    assert ranks != FAILS

def test_serial():
    verdict("serial")

@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_ranks():
    from hpctrain.host.mpi_library import MPI
    verdict(str(MPI.COMM_WORLD.size))

@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_next():
    pass
"""


def run_parts(
    folder: Path, fails: str, how: str = "fails", ranks: Sequence[str] = RANKS, make: bool = False
) -> subprocess.CompletedProcess[str]:
    """What `make test` calls, or that itself, on one file, one of whose tests fails on a number of ranks."""
    (folder / "test_it.py").write_text(TESTS.format(fails=fails, how=how))
    environment = {k: v for k, v in clean_environment().items() if not k.startswith(("MAKE", "MFLAGS"))}
    called = [sys.executable, "tests/run.py", "--ranks", " ".join(ranks), "--", "-n", "0", str(folder)]
    return subprocess.run(
        ["make", "test", f"RANKS={' '.join(ranks)}", f"ARGS=-n 0 {folder}"] if make else called,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def summary(text: str) -> dict[str, str]:
    """The lines of the summary, by what they begin with; the last line of all under ""."""
    lines = text.rpartition("== summary\n")[2].splitlines()
    return {line.split("  ")[0].strip(): line for line in lines[:-1]} | {"": lines[-1]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fails", ["serial", *RANKS])
def test_a_failure_on_any_number_of_ranks_fails_the_whole(tmp_path: Path, fails: str) -> None:
    ranks = RANKS if fails == "2" else ("1",)
    done = run_parts(tmp_path, fails, ranks=ranks, make=fails == "2")
    assert done.returncode != 0, done.stdout
    lines = summary(done.stdout)
    for part in ("serial", *ranks):
        count = 1 if part == "serial" else 2
        failed = int(part == fails)
        assert f"{count - failed} passed, {failed} failed, 0 skipped" in lines[TITLES[part]], done.stdout
    assert lines[""] == f"{2 * len(ranks)} passed, 1 failed, 0 skipped"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "code"), [("dies", 9), ("aborts", 70)])
def test_a_run_that_ends_early_fails_the_whole(tmp_path: Path, how: str, code: int) -> None:
    done = run_parts(tmp_path, "2", how, ranks=("2",))
    assert done.returncode != 0, done.stdout
    lines = summary(done.stdout)
    assert f"ended with code {code}" in lines["2 ranks"]
    assert "1 passed, 0 failed" in lines["serial"]


def test_a_test_that_ends_its_process_in_peace_fails_the_whole(tmp_path: Path) -> None:
    done = run_parts(tmp_path, "1", "leaves", ranks=("1",))
    assert done.returncode == 70
    lines = summary(done.stdout)
    assert "1 passed, 0 failed, 0 skipped  (" in lines["serial"]
    assert "; 1 came to no end" in lines["1 rank"] or "; 2 came to no end" in lines["1 rank"]


def test_a_launcher_that_is_not_there_fails_the_whole(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    done = subprocess.run(
        [sys.executable, "tests/run.py", "--ranks", "2", "--", "-n", "0", str(tmp_path)],
        cwd=ROOT,
        env=clean_environment() | {"MPIRUN": "no-such-launcher"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 127
    assert "no-such-launcher" in done.stderr
    assert "ended with code 127" in summary(done.stdout)["2 ranks"]


def test_everything_passes(tmp_path: Path) -> None:
    """Of two files, each test of two ranks once, whoever of the two that share them begins it."""
    (tmp_path / "test_other.py").write_text(TESTS.format(fails="none", how=""))
    done = run_parts(tmp_path, "none", make=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(done.stdout)[""] == "10 passed, 0 failed, 0 skipped"


def outcome(code: int) -> Outcome:
    return Outcome(Part(2), code, Counter(), 0.0)


def test_nothing_to_run_is_a_failure_unless_others_had_something() -> None:
    assert verdict([outcome(0), outcome(NO_TESTS)]) == 0
    assert verdict([outcome(NO_TESTS), outcome(NO_TESTS)]) == NO_TESTS
    assert verdict([outcome(0), outcome(1), outcome(70), outcome(0)]) == 1


def test_eight_ranks_look_at_no_more_files_than_they_need() -> None:
    files = Part(8).command([])[-3:]
    assert all(
        Path(path).name.startswith("test_") and "mark.eight" in Path(path).read_text() for path in files
    )
    assert Part(8).command(["tests/comm"])[-1] == "tests/comm"
    assert Part(8).command(["-k", "zero"])[-3:] == files
