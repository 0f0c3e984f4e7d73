"""The scripts of jobs/: what `hpctrain job` writes, without faults of syntax, and doing what they say.

Commands of schedulers are stood in for by scripts that note how they were called.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hpctrain.cli.job import command

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted(path for path in (ROOT / "jobs").iterdir() if path.suffix != ".md")
SHELL = [path for path in JOBS if path.suffix == ".sh"]
NEVER_RUN = {"slurm-gpu.sh", "pbs.sh", "lsf.sh", "flux.sh", "mpijob.yaml"}
RUNS = {"slurm-mpirun.sh": "mpirun", "slurm-srun.sh": "srun", "pbs.sh": "mpirun", "lsf.sh": "mpirun"}
RUNS |= {"flux.sh": "flux", "slurm-gpu.sh": "srun", "slurm-array-sweep.sh": "srun"}
AGAIN = {"pbs.sh": "qsub jobs/pbs.sh", "lsf.sh": "bsub", "flux.sh": "flux --parent batch jobs/flux.sh"}
named = pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
shell = pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)

# The fields of MPIJob kubeflow.org/v2beta1, and of the parts of a pod that the template uses: {} is any
# mapping, a type a value of it, a list a list of such, a tuple one of these values.
PODS = {
    "spec": {
        "terminationGracePeriodSeconds": int,
        "containers": [
            {
                "name": str,
                "image": str,
                "workingDir": str,
                "command": [str],
                "args": [str],
                "env": [{"name": str, "value": str}],
                "resources": {"limits": {}, "requests": {}},
                "volumeMounts": [{"name": str, "mountPath": str}],
            }
        ],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim": {"claimName": str},
                "emptyDir": {"medium": ("Memory",), "sizeLimit": str},
            }
        ],
    }
}
REPLICA = {"replicas": int, "restartPolicy": ("Never", "OnFailure"), "template": PODS}
MPI_JOB = {
    "apiVersion": ("kubeflow.org/v2beta1",),
    "kind": ("MPIJob",),
    "metadata": {"name": str, "namespace": str, "labels": {}},
    "spec": {
        "slotsPerWorker": int,
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "sshAuthMountPath": str,
        "runPolicy": {
            "cleanPodPolicy": ("None", "Running", "All"),
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
            "schedulingPolicy": {},
        },
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    },
}


def misfits(value: Any, schema: Any, where: str = "") -> list[str]:
    """Where a value is not what the schema says."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: not a mapping"]
        if not schema:
            return []
        wrong = [f"{where}.{key}: unknown" for key in value if key not in schema]
        return wrong + [
            each
            for key in value
            if key in schema
            for each in misfits(value[key], schema[key], f"{where}.{key}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [each for item in value for each in misfits(item, schema[0], f"{where}[]")]
    fits = value in schema if isinstance(schema, tuple) else type(value) is schema
    return [] if fits else [f"{where}: {value!r}"]


def rewritten(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command that a script names writes now."""
    (folder / "inputs").mkdir()
    shutil.copy(ROOT / "inputs/quickstart.toml", folder / "inputs")
    (folder / "jobs").mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/hpctrain").touch()
    line = next(line for line in path.read_text().splitlines() if line.startswith("# Written by: "))
    words = shlex.split(line.partition(": ")[2])
    assert words[:2] == ["hpctrain", "job"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    result = CliRunner().invoke(command, words[2:])
    assert result.exit_code == 0, result.output
    return (folder / f"jobs/{path.name}").read_text()


@named
def test_it_is_what_the_command_in_it_writes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the templates: run these commands with --force in the repository's folder."""
    assert path.read_text() == rewritten(path, tmp_path, monkeypatch)


@named
def test_it_says_whether_it_was_never_run(path: Path) -> None:
    assert ("# Never run on such a system" in path.read_text()) == (path.name in NEVER_RUN)
    assert path.read_text().count("ACCOUNT") == path.read_text().count("PARTITION") == 1


def test_all_are_there() -> None:
    assert {path.name for path in JOBS} == RUNS.keys() | {"mpijob.yaml"}


def checked(text: str) -> str:
    """What shellcheck says of a script."""
    program = Path(sys.executable).parent / "shellcheck"
    return subprocess.run([program, "-s", "bash", "-"], input=text, capture_output=True, text=True).stdout


@shell
def test_shellcheck_finds_nothing(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK)
    assert checked(path.read_text()) == ""
    assert "SC2086" in checked("#!/bin/bash\necho $1\n")


def test_the_kubernetes_job_has_the_operators_fields() -> None:
    path = ROOT / "jobs/mpijob.yaml"
    rules = "{extends: default, rules: {line-length: disable, comments-indentation: disable}}"
    linted = subprocess.run(
        [sys.executable, "-m", "yamllint", "-s", "-d", rules, path], capture_output=True, text=True
    )
    assert (linted.returncode, linted.stdout) == (0, "")
    job = yaml.safe_load(path.read_text())
    assert misfits(job, MPI_JOB) == []
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"] == 4
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    assert checked("#!/bin/bash\n" + launcher) == ""
    assert "mpirun -n 4 " in launcher
    job["spec"]["runPolicy"]["retries"] = 1
    assert misfits(job, MPI_JOB) == [".spec.runPolicy.retries: unknown"]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`start(path, launcher)` runs a script where commands note their calls, and the launcher is that."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def write(name: str, text: str) -> None:
        (programs / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{tmp_path}/calls"\n{text}\n')
        (programs / name).chmod(0o755)

    def run(path: Path, launcher: str, nodes: int = 2) -> subprocess.Popen[str]:
        (tmp_path / "jobs").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "jobs")
        for name in ("scontrol", "qsub", "bsub"):
            write(name, "")
        write("squeue", "echo 2030-01-01T00:00:00")
        write(RUNS[path.name], launcher)
        if path.name == "flux.sh":
            write("flux", f'if [ "$1" = run ]; then {launcher}\nfi')
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_ID": "17",
            "SLURM_ARRAY_TASK_ID": "2",
            "PBS_O_WORKDIR": str(tmp_path),
            "PBS_NODEFILE": "hosts",
            "LSB_DJOB_NUMPROC": str(2 * nodes),
        }
        return subprocess.Popen(
            ["bash", f"jobs/{path.name}"], cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE
        )

    return run


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def queued_again(folder: Path, path: Path) -> int:
    command = AGAIN.get(path.name, "scontrol requeue 17")
    return sum(line.strip() == command for line in calls(folder))


@shell
@pytest.mark.parametrize("code", [0, 2, 75, 143])
def test_it_goes_on_after_75_and_faults_alone(
    path: Path, code: int, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert start(path, f"exit {code}").wait(20) == code
    itself = path.name == "lsf.sh" and code == 75  # queued again by LSF, as it is told to
    assert queued_again(tmp_path, path) == (code in {75, 143} and not itself)
    assert '#BSUB -Q "75"\n' in path.read_text() or path.name != "lsf.sh"


@pytest.mark.parametrize("name", ["slurm-srun.sh", "pbs.sh"])
def test_faults_in_a_row_come_to_an_end(
    name: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = ROOT / "jobs" / name
    for code in (70, 70, 75, 70, 70, 70, 70, 70):
        assert start(path, f"exit {code}").wait(20) == code
    assert queued_again(tmp_path, path) == 8
    process = start(path, "exit 70")
    assert process.wait(20) == 70
    assert process.stderr is not None
    assert "not started again" in process.stderr.read()
    assert queued_again(tmp_path, path) == 8


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("name", ["slurm-mpirun.sh", "slurm-srun.sh", "lsf.sh"])
def test_it_takes_the_nodes_that_the_layout_fits(
    name: str, nodes: int, ranks: int, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert start(ROOT / "jobs" / name, "exit 0", nodes).wait(20) == 0
    (line,) = [line for line in calls(tmp_path) if line.startswith(f"{RUNS[name]} ")]
    assert f"-n {ranks} " in line or f"--ntasks={ranks} " in line
    assert " run inputs/quickstart.toml --resume --set batch.micro_size=4" in line


def test_a_task_of_the_sweep_has_settings_and_a_folder_of_its_own(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert start(ROOT / "jobs/slurm-array-sweep.sh", "exit 0", 1).wait(20) == 0
    (line,) = [line for line in calls(tmp_path) if line.startswith("srun ")]
    assert line.endswith(
        "--resume --set learning_rate.peak=4e-3 --set learning_rate.warmup=50 "
        "--set run.title=quickstart-2 --set run.dir=runs/quickstart-2"
    )


@pytest.mark.parametrize("name", ["slurm-mpirun.sh", "pbs.sh", "lsf.sh"])
def test_signals_reach_mpirun_whose_exit_code_still_counts(
    name: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The launcher notes USR1 and goes on, and ends with 75 at USR2."""
    notes = tmp_path / "signals"
    process = start(
        ROOT / "jobs" / name,
        f'trap "echo USR1 >>{notes}" USR1; trap "exit 75" USR2; echo ready >>{notes}\n'
        "while :; do sleep 0.05; done",
    )

    def noted(number: signal.Signals | None, lines: int) -> None:
        """Send the signal until so many notes are there; the first may come before bash has a trap."""
        deadline = time.monotonic() + 20
        while not notes.exists() or notes.read_text().count("\n") < lines:
            assert time.monotonic() < deadline
            assert process.poll() is None
            if number is not None:
                process.send_signal(number)
            time.sleep(0.2)

    noted(None, 1)
    noted(signal.SIGUSR1, 2)
    noted(signal.SIGUSR1, 3)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 75
