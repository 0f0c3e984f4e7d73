"""A job that loses a node goes on within its allocation, from what the nodes that are left hold in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, metrics, wait_until
from tests.cluster.conftest import STEPS, hpctrain
from tests.cluster.test_restart import assert_same_training, places

pytestmark = pytest.mark.cluster

KEYS = ("checkpoint.mirror=true", "checkpoint.mirror_every=2", "checkpoint.every=0", "batch.micro_size=4")


def mirrored(project: Path, launcher: str) -> Path:
    """The script that `hpctrain job` writes for a deck with mirrors."""
    path = project / f"mirrored-{launcher}.sh"
    settings = [word for key in KEYS for word in ("--set", key)]
    shape = ["--launcher", launcher, "--nodes", "1-2", "--ranks-per-node", "2", "--time", "30 min"]
    where = ["--partition", "all", "--output", path]
    hpctrain("job", "steady.toml", *shape, *settings, *where, cwd=project)
    text = path.read_text()
    assert "#SBATCH --no-kill" in text
    path.write_text("".join(line for line in text.splitlines(True) if "--account" not in line))
    return path


@pytest.mark.parametrize(
    ("launcher", "harm", "lost", "restarts"),
    [
        pytest.param("srun", Cluster.kill_node, "n2", "0", id="killed, srun"),
        pytest.param("mpirun", Cluster.kill_node, "n2", "0", id="killed, mpirun"),
        pytest.param("srun", Cluster.cut_link, "n2", "0", id="behind a cut link, srun"),
        # The allocation is lost with its script, but not what n2 has in memory.
        pytest.param("srun", Cluster.kill_node, "n1", "1", id="killed with the script on it"),
    ],
)
def test_a_job_that_lost_a_node_goes_on_from_memory(
    cluster: Cluster,
    project: Path,
    alone: Callable[..., Path],
    launcher: str,
    harm: Callable[[Cluster, str], None],
    lost: str,
    restarts: str,
) -> None:
    number = cluster.sbatch(mirrored(project, launcher), cwd=project)
    folder = project / "runs/steady"
    wait_until(lambda: len(metrics(folder)) > 8, 120, "some steps", every=0.05)
    harm(cluster, lost)
    came = len(metrics(folder))
    assert came < STEPS
    assert not list((folder / "checkpoints").glob("step-*.h5"))
    job = cluster.wait(number, 150)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", restarts)
    left = {"n1": "n2", "n2": "n1"}[lost]
    assert job["NodeList"] == left
    assert [place.rpartition(" on ")[2] for place in places(folder)] == ["2 nodes", "1 node"]
    text = (folder / "log.txt").read_text()
    assert f"from the memory of node {left} (no checkpoint on disk); " in text
    assert "checkpoint.mirror has no effect: no neighbour node is left" in text
    took = int(text.partition("restored step ")[2].split()[0])
    assert 6 <= took <= came + 2
    assert_same_training(folder, alone("steady.toml"))
    names = cluster.run("ls", "/dev/shm", on=left).stdout
    assert "hpctrain-mirror" not in names


def test_a_mirror_on_one_node_is_refused(cluster: Cluster, project: Path) -> None:
    command = [
        "srun",
        "--nodes=1",
        "--ntasks=2",
        "--mpi=pmix",
        "--overlap",
        "python",
        "-m",
        "hpctrain",
        "run",
    ]
    done = cluster.run(*command, "steady.toml", "--set", KEYS[0], check=False, cwd=project)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("requires at least two nodes, not 2 ranks on one") == 1
