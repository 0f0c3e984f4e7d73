"""How jobs end: whole mpirun jobs, from tests without ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import os, sys, threading, time
import torch
from hpctrain.comm.verb import run_verb
from hpctrain.errors import HpctrainError, InputOutputError
def verb(world):
    group = world.everyone
"""
TAIL = """
run_verb(verb, "cpu")
"""


@pytest.fixture
def run(launch: Launch, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the lines as a verb on so many ranks."""

    def start(
        ranks: int, lines: str, timeout: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        program.write_text(HEAD + body + TAIL)
        return launch(ranks, program, timeout=timeout, own_end=True, **environment)

    return start


def test_a_normal_end_with_the_verbs_exit_code(run: Launch) -> None:
    done = run(0, "print('total', group.all_reduce(torch.ones(1)).item())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "total 1.0\n", "")
    done = run(2, "print('total', group.all_reduce(torch.ones(1)).item())\nreturn 75")
    assert done.returncode == 75
    # The ranks write at the same time, so that their words may mix.
    assert done.stdout.count("total") == done.stdout.count("2.0") == 2
    assert "hpctrain" not in done.stderr


@pytest.mark.parametrize(
    "lines",
    [
        "raise InputOutputError(['a.h5: bad', 'b.h5: bad'])",
        "with world.agreement():\n    if world.rank == 1: raise InputOutputError(['a.h5: bad', 'b.h5: bad'])",
    ],
)
def test_an_error_of_all_ranks_is_printed_once(run: Launch, lines: str) -> None:
    done = run(2, lines)
    assert done.returncode == 3
    assert done.stderr.count("hpctrain: error: a.h5: bad\n") == 1
    assert done.stderr.count("hpctrain: error: b.h5: bad\n") == 1
    assert "Traceback" not in done.stderr
    assert "MPI_ABORT" not in done.stderr


def test_an_error_of_one_rank_ends_the_others(run: Launch) -> None:
    done = run(2, "if world.rank == 1: raise HpctrainError('only here')\ngroup.barrier()")
    assert done.returncode == 2
    assert done.stderr.count("hpctrain: error: only here\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "lines",
    [
        "if world.rank == 1: raise ZeroDivisionError('boom')\ngroup.barrier()",
        "def work(): raise ZeroDivisionError('boom')\n"
        "if world.rank == 1: threading.Thread(target=work).start()\n"
        "group.barrier()\n"
        "time.sleep(600)",
    ],
    ids=["main", "thread"],
)
def test_an_uncaught_exception_ends_all_ranks_with_its_traceback(run: Launch, lines: str) -> None:
    done = run(2, lines)
    assert done.returncode == 70
    assert "hpctrain: rank 1 of 2 on " in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "ZeroDivisionError: boom" in done.stderr


def test_an_interrupt_is_one_line(run: Launch) -> None:
    done = run(2, "if world.rank == 0: raise KeyboardInterrupt\ngroup.barrier()")
    assert done.returncode == 130
    assert "rank 0 of 2" in done.stderr
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_rank_ends_the_job(run: Launch) -> None:
    done = run(2, "if world.rank == 1: os.kill(os.getpid(), 9)\ngroup.barrier()")
    assert done.returncode != 0


def test_a_segmentation_fault_prints_where_python_was(run: Launch) -> None:
    done = run(2, "if world.rank == 1: os.kill(os.getpid(), 11)\ngroup.barrier()")
    assert done.returncode != 0
    assert done.stderr.count("Fatal Python error: Segmentation fault\n") == 1
    assert 'program.py", line 8 in verb\n' in done.stderr


def test_silent_singletons_are_refused(run: Launch) -> None:
    done = run(0, "return 0", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0")
    assert done.returncode == 2
    assert "hpctrain: error: the launcher started 4 processes" in done.stderr
    assert run(0, "return 0", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1").stderr == ""


def test_a_rank_that_leaves_keeps_its_exit_code(run: Launch) -> None:
    """A launcher may end the ranks that have not left when the first has."""
    done = run(0, "import atexit\natexit.register(os.kill, os.getpid(), 15)\nreturn 75")
    assert done.returncode == 75


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_system_error_of_one_rank_is_a_sentence(run: Launch, ranks: int) -> None:
    done = run(ranks, "if world.rank == group.size - 1: open('/nowhere/tokens.h5')\ngroup.barrier()")
    assert done.returncode == 3, done.stderr
    assert "hpctrain: error: /nowhere/tokens.h5: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_verb_does_not_compute_on_the_cpu_where_gpus_are_unusable(launch: Launch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""{HEAD}
    print("computes on", world.device)
from hpctrain.host import device
device.unusable_gpus = lambda: "the driver is too old; update it"
run_verb(verb, sys.argv[1])
""")
    done = launch(2, program, "auto")
    assert (done.returncode, done.stdout) == (2, "")
    reason = 'the driver is too old; update it, or use "cpu" to compute on the CPU'
    assert done.stderr.count(f"hpctrain: error: --device auto: {reason}") == 1, done.stderr
    done = launch(0, program, "cpu")
    assert (done.returncode, done.stdout) == (0, "computes on cpu\n"), done.stderr
