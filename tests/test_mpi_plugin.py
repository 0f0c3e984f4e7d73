"""A failing, dying or hanging rank ends the run at once, with its message; the others stay silent."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

HEAD = """
import os, time, pytest
from hpctrain.host.mpi_library import MPI
pytestmark = pytest.mark.mpi(min_size=2)
ranks = MPI.COMM_WORLD
"""


@pytest.fixture
def run_ranks(launch: Launch, tmp_path: Path) -> Callable[..., tuple[int, str, float]]:
    """`run_ranks(tests, *options)` runs the text of a test file on 2 ranks: exit code, output, seconds."""

    def run(tests: str, *options: str) -> tuple[int, str, float]:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(HEAD + tests)
        start = time.monotonic()
        done = launch(
            2, "-m", "pytest", "-p", "tests.mpi_plugin", "--with-mpi", "--color=no", "test_it.py", *options
        )
        return done.returncode, done.stdout + done.stderr, time.monotonic() - start

    return run


def test_passing_tests_are_reported_once(run_ranks: Callable[..., tuple[int, str, float]]) -> None:
    code, output, _ = run_ranks("def test_sum():\n    assert ranks.allreduce(1) == 2\n")
    assert code == 0
    assert output.count("1 passed") == 1


def test_a_failure_on_one_rank_is_reported_by_rank_0(
    run_ranks: Callable[..., tuple[int, str, float]],
) -> None:
    code, output, _ = run_ranks(
        "def test_one():\n    assert ranks.rank != 1, 'the second rank is wrong'\n"
        "def test_next():\n    ranks.Barrier()\n"
    )
    assert code == 1
    assert "on ranks [1] of 2" in output
    assert "the second rank is wrong" in output
    assert "1 failed, 1 passed" in output


def test_a_failing_rank_ends_the_others_that_wait_for_it(
    run_ranks: Callable[..., tuple[int, str, float]],
) -> None:
    code, output, seconds = run_ranks(
        "def test_wait():\n    assert ranks.rank != 1, 'left alone'\n    ranks.Barrier()\n"
    )
    assert code != 0
    assert "rank 1 of 2: test_it.py::test_wait failed in call" in output
    assert "AssertionError: left alone" in output
    assert seconds < 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_dying_rank_ends_the_others(run_ranks: Callable[..., tuple[int, str, float]], death: str) -> None:
    code, output, seconds = run_ranks(
        f"def test_die():\n    if ranks.rank == 1: {death}\n    ranks.Barrier()\n"
    )
    assert code != 0
    assert "passed" not in output
    assert seconds < 30


def test_a_hanging_rank_shows_where(run_ranks: Callable[..., tuple[int, str, float]]) -> None:
    code, output, seconds = run_ranks(
        "def wait_for_ever():\n    time.sleep(1000)\n"
        "def test_hang():\n    if ranks.rank == 1: wait_for_ever()\n    ranks.Barrier()\n",
        "-o",
        "faulthandler_timeout=2",
        "-o",
        "faulthandler_exit_on_timeout=true",
    )
    assert code != 0
    assert "in wait_for_ever" in output or "in test_hang" in output
    assert seconds < 30


def test_a_skip_on_one_rank_only_is_a_failure(run_ranks: Callable[..., tuple[int, str, float]]) -> None:
    code, output, _ = run_ranks("def test_skip():\n    if ranks.rank == 1: pytest.skip('not me')\n")
    assert code == 1
    assert "the ranks disagree" in output


def test_what_fewer_ranks_prove_is_left_out(run_ranks: Callable[..., tuple[int, str, float]]) -> None:
    code, output, _ = run_ranks(
        "@pytest.mark.mpi(max_size=1)\ndef test_one():\n    assert False\n"
        "@pytest.mark.mpi(max_size=2)\ndef test_two():\n    pass\n"
        "@pytest.mark.mpi(min_size=3)\ndef test_three():\n    assert False\n"
    )
    assert code == 0
    assert "1 passed, 2 deselected" in output


def test_a_failing_fixture_keeps_the_ranks_in_step(
    run_ranks: Callable[..., tuple[int, str, float]],
) -> None:
    code, output, _ = run_ranks(
        "@pytest.fixture\ndef thing():\n    assert ranks.rank != 0, 'no thing'\n"
        "def test_thing(thing):\n    ranks.Barrier()\n"
        "def test_next():\n    assert ranks.allreduce(1) == 2\n"
    )
    assert code == 1
    assert "no thing" in output
    (summary,) = (line for line in output.splitlines() if line.endswith("=") and " passed, " in line)
    assert "1 passed, " in summary and ", 1 error in " in summary and "failed" not in summary


def test_ranks_with_different_tests_do_not_start(run_ranks: Callable[..., tuple[int, str, float]]) -> None:
    code, output, _ = run_ranks(
        "def test_all():\n    pass\n"
        "if '1' in (os.environ.get('OMPI_COMM_WORLD_RANK'), os.environ.get('PMI_RANK')):\n"
        "    def test_more():\n        pass\n"
    )
    assert code != 0
    assert "the ranks collected different tests" in output
