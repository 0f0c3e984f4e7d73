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


@dataclass(frozen=True)
class Case:
    """How so many ranks are started, hpctrain's arguments, and the beginning of what it says."""

    ranks: int
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    told: str
    environment: str = sys.prefix


CASES = {
    "more ranks on one node": Case(
        *(3, (*PMIX, "--ntasks=3"), ("steady.toml",)),
        "3 ranks are spread unevenly over 2 nodes, 2 on n1 and 1 on n2: ",
    ),
    "more ranks on one node under mpirun": Case(
        *(3, (*SALLOC, "mpirun", "--host", "n1:2,n2:1", "--oversubscribe", "-n", "3"), ("steady.toml",)),
        "3 ranks are spread unevenly over 2 nodes, 2 on n1 and 1 on n2: ",
    ),
    "a deck that one node has": Case(
        *(2, (*PMIX, "--ntasks=2"), ("/tmp/mine.toml",)),
        "/tmp/mine.toml: rank 0 on n1 reads this deck, but rank 1 on n2 cannot read it; ",
    ),
    "a run folder that each node has": Case(
        *(2, (*PMIX, "--ntasks=2"), ("steady.toml", "--set", "run.dir=/tmp/run")),
        "run.dir = /tmp/run: rank 1 on n2 does not see what rank 0 on n1 writes there; ",
    ),
    "a rank that is not MPI's": Case(
        *(2, (*PMIX, "--ntasks=2", "env", "SLURM_PROCID=0"), ("steady.toml",)),
        "the launcher's variables contradict MPI (SLURM_PROCID = 0, but MPI's rank is 1): ",
    ),
    "no way to MPI": Case(
        *(2, (*SRUN, "--ntasks=2", "--mpi=none"), ("steady.toml",)),
        "srun started 2 ranks without PMIx, which Open MPI needs to join them: ",
    ),
    "no way to MPICH": Case(
        *(2, (*SRUN, "--ntasks=2", "--mpi=none"), ("steady.toml",)),
        "the launcher started 2 processes (SLURM_STEP_NUM_TASKS), but MPI sees a world of 1: ",
        str(ROOT / ".venv-mpich"),
    ),
}


@pytest.fixture(scope="module")
def ended(
    running_cluster: Cluster, make_project: Callable[[str], Path]
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What came of each case. They are started side by side, since ranks wait for what does not come."""
    cluster, project = running_cluster, make_project("bad-inputs")
    cluster.repair()
    cluster.run("cp", project / "steady.toml", "/tmp/mine.toml", on="n1")

    def start(case: Case) -> subprocess.CompletedProcess[str]:
        hpctrain = (f"{case.environment}/bin/python", "-m", "hpctrain", "run")
        command = (*case.launcher, "bash", "-c", RANK, "bash", *hpctrain, *case.arguments)
        return cluster.run(*command, cwd=project, check=False, timeout=100)

    cases = {name: case for name, case in CASES.items() if Path(case.environment).exists()}
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(start, cases.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_once_and_ends_all_ranks(
    ended: dict[str, subprocess.CompletedProcess[str]], name: str
) -> None:
    if name not in ended:
        pytest.skip("no environment with MPICH (make install MPI=mpich)")
    case, done = CASES[name], ended[name]
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
    assert output.read_text().count("hpctrain: error: --set layout.data=2: 4 ranks with ") == 1
    assert not (project / "runs/steady").exists()
