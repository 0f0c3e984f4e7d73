"""Death of a rank in the middle of a step: the job ends soon, and says why."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_work import write_small_work

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


# A block a stage and 8 or 4 micro-batches a data rank: the call is in the middle of the second step.
PROGRAM = """
import os, signal, sys, time
from hpctrain.cli.main import main
from hpctrain.model import transformer

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))
calls = 0
forward = transformer.TransformerBlock.forward

def dying(self, *arguments, **named):
    global calls
    calls += 1
    if calls == {call} and rank == {rank}:
        print("dies at", time.time(), file=sys.stderr, flush=True)
        {death}
    return forward(self, *arguments, **named)

transformer.TransformerBlock.forward = dying
sys.argv = ["hpctrain", "run", "deck.toml"]
main()
"""
DEATHS = {
    "raise": 'raise ArithmeticError("a layer broke")',
    "exit": "os._exit(9)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.fixture
def dies(tmp_path: Path, launch: Launch) -> Callable[[int, int, str, str], tuple[str, int, float]]:
    """Kill a rank of a run. Return the job's stderr, its exit code, and the seconds from death to the end."""

    def run(ranks: int, rank: int, death: str, schedule: str) -> tuple[str, int, float]:
        layout = {"pipeline": 2, "schedule": schedule, "split": [1, 1]}
        write_small_work(tmp_path, run={"steps": 1000}, batch={"global_size": 8}, layout=layout)
        (tmp_path / "program.py").write_text(
            PROGRAM.format(rank=rank, call=14 // (ranks // 2), death=DEATHS[death])
        )
        assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
        done = launch(ranks, "program.py")
        ended = time.time()
        died = [line for line in done.stderr.splitlines() if line.startswith("dies at")]
        assert died, done.stderr
        return done.stderr, done.returncode, ended - float(died[0].split()[-1])

    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "rank", "death", "schedule"),
    [
        (2, 1, "raise", "1f1b"),
        (2, 1, "exit", "zb-h1"),
        (4, 3, "raise", "1f1b"),
        (4, 2, "kill", "gpipe"),
    ],
)
def test_the_job_ends_within_ten_seconds(
    dies: Callable[[int, int, str, str], tuple[str, int, float]],
    ranks: int,
    rank: int,
    death: str,
    schedule: str,
) -> None:
    said, code, seconds = dies(ranks, rank, death, schedule)
    assert code != 0
    assert seconds < 10
    if death == "raise":
        assert code == 70
        assert "Traceback (most recent call last)" in said
        assert "in dying" in said
        assert "ArithmeticError: a layer broke" in said
        assert f"rank {rank}" in said
