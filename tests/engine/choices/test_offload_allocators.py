"""Whole runs with state or activations in files: faults of the disk, what stays behind, and memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import clean_environment, launcher
from tests.small_work import write_small_work

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


# Large enough for activations to leave (64 KiB each), those of more blocks than stay in memory.
ACTIVATIONS = (
    "memory.optimizer=device",
    "memory.activations=disk",
    "model.layers=4",
    "model.hidden=128",
    "batch.sequence=128",
)


@pytest.fixture
def work(tmp_path: Path, launch: Launch) -> Path:
    """A folder with a deck and its tokens."""
    write_small_work(
        tmp_path,
        run={"title": "offloaded", "steps": 100_000},
        model={"layers": 1},
        memory={"optimizer": "disk"},
        checkpoint={"every": 5},
    )
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    return tmp_path


def start(work: Path, python: list[str], *overrides: str) -> subprocess.Popen[str]:
    """A run of two ranks under way, with a first checkpoint."""
    sets = [part for override in overrides for part in ("--set", override)]
    process = subprocess.Popen(
        [*launcher(2), *python, "-m", "hpctrain", "run", "deck.toml", *sets],
        cwd=work,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list((work / "runs").glob("*/checkpoints/step-*.h5")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def files(work: Path) -> list[Path]:
    return sorted((work / "runs" / "offloaded" / "offload").glob("*/*"))


def complaint(code: int, told: str, expected: int) -> str:
    assert code == expected, told
    assert "Traceback" not in told
    said = [line for line in told.splitlines() if line.startswith("hpctrain: error: ")]
    assert len(said) == 1, told
    return said[0]


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, 64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("overrides", "name", "fault", "words"),
    [
        ((), "optimizer", remove, "was removed"),
        (("layout.zero=3", "memory.parameters=disk"), "parameters", shorten, "was truncated"),
        (ACTIVATIONS, "activations", remove, "was removed"),
        (ACTIVATIONS, "activations", shorten, "was truncated"),
    ],
    ids=["optimizer", "parameters", "activations removed", "activations cut short"],
)
def test_a_file_that_fails_ends_the_run_on_all_ranks_with_the_last_checkpoint_good(
    work: Path,
    launch: Launch,
    python: list[str],
    overrides: tuple[str, ...],
    name: str,
    fault: Callable[[Path], None],
    words: str,
) -> None:
    process = start(work, python, *overrides)
    victim = next(path for path in files(work) if "-rank1-" in str(path) and path.name.startswith(name))
    fault(victim)
    _, told = process.communicate(timeout=60)
    said = complaint(process.returncode, told, 3)
    assert str(victim.relative_to(work)) in said
    assert words in said
    assert not [path for path in files(work) if "-rank1-" in str(path)]
    steps = len((work / "runs" / "offloaded" / "metrics.jsonl").read_text().splitlines())
    done = launch(2, "-m", "hpctrain", "resume", "runs/offloaded", "--set", f"run.steps={steps + 1}")
    assert done.returncode == 0, done.stderr
    assert not files(work)


FULL = """
import os, resource, sys
from hpctrain.cli.main import main
from hpctrain.train.step import Step

steps = 0
call = Step.__call__

def full(self, *arguments):
    global steps
    steps += 1
    if steps == 8 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    return call(self, *arguments)

Step.__call__ = full
sys.argv = ["hpctrain", "run", "deck.toml", *sys.argv[1:]]
main()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("overrides", "name"),
    [((), "optimizer"), (ACTIVATIONS, "activations")],
    ids=["optimizer", "activations"],
)
def test_a_disk_that_fills(work: Path, launch: Launch, overrides: tuple[str, ...], name: str) -> None:
    """One rank may write no more from the eighth step on, after the checkpoint of the fifth."""
    (work / "full.py").write_text(FULL)
    done = launch(2, "full.py", *(part for override in overrides for part in ("--set", override)))
    said = complaint(done.returncode, done.stderr, 3)
    assert re.search(rf"-rank1-\w+/{name}-0: .* cannot be written: File too large", said)
    done = launch(2, "-m", "hpctrain", "resume", "runs/offloaded", "--set", "run.steps=7")
    assert done.returncode == 0, done.stderr
    assert "step-00000005.h5 at step 5" in done.stdout


