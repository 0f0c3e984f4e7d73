"""A job whose ranks go astray says which one, on which node, ends with code 70, and is started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, metrics, wait_until
from tests.cluster.conftest import STEPS

pytestmark = pytest.mark.cluster

#: hpctrain, of which one rank does something else in its 8th reduction, in the first start of the job alone.
PROGRAM = """
import os, time
from hpctrain.cli.main import main
from hpctrain.comm.group import Group

usual, seen = Group.start_all_reduce, []

def changed(group, *arguments, **options):
    if group.ledger.phase in {{"forward", "backward"}} and "rank {rank} " in repr(group):
        seen.append(1)
        if len(seen) == 8:
            return {act}
    return usual(group, *arguments, **options)

if "SLURM_RESTART_COUNT" not in os.environ:
    Group.start_all_reduce = changed
main()
"""


@pytest.fixture
def astray(cluster: Cluster, project: Path, script: Callable[..., Path]) -> Callable[..., tuple[int, str]]:
    """`astray(script, rank, act, *settings)`: the job's number once it is queued again, and its output."""

    def run(name: str, rank: int, act: str, *settings: str) -> tuple[int, str]:
        (project / "astray.py").write_text(PROGRAM.format(rank=rank, act=act))
        edited = script(name, "steady.toml", *settings)
        number = cluster.sbatch(edited, cwd=project, HPCTRAIN=".venv/bin/python astray.py")
        wait_until(lambda: cluster.job(number)["Restarts"] == "1", 60, "the job to be queued again")
        return number, (project / f"quickstart-{number}.out").read_text()

    return run


def test_a_rank_that_hangs_is_named_and_the_job_goes_on_without_the_hang(
    cluster: Cluster, project: Path, astray: Callable[..., tuple[int, str]]
) -> None:
    number, output = astray(
        "slurm-srun.sh", 3, "time.sleep(1000)", "stability.hang_seconds=4", "checkpoint.every=2"
    )
    assert "error: rank 3 on n2 never entered all_reduce " in output
    assert "error: rank 3 on n2 is in no communication call, at " in output
    assert "astray.py:12 in changed" in output
    assert "exit code 70: queued again" in output
    assert "in changed" in (project / "runs/steady/hang.3.txt").read_text()
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert [step["step"] for step in metrics(project / "runs/steady")] == list(range(1, STEPS + 1))


def test_ranks_that_call_different_operations_are_named_before_the_hang(
    project: Path, astray: Callable[..., tuple[int, str]]
) -> None:
    _, output = astray(
        "slurm-mpirun.sh", 2, "group.barrier()", "communication.check=true", "stability.hang_seconds=0"
    )
    named = "hpctrain: error: the ranks make different calls: ranks 0-1, 3 call all_reduce "
    assert output.count(named) == 1
    assert "; rank 2 calls barrier " in output
    assert "Traceback" not in output
    assert not list((project / "runs/steady").glob("hang.*"))
