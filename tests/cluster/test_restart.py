"""Jobs that stop early or lose a node go on with what is left, and end where an undisturbed run ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cluster.cluster import Cluster, metrics, wait_until
from tests.cluster.conftest import STEPS

pytestmark = pytest.mark.cluster

SCRIPTS = ("slurm-mpirun.sh", "slurm-srun.sh")
ON_TWO = "4 ranks (pipeline 1 x data 4 x context 1 x tensor 1) on 2 nodes"
ON_ONE = "2 ranks (pipeline 1 x data 2 x context 1 x tensor 1) on 1 node"


def parameters(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with h5py.File(folder / f"checkpoints/step-{STEPS:08}.h5", "r") as file:
        file["model"].visititems(
            lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    return found


def assert_same_training(folder: Path, undisturbed: Path) -> None:
    """Every step once, with the losses and at last the parameters of the run that nothing disturbed."""
    steps, expected = metrics(folder), metrics(undisturbed)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=1e-5)
    ours, theirs = parameters(folder), parameters(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert abs(ours[name] - tensor).max() <= 1e-4 * abs(tensor).max(), name


def places(folder: Path) -> list[str]:
    """On which ranks and nodes the run was started, one entry a start."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [line[line.index("fp32, ") + 6 :] for line in lines if "pipeline 1 x data" in line]


def test_usr2_stops_a_job_that_goes_on_with_one_node_after_two(
    cluster: Cluster, project: Path, script: Callable[..., Path], alone: Callable[..., Path]
) -> None:
    """Under srun: USR1 is what tells that signals come through mpirun, and lost nodes that its jobs go on."""
    number = cluster.sbatch(script("slurm-srun.sh", "steady.toml"), cwd=project)
    folder = project / "runs/steady"
    wait_until(lambda: len(metrics(folder)) > 3, 120, "the first steps", every=0.05)
    cluster.drain("n2")
    cluster.run("scancel", "--signal=USR2", str(number))
    job = cluster.wait(number, 90)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert places(folder) == [ON_TWO, ON_ONE]
    assert_same_training(folder, alone("steady.toml"))


@pytest.mark.parametrize(
    ("harm", "lost", "ranks", "name"),
    [
        pytest.param(Cluster.kill_node, "n2", 2, SCRIPTS[0], id="killed, mpirun"),
        pytest.param(Cluster.kill_node, "n2", 2, SCRIPTS[1], id="killed, srun"),
        pytest.param(Cluster.cut_link, "n2", 1, SCRIPTS[0], id="behind a cut link, mpirun"),
        pytest.param(Cluster.cut_link, "n2", 1, SCRIPTS[1], id="behind a cut link, srun"),
        # Either launcher goes with the script.
        pytest.param(Cluster.kill_node, "n1", 1, SCRIPTS[0], id="killed with the script on it"),
    ],
)
def test_a_lost_node_is_done_without(
    cluster: Cluster,
    project: Path,
    script: Callable[..., Path],
    alone: Callable[..., Path],
    name: str,
    harm: Callable[[Cluster, str], None],
    lost: str,
    ranks: int,
) -> None:
    """With so many ranks on a node."""
    edited = script(name, "steady.toml")
    edited.write_text(edited.read_text().replace("ranks_per_node=2\n", f"ranks_per_node={ranks}\n"))
    number = cluster.sbatch(edited, cwd=project)
    folder = project / "runs/steady"
    wait_until(lambda: len(metrics(folder)) > 8, 120, "a checkpoint and more", every=0.05)
    harm(cluster, lost)
    assert len(metrics(folder)) < STEPS
    job = cluster.wait(number, 120)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0")
    assert job["NodeList"] == {"n1": "n2", "n2": "n1"}[lost]
    started = places(folder)
    assert started[0].startswith(f"{2 * ranks} ranks ")
    assert started[0].endswith(" on 2 nodes")
    assert started[-1].startswith(f"{ranks} rank")
    assert started[-1].endswith(" on 1 node")
    assert_same_training(folder, alone("steady.toml"))


def test_a_job_stops_before_its_time_limit_and_goes_on(
    cluster: Cluster, project: Path, script: Callable[..., Path]
) -> None:
    """30 seconds early, since no limit of Slurm is shorter than a minute."""
    settings = ("run.steps=100000", "checkpoint.every=0", "run.time_margin=30")
    edited = script("slurm-srun.sh", "steady.toml", *settings)
    number = cluster.sbatch(edited, options=["--time=1", "--signal=USR1@1"], cwd=project)
    folder = project / "runs/steady"
    wait_until(lambda: cluster.job(number)["Restarts"] == "1", 90, "the job to be queued again")
    stopped = int((folder / "checkpoints/latest").resolve().stem.removeprefix("step-"))
    wait_until(lambda: len(metrics(folder)) > stopped, 120, "the run to go on")
    assert "time limit" in (folder / "log.txt").read_text()
    assert len(places(folder)) == 2
    assert [step["step"] for step in metrics(folder)][: stopped + 1] == list(range(1, stopped + 2))
