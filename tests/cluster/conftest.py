"""Fixtures of the tests on the virtual cluster, which only `pytest -m cluster` runs (`make cluster-test`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import ROOT, Cluster, missing
from tests.conftest import clean_environment

SCRIPTS = ("slurm-mpirun.sh", "slurm-srun.sh")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the cluster's tests out, unless -m asks for them by name."""
    if "cluster" in config.getoption("markexpr"):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("cluster")])
    items[:] = [item for item in items if not item.get_closest_marker("cluster")]


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """One cluster for all tests of the session, on a disk of its own that is removed at the end."""
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
    for output in sorted(running_cluster.folder.glob(f"{case_name(request)}/*.out")):
        print(f"--- {output.name}\n{output.read_text()[-6000:]}")
    for log in sorted(running_cluster.folder.glob("slurm*.log")):
        print(f"--- {log.name}\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def tokens(running_cluster: Cluster) -> Path:
    """A small token file on the shared disk."""
    path = running_cluster.folder / "tokens.h5"
    hpctrain("prepare", path, ROOT / "hpctrain" / "comm", cwd=running_cluster.folder)
    return path


@pytest.fixture
def project(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A user's folder on the shared disk: environment, decks, batch scripts, adapted to this cluster."""
    folder = cluster.folder / case_name(request)
    (folder / "jobs").mkdir(parents=True)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "inputs").symlink_to(ROOT / "inputs")
    for name in SCRIPTS:
        adapt(ROOT / "jobs" / name, folder / "jobs" / name)
    return folder


@pytest.fixture
def write_deck(project: Path, tokens: Path) -> Callable[..., Path]:
    """`write_deck(title, text="", **sections)`: a deck of the tiny model in the project's folder."""

    def write(title: str, base: Path | None = None, **sections: dict[str, Any]) -> Path:
        deck: dict[str, dict[str, Any]] = {} if base else {name: dict(keys) for name, keys in TINY.items()}
        for name, keys in {**sections, "data": {"tokens": str(tokens)}}.items():
            deck.setdefault(name, {}).update(keys)
        deck.setdefault("run", {}).update(title=title, dir=str(project / "runs" / title))
        text = f'include = "{base}"\n' if base else ""
        for name, keys in deck.items():
            text += f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())
        path = project / f"{title}.toml"
        path.write_text(text)
        return path

    return write


TINY: dict[str, dict[str, Any]] = {
    "run": {"steps": 8},
    "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 257},
    "batch": {"global_size": 8, "micro_size": 2, "sequence": 32},
    "learning_rate": {"peak": 1e-2, "warmup": 2},
    "checkpoint": {"every": 4},
}


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def case_name(request: pytest.FixtureRequest) -> str:
    """The folder of a test on the shared disk."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name).strip("-")


def adapt(script: Path, copy: Path) -> None:
    """Copy a batch script with the two lines that a user has to edit changed for this cluster."""
    lines = []
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH") and "--partition" in line:
            lines.append("#SBATCH --partition=all")
        elif not (line.startswith("#SBATCH") and "--account" in line):
            lines.append(line)
    copy.write_text("\n".join(lines) + "\n")


def hpctrain(*arguments: str | Path, cwd: Path) -> str:
    """Run a verb alone, outside the cluster; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
