"""Mistakes that only several nodes make possible: one sentence, and exit code 2 on all ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cluster import ROOT, Cluster

pytestmark = pytest.mark.cluster

SRUN = ("srun", "--nodes=2", "--oversubscribe")
SALLOC = ("salloc", "--quiet", "--nodes=2", "--oversubscribe")
PMIX = (*SRUN, "--mpi=pmix")
#: What a launcher starts: hpctrain, and each rank's exit code told, whatever tries to end it meanwhile.
RANK = 'trap : TERM; "$@"; code=$?; echo "a rank left with $code"; exit $code'


#: A deck that three ranks could train.
THREE = ("steady.toml", "--set", "batch.global_size=12")


@dataclass(frozen=True)
class Case:
    """How so many ranks are started, hpctrain's arguments, and the beginning of what it says."""

    ranks: int
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    told: str
    environment: str = sys.prefix


CASES = (
    Case(
        *(3, (*PMIX, "--ntasks=3"), THREE),
        "3 ranks are spread unevenly over 2 nodes, 2 on n1 and 1 on n2: ",
    ),
    Case(
        *(3, (*SALLOC, "mpirun", "--host", "n1:2,n2:1", "--oversubscribe", "-n", "3"), THREE),
        "3 ranks are spread unevenly over 2 nodes, 2 on n1 and 1 on n2: ",
    ),
    Case(
        *(2, (*PMIX, "--ntasks=2"), ("/tmp/mine.toml",)),
        "/tmp/mine.toml: rank 0 on n1 reads this deck, but rank 1 on n2 cannot read it; ",
    ),
    Case(
        *(2, (*PMIX, "--ntasks=2"), ("steady.toml", "--set", "run.dir=/tmp/run")),
        "run.dir = /tmp/run: rank 1 on n2 does not see what rank 0 on n1 writes there; ",
    ),
    Case(
        *(2, (*PMIX, "--ntasks=2", "env", "SLURM_PROCID=0"), ("steady.toml",)),
        "the launcher's variables contradict MPI (SLURM_PROCID = 0, but MPI's rank is 1): ",
    ),
    Case(
        *(2, (*SRUN, "--ntasks=2", "--mpi=none"), ("steady.toml",)),
        "srun started 2 ranks without PMIx, which Open MPI needs to join them: ",
    ),
    Case(
        *(2, (*SRUN, "--ntasks=2", "--mpi=none"), ("steady.toml",)),
        "the launcher started 2 processes (SLURM_STEP_NUM_TASKS), but MPI sees a world of 1: ",
        str(ROOT / ".venv-mpich"),  # left out where there is none
    ),
)


def test_mistakes_are_told_once_and_end_all_ranks(cluster: Cluster, project: Path) -> None:
    """The cases are started side by side, since ranks wait for what does not come."""
    cluster.run("cp", project / "steady.toml", "/tmp/mine.toml", on="n1")

    def start(case: Case) -> subprocess.CompletedProcess[str]:
        hpctrain = (f"{case.environment}/bin/python", "-m", "hpctrain", "run")
        command = (*case.launcher, "bash", "-c", RANK, "bash", *hpctrain, *case.arguments)
        return cluster.run(*command, cwd=project, check=False, timeout=100)

    cases = [case for case in CASES if Path(case.environment).exists()]
    with ThreadPoolExecutor(len(cases)) as pool:
        ended = list(pool.map(start, cases))
    for case, done in zip(cases, ended, strict=True):
        told = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error: ")]
        assert (done.returncode, len(told)) == (2, 1), done.stdout + done.stderr
        assert told[0].startswith(f"hpctrain: error: {case.told}")
        if "srun" in case.launcher:  # mpirun ends the others, or their words, when one has left
            assert done.stdout.count("a rank left with 2\n") == case.ranks, done.stdout
        assert "Traceback" not in done.stderr


def test_a_job_with_more_ranks_than_the_layout_is_not_queued_again(
    cluster: Cluster, project: Path, script: Callable[..., Path]
) -> None:
    job = cluster.wait(cluster.sbatch(script("slurm-srun.sh", "steady.toml", "layout.data=2"), cwd=project))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    (output,) = project.glob("*.out")
    assert output.read_text().count("hpctrain: error: --set layout.data=2: must be 4, ") == 1
    assert not (project / "runs/steady").exists()
