"""hpctrain doctor: sees what is there, survives what is not.

Tests of cli/doctor.py and host/doctor.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli.doctor import spans

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def broken(folder: Path, package: str) -> dict[str, str]:
    """An environment in which `import package` fails."""
    place = folder / "broken" / package
    place.mkdir(parents=True)
    (place / "__init__.py").write_text('raise ImportError("it is broken")\n')
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{place.parent}:{root}"}


def test_alone(launch: Launch) -> None:
    done = launch(0, "-m", "hpctrain", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for topic in (
        "MPI",
        "thread level",
        "launcher",
        "HDF5",
        "parallel file",
        "torch",
        "GPUs",
        "NCCL",
        "Slurm",
    ):
        assert topic in done.stdout
    assert "1 rank on 1 node" in done.stdout
    assert "slower than bf16: tensor, delayed, row, block, mx" in done.stdout
    assert "A run can start here." in done.stdout


def test_report_has_what_a_maintainer_needs_and_no_secrets(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    variables = {"OMPI_MCA_btl": "self,vader", "SLURM_JOB_TOKEN": "hidden", "HOME_ADDRESS": "hidden"}
    done = launch(0, "-m", "hpctrain", "doctor", "--report", str(path), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{path}: read it before you send it" in done.stdout
    text = path.read_text()
    for expected in (
        "== Findings\n",
        "A run can start here.",
        "== Packages\n",
        "torch 2.",
        "OMPI_MCA_btl=self,vader",
    ):
        assert expected in text
    assert "hidden" not in text
    assert "\033" not in text


def test_ranks_are_mapped_and_printed_once(launch: Launch, tmp_path: Path) -> None:
    # Nothing needs room for MPI's windows of several ranks, as in a container whose /dev/shm is full.
    room = {"OMPI_MCA_osc_sm_backing_directory": str(tmp_path / "nowhere")}
    done = launch(2, "-m", "hpctrain", "doctor", **room)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks see each other's memory" in done.stdout
    assert done.stdout.count("2 ranks on 1 node") == 1
    assert "written and read back by all ranks" in done.stdout
    assert done.stdout.count("A run can start here.") == 1


def test_a_deck_is_mapped_on_the_ranks(launch: Launch) -> None:
    deck = Path(__file__).resolve().parents[2] / "inputs/quickstart.toml"
    done = launch(2, "-m", "hpctrain", "doctor", "--deck", deck, "--set", "layout.tensor=2", cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout  # though mpirun gives its ranks pseudo-terminals
    lines = done.stdout.splitlines()
    heads = next(line for line in lines if line.startswith("rank "))
    rows = [line.split() for line in lines if line[:2] in {"0 ", "1 "}]
    assert heads.split()[-4:] == ["pipeline", "data", "context", "tensor"]
    assert [row[-4:] for row in rows] == [["0", "0", "0", "0"], ["0", "0", "0", "1"]]
    unfit = launch(2, "-m", "hpctrain", "doctor", "--deck", deck, "--set", "layout.tensor=3")
    assert unfit.returncode == 1
    assert "layout.tensor=3" in unfit.stdout
    assert "must divide the number of ranks, 2" in unfit.stdout


@pytest.mark.parametrize("package", ["mpi4py", "h5py", "torch", "rich"])
def test_a_broken_package_is_a_finding(launch: Launch, tmp_path: Path, package: str) -> None:
    done = launch(0, "-m", "hpctrain", "doctor", **broken(tmp_path, package))
    assert "Traceback" not in done.stderr
    if package == "rich":  # only the tables need it
        assert done.returncode == 0
    else:
        assert done.returncode == 1
        assert "it is broken" in done.stdout
        assert "make install" in done.stdout
        assert "A run could not start here." in done.stdout


UNUSABLE = """
from hpctrain.host import device
device.unusable_gpus = lambda: "the driver is too old; update it"
from hpctrain.cli.doctor import command; command()
"""


def test_a_gpu_that_torch_cannot_use_is_fatal(launch: Launch) -> None:
    done = launch(0, "-c", UNUSABLE, COLUMNS="200")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: GPUs: the driver is too old. What to do: update it.\n" in done.stdout
    assert "A run could not start here." in done.stdout


def test_a_broken_package_on_two_ranks_is_told_once(launch: Launch, tmp_path: Path) -> None:
    done = launch(2, "-m", "hpctrain", "doctor", **broken(tmp_path, "h5py"))
    assert done.returncode == 1
    assert done.stdout.count("A run could not start here.") == 1


def test_processes_of_a_foreign_launcher_are_noticed(launch: Launch) -> None:
    """What srun without the right --mpi does: several processes, each a world of one."""
    done = launch(
        0, "-m", "hpctrain", "doctor", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_ID="0", SLURM_PROCID="0"
    )
    assert done.returncode == 1
    assert "srun (Slurm) started 4 processes, but MPI sees 1" in done.stdout


def test_stress_tells_nodes_and_rates(launch: Launch, tmp_path: Path) -> None:
    rates = tmp_path / "rates.jsonl"
    (tmp_path / "disk").mkdir()
    options = ("--stress", "1 s", "--stress-dir", tmp_path / "disk", "--rates", rates)
    done = launch(2, "-m", "hpctrain", "doctor", *options, timeout=120, COLUMNS="300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A run can start here." in done.stdout
    assert done.stdout.count("of 1 s: ") >= 1
    heads = next(line for line in done.stdout.splitlines() if line.startswith("node "))
    assert heads.split()[:2] == ["node", "ranks"]
    assert "disk read" in heads
    assert "The stress test of 2 ranks on 1 node took" in done.stdout
    assert "all results are correct" in done.stdout
    assert list((tmp_path / "disk").iterdir()) == []
    assert not rates.exists()  # of so short a test


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--stress", "0"), "--stress 0: must be more than 0 seconds, and at most 30 days"),
        (("--stress", "-1"), '--stress: "-1" is not a time'),
        (("--stress", "nan"), '--stress: "nan" is not a time'),
        (("--stress", "31 d"), "--stress 31 d: must be more than 0 seconds, and at most 30 days"),
        (("--rates", "file"), "--rates requires --stress SECONDS"),
        (("--stress-dir", "."), "--stress-dir requires --stress SECONDS"),
        (("--stress", "1", "--stress-dir", "nowhere"), "--stress-dir nowhere: does not exist on "),
        (("--stress", "1", "--rates", "nowhere/file"), "--rates nowhere/file: cannot be written"),
    ],
)
def test_bad_wishes_of_stress_are_one_sentence(
    launch: Launch, options: tuple[str, ...], sentence: str
) -> None:
    done = launch(0, "-m", "hpctrain", "doctor", *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"hpctrain: error: {sentence}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_spans() -> None:
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert spans(()) == "unknown"
