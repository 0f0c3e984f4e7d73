"""Fixtures of the tests on the virtual cluster, which only `pytest -m cluster` runs (`make cluster-test`).

They wait more than they compute: three processes of pytest share them, each with a cluster of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import ROOT, Cluster, missing
from tests.launch import clean_environment

#: Small, but slow enough that something can happen to it: a step takes about a tenth of a second.
STEPS = 30
STEADY = f"""
[run]
title = "steady"
steps = {STEPS}
[model]
family = "llama"
layers = 2
hidden = 64
heads = 4
[data]
tokens = "runs/quickstart-data/tokens.h5"
[batch]
global_size = 16
micro_size = 4
sequence = 128
[learning_rate]
peak = 1e-3
warmup = 10
[checkpoint]
every = 5
"""


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """One cluster for all tests of this process, on a disk of its own that is removed at the end."""
    why = missing()
    if why is not None:
        pytest.skip(f"the virtual cluster {why}")
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-cluster-"))
    try:
        with Cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster with all nodes idle; what a failed test's jobs printed is shown."""
    running_cluster.repair()
    yield running_cluster
    for output in sorted((running_cluster.folder / case_name(request)).glob("*.out")):
        print(f"--- {output.name}\n{output.read_text()[-6000:]}")
    for log in sorted(running_cluster.folder.glob("slurm*.log")):
        print(f"--- {log.name}\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def tokens(running_cluster: Cluster) -> Path:
    """A small token file on the shared disk."""
    path = running_cluster.folder / "tokens.h5"
    hpctrain("prepare", path, ROOT / "hpctrain" / "comm", cwd=running_cluster.folder)
    return path


@pytest.fixture(scope="session")
def make_project(running_cluster: Cluster, tokens: Path) -> Callable[[str], Path]:
    """`make_project(name)`: a user's folder on the shared disk, with environment, decks and tokens."""

    def make(name: str) -> Path:
        project = running_cluster.folder / name
        (project / "runs" / "quickstart-data").mkdir(parents=True)
        (project / "runs" / "quickstart-data" / "tokens.h5").symlink_to(tokens)
        (project / ".venv").symlink_to(sys.prefix)
        (project / "inputs").symlink_to(ROOT / "inputs")
        (project / "steady.toml").write_text(STEADY)
        return project

    return make


@pytest.fixture
def project(cluster: Cluster, make_project: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """The folder of one test's user."""
    return make_project(case_name(request))


@pytest.fixture(scope="session")
def alone(make_project: Callable[[str], Path]) -> Callable[..., Path]:
    """`alone("deck.toml", "run.steps=4", ...)`: the folder of that run by one rank, undisturbed."""
    project = make_project("alone")
    done: dict[tuple[str, ...], Path] = {}

    def run(deck: str, *settings: str) -> Path:
        asked = (deck, *settings)
        if asked not in done:
            folder = project / f"run-{len(done)}"
            words = [word for setting in (*settings, f"run.dir={folder}") for word in ("--set", setting)]
            hpctrain("run", deck, *words, "--fresh", cwd=project)
            done[asked] = folder
        return done[asked]

    return run


@pytest.fixture
def script(project: Path) -> Callable[..., Path]:
    """`script(name, "deck.toml", "run.steps=4", ...)`: the batch script of jobs/, edited as a user would.

    Account and partition are this cluster's, the deck and what is set in it are those given.
    """

    def edit(name: str, deck: str, *settings: str) -> Path:
        text = (ROOT / "jobs" / name).read_text()
        words = " ".join(f"--set {setting}" for setting in settings)
        for pattern, line in (
            ("#SBATCH --account=.*\n", ""),
            ("#SBATCH --partition=.*", "#SBATCH --partition=all"),
            ("deck=.*", f"deck={deck}"),
            (r"settings=\((.*)\)", rf"settings=(\1 {words})"),
        ):
            text, count = re.subn(f"^{pattern}", line, text, flags=re.MULTILINE)
            assert count == 1, f"{name} has {count} lines that match {pattern}"
        path = project / name
        path.write_text(text)
        return path

    return edit


def case_name(request: pytest.FixtureRequest) -> str:
    """The folder of a test on the shared disk."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name).strip("-")


def hpctrain(*arguments: str | Path, cwd: Path) -> str:
    """Run a verb alone, outside the cluster; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