def test_folders_that_cannot_be_used(work: Path, launch: Launch) -> None:
    """Told before anything is made, once for all ranks."""
    (work / "file").write_text("")
    done = launch(2, "-m", "hpctrain", "run", "deck.toml", "--set", "memory.offload_dir=file/offload")
    assert "file: Not a directory" in complaint(done.returncode, done.stderr, 2)
    done = launch(2, "-m", "hpctrain", "run", "deck.toml", "--set", "memory.offload_dir=/proc/not/here")
    assert "/proc/not/here: offloading requires" in complaint(done.returncode, done.stderr, 2)
    small = Path("/dev/shm")
    if small.is_dir():
        free = os.statvfs(small)
        # 4 bytes x 2 moments x 2 tables of 2^20 rows of `hidden`: more than there is.
        hidden = -(-free.f_bavail * free.f_frsize // (8 << 20) // 16) * 16
        folder = f"memory.offload_dir={small}/hpctrain-test-{os.getpid()}"
        sizes = (f"model.hidden={hidden}", f"model.vocabulary={1 << 20}", "machine.memory=1 TB")
        sets = [part for size in (folder, *sizes) for part in ("--set", size)]
        done = launch(2, "-m", "hpctrain", "run", "deck.toml", *sets)
        said = complaint(done.returncode, done.stderr, 2)
        assert "offloading requires" in said
        assert "free" in said
    assert not (work / "runs").exists()


def test_files_of_a_run_that_was_killed_go_at_the_next_start(
    work: Path, launch: Launch, python: list[str]
) -> None:
    process = start(work, python, *ACTIVATIONS, "memory.optimizer=disk")
    left = files(work)
    kinds = {(path.parent.name.split("-rank")[1][0], path.name.split("-")[0]) for path in left}
    assert kinds == {(rank, kind) for rank in "01" for kind in ("optimizer", "activations")}
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    # The ranks are sessions of their own: they end when they miss their launcher.
    processes = {path.parent.name.split("-rank")[0].split("-")[-2] for path in left}
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all(path.exists() for path in left)
    steps = len((work / "runs" / "offloaded" / "metrics.jsonl").read_text().splitlines())
    done = launch(2, "-m", "hpctrain", "resume", "runs/offloaded", "--set", f"run.steps={steps + 1}")
    assert done.returncode == 0, done.stderr
    assert not files(work)


# One rank, half precision: 2 + 4 bytes a parameter in memory, 12 in files. Memory that is written to is
# limited to what the process has before it builds the model and 11 bytes a parameter. Of the 5 that are left,
# buffers whose size is not the model's (offloading, checkpoints, threads) take about 3 in a model of
# this size; in a smaller one they may take all.
LIMITED = """
import re, resource, sys
import torch
from hpctrain.cli.main import main
from hpctrain.plan import engine

parameters = int(sys.argv[1])
build = engine.assemble

def limited(*arguments):
    have = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (have + 11 * parameters, resource.RLIM_INFINITY))
    return build(*arguments)

engine.assemble = limited
sys.argv = ["hpctrain", "run", "deck.toml", *sys.argv[2:]]
main()
"""


def test_a_model_trains_with_more_optimizer_state_than_it_has_memory(work: Path, launch: Launch) -> None:
    (work / "limited.py").write_text(LIMITED)
    keys = {
        "run.steps": 2,
        "model.family": "llama",
        "model.hidden": 512,
        "model.vocabulary": 70_000,
        "batch.global_size": 1,
        "precision.compute": "bf16",
        "memory.offload_buffer": "16 MB",
        "data.validation": 0,
        "checkpoint.every": 2,
        "checkpoint.buffer": "16 MB",
    }
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    arguments = ("limited.py", "75_000_000", *sets)
    done = launch(0, *arguments, "--set", "memory.optimizer=device", timeout=120, cold=True)
    assert done.returncode != 0
    assert "memory" in done.stderr.lower()
    subprocess.run(["rm", "-rf", work / "runs"], check=True)
    done = launch(0, *arguments, timeout=120, cold=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"optimizer state \(90\d MB per rank\) in runs/offloaded/offload", done.stdout)
