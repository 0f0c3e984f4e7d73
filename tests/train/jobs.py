"""Real jobs of two ranks that are killed and sent signals, and started again in the same run folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report.metric_rows import read_metrics
from tests.launch import clean_environment, launcher
from tests.train.test_run import DECK, contents

RANKS = 2
PATIENCE = 240.0
"""Seconds for whatever a job does, on a busy machine."""

KEYS = {"model.layers": "1", "model.hidden": "16", "run.evaluate_every": "0", "run.dir": "run"}
HEEDS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP)


def arguments(keys: Mapping[str, str]) -> list[str]:
    return [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]


class Jobs:
    """The jobs of one run, one after the other, in `folder`/run."""

    def __init__(
        self, folder: Path, launch: Callable[..., subprocess.CompletedProcess[str]], **keys: str
    ) -> None:
        self.folder, self.run, self.launch = folder, folder / "run", launch
        self.keys = KEYS | {name.replace("__", "."): value for name, value in keys.items()}
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        (folder / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
        assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0

    def command(self, **keys: str) -> list[str]:
        changes = self.keys | {name.replace("__", "."): value for name, value in keys.items()}
        return ["-m", "hpctrain", "run", "small.toml", "--resume", *arguments(changes)]

    def start(self) -> Job:
        """A job that goes on with the run, or begins it, and has more to do than it will come to."""
        return Job(self, self.command(run__steps="1000000"))

    def finish(self, steps: int) -> None:
        """A job that ends the run after `steps` steps."""
        done = self.launch(RANKS, *self.command(run__steps=str(steps)), timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr

    def uninterrupted(self, steps: int) -> Path:
        """The folder of another run, of one job alone, with all of its checkpoints."""
        keys = {"run__dir": "whole", "run__steps": str(steps), "checkpoint__keep": "100000"}
        done = self.launch(RANKS, *self.command(**keys), timeout=PATIENCE + steps)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.folder / "whole" / "checkpoints"

    @property
    def checkpoints(self) -> list[Path]:
        """What counts as one by its name, the newest last."""
        return sorted((self.run / "checkpoints").glob("step-*.h5"))

    @property
    def steps(self) -> int:
        """Steps that were written down."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def writing(self) -> list[Path]:
        """Checkpoints that are not complete."""
        return list((self.run / "checkpoints").glob(".*.tmp"))

    def leftovers(self) -> list[str]:
        """Files of the run's folder that have a temporary name."""
        return [str(path) for path in self.run.rglob("*") if ".tmp" in path.name]


class Job:
    """One of them while it runs."""

    def __init__(self, jobs: Jobs, command: list[str]) -> None:
        self.jobs = jobs
        self.output = (jobs.folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [*launcher(RANKS), sys.executable, *command],
            cwd=jobs.folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for rank in self.ranks:
                kill(rank, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.output.close()

    @property
    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    @property
    def ranks(self) -> list[int]:
        """Processes of the ranks that are there, by their numbers."""
        found: dict[int, int] = {}
        ancestors = {self.process.pid}
        for pid in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent not in ancestors:
                    continue
                ancestors.add(pid)
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            for variable in variables:
                name, _, value = variable.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    found[int(value)] = pid
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, what: Callable[[], Any], fine: bool = True) -> None:
        """Return when it has come true, or the job has ended."""
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and not what():
            if time.monotonic() > until:
                pytest.fail(f"waited {PATIENCE} s in vain\n{self.text}")
            time.sleep(0.001 if fine else 0.02)

    def wait(self) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"hangs\n{self.text}")

    def heeds(self) -> bool:
        """Whether all ranks run, and each has handlers of its own for the signals of a run."""
        ranks = self.ranks
        return len(ranks) == RANKS and all(map(heeding, ranks))

    def reach(self, stage: str, draw: random.Random) -> None:
        """Wait until the job has come to a stage, somewhere within it."""
        jobs = self.jobs
        begun, known = jobs.steps, set(jobs.checkpoints)
        self.wait_for(lambda: len(self.ranks) == RANKS, fine=False)
        match stage:
            case "loading":
                time.sleep(draw.uniform(0.0, 2.0))
            case "training":
                more = draw.randrange(1, 6)
                self.wait_for(lambda: jobs.steps >= begun + more)
                time.sleep(draw.uniform(0.0, 0.03))
            case "writing":
                skipped = draw.randrange(3)
                self.wait_for(lambda: len(set(jobs.checkpoints) - known) >= skipped)
                self.wait_for(lambda: jobs.writing)
                time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.02))))
            case "written":
                self.wait_for(lambda: set(jobs.checkpoints) - known)
                time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.01))))


STAGES = ("training", "writing", "written", "writing", "loading")


def heeding(pid: int) -> bool:
    """Whether a process has handlers for the signals of a run."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")), 0)
    return all(caught >> (number - 1) & 1 for number in HEEDS)


def kill(pid: int, number: signal.Signals) -> bool:
    """Whether the process was still there to get the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits of parameters, master weights and moments."""
    mine, theirs = contents(one), contents(other)
    return mine.keys() == theirs.keys() and all(v.tobytes() == theirs[k].tobytes() for k, v in mine.items())


def losses(folder: Path) -> list[float]:
    """Those of all steps of a run, each told once, in order."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]
