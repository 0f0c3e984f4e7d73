"""The Slurm scripts of jobs/, submitted as a user would: they train, on two nodes, what one rank trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import NODES, Cluster, metrics, wait_until
from tests.cluster.conftest import hpctrain

pytestmark = pytest.mark.cluster

SCRIPTS = ("slurm-mpirun.sh", "slurm-srun.sh")
FENCE = """
import ctypes, os, pathlib, time

pmix = ctypes.CDLL("libpmix.so.2")
assert pmix.PMIx_Init(ctypes.create_string_buffer(1024), None, 0) == 0
arrived = pathlib.Path("arrived")
if os.environ["SLURM_PROCID"] == "0":
    time.sleep(1)
    arrived.touch()
assert pmix.PMIx_Fence(None, 0, None, 0) == 0
print("left the fence after rank 0 arrived:", arrived.exists())
assert pmix.PMIx_Finalize(None, 0) == 0
"""
"""Program that says whether ranks of other nodes wait in a fence of PMIx, as Open MPI expects."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_the_quickstart_deck_on_two_nodes(
    cluster: Cluster, project: Path, script: Callable[..., Path], alone: Callable[..., Path], name: str
) -> None:
    steps = ("run.steps=2", "run.evaluate_sequences=4")
    job = cluster.wait(cluster.sbatch(script(name, "inputs/quickstart.toml", *steps), cwd=project))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    folder = project / "runs/quickstart"
    assert (
        "4 ranks (pipeline 1 x data 4 x context 1 x tensor 1) on 2 nodes" in (folder / "log.txt").read_text()
    )
    assert [path.name for path in (folder / "checkpoints").glob("step-*.h5")] == ["step-00000002.h5"]
    on_four = [step["loss"] for step in metrics(folder)]
    expected = [step["loss"] for step in metrics(alone("inputs/quickstart.toml", *steps))]
    assert len(expected) == 2
    assert on_four == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_usr1_writes_a_checkpoint_and_scancel_ends_every_rank(
    cluster: Cluster, project: Path, script: Callable[..., Path], name: str
) -> None:
    edited = script(name, "steady.toml", "run.steps=100000", "checkpoint.every=0")
    number = cluster.sbatch(edited, cwd=project)
    folder = project / "runs/steady"
    wait_until(lambda: len(metrics(folder)) > 1, 120, "the first steps")
    cluster.run("scancel", "--signal=USR1", *(["--batch"] if "mpirun" in name else []), str(number))
    wait_until((folder / "checkpoints/latest").exists, 30, "the checkpoint that USR1 asks for")
    steps = len(metrics(folder))
    wait_until(lambda: len(metrics(folder)) > steps + 2, 30, "the run to go on")
    assert all(len(cluster.processes(node, "hpctrain run steady.toml")) >= 2 for node in NODES)

    cluster.run("scancel", str(number))
    job = cluster.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    wait_until(lambda: not cluster.jobs(), 30, "the job to be gone")
    assert not any(cluster.processes(node, "hpctrain run") for node in NODES)
    hpctrain("inspect", folder / "checkpoints/latest", "--verify", cwd=project)


def test_a_sweep_trains_each_variant_in_a_folder_of_its_own(
    cluster: Cluster, project: Path, script: Callable[..., Path]
) -> None:
    edited = script("slurm-array-sweep.sh", "steady.toml", "run.steps=2")
    number = cluster.sbatch(edited, cwd=project)
    for task, (peak, warmup) in enumerate([(1e-3, 10), (2e-3, 10), (4e-3, 50)]):
        job = cluster.wait(f"{number}_{task}")
        assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "1")
        folder = project / f"runs/quickstart-{task}"
        rates = [step["lr"] for step in metrics(folder)]
        assert rates == pytest.approx([peak / warmup, 2 * peak / warmup])
        assert "on 1 node" in (folder / "log.txt").read_text()
        assert (folder / "checkpoints/step-00000002.h5").exists()
    assert not (project / "runs/steady").exists()


def test_the_fence_of_srun_is_a_barrier(
    cluster: Cluster, project: Path, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "fence.py").write_text(FENCE)
    monkeypatch.setitem(cluster.environment, "HPCTRAIN", "python fence.py")
    job = cluster.wait(cluster.sbatch(script("slurm-srun.sh", "steady.toml"), cwd=project))
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0")
    (output,) = project.glob("*.out")
    assert output.read_text().count("left the fence after rank 0 arrived: True") == 4
