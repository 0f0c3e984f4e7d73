"""Fixtures of all tests; `tests/mpi_plugin.py` keeps the ranks of a run under mpirun together."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.launch import ROOT, clean_environment, launcher
from tests.selection import SEED, left_out_cases, repeat_command, seed, takes_all_cases
from tests.warm import FOREIGN, Server

if TYPE_CHECKING:
    from hpctrain.comm.world import World

# One thread a rank: tests share few cores, and sums must not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What `nohup` or a script's `&` ignores, runs ignore too; here they are to heed it.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# Nothing a test does may ask a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(ROOT))
pytest_plugins = ["tests.mpi_plugin"]

# What only a run that names it in -m starts.
ON_DEMAND = ("cluster", "slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests that -m must ask for by name."""
    for name in ON_DEMAND:
        if name not in config.getoption("markexpr"):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(name)])
            items[:] = [item for item in items if not item.get_closest_marker(name)]
    if not takes_all_cases(config):
        left_out = set(left_out_cases(items))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str:
    """Return the seed of the selection, which is printed at the start of every run."""
    return f"selection of cases: {SEED}={seed()} (the commit, unless it is set)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell with every failure how the same case is run again."""
    report = yield
    if report.failed:
        together = item.config.pluginmanager.get_plugin("together")
        command = repeat_command(item, together.size if together else None)
        report.sections.append(("run it again", f"{command}\n{SEED}={seed()}"))
    return report


def pytest_collection_finish() -> None:
    """Put aside what is loaded by now: each run of a test collects garbage, and would look through it all.

    A run's own freezing and unfreezing would undo that.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="session")
def world() -> World:
    """This rank's World, one object for all tests; on the CPU unless HPCTRAIN_TEST_DEVICE says otherwise."""
    from hpctrain.comm.world import World

    return World.start(os.environ.get("HPCTRAIN_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told has no width to keep to, whatever runs the tests, unless a test gives it one."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are planned as fresh processes, whatever earlier tests have left in the memory of this one."""
    monkeypatch.setattr("hpctrain.plan.libraries.resident_bytes", lambda: 300 << 20)


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models have blocks of two kinds."""
    from hpctrain.costs import layer_flops
    from hpctrain.model import transformer
    from hpctrain.model.construction import layer_kinds
    from hpctrain.model.count import count
    from tests import two_kinds

    monkeypatch.setattr(transformer, "TransformerBlock", two_kinds.block)
    cached = (
        count,
        layer_kinds,
        layer_flops.model_flops,
        layer_flops._count_flops,
        layer_flops._cached_layer_flops,
    )
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.fixture
def mpi_tmp_path(tmp_path: Path, world: World) -> Path:
    """A fresh folder that all ranks share, made by rank 0."""
    return world.communicator.bcast(tmp_path)


@pytest.fixture(scope="session")
def warm() -> Iterator[Server]:
    """What starts programs without loading again what they all load."""
    server = Server(*FOREIGN)
    yield server
    server.close()


@pytest.fixture
def python(warm: Server) -> list[str]:
    """What stands for `python` in commands of a test's own."""
    return warm.command(clean_environment())


@pytest.fixture
def launch(tmp_path: Path, warm: Server) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`launch(ranks, *arguments, timeout=60, cwd=tmp_path, ...)`: `python *arguments` with `**environment`.

    Under mpirun with `ranks` ranks, or without mpirun where `ranks` is 0; for tests without the mpi mark.
    Where it matters what is imported when, how much memory it takes, or which launcher hands on what it
    prints, it has to be started `cold`; where it matters how the process ends, with its `own_end`.
    Returns the CompletedProcess with its text; when the time is up the job is killed and the test fails.
    """

    def run(
        ranks: int,
        *arguments: str | Path,
        timeout: float = 60.0,
        cwd: Path = tmp_path,
        cold: bool = False,
        own_end: bool = False,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        cold |= any(name.startswith(("PYTHON", "MALLOC")) for name in environment)
        python = [sys.executable] if cold else warm.command(clean_environment(), own_end)
        command = [*(launcher(ranks) if ranks else []), *python, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            pytest.fail(f"not done after {timeout} s: {shlex.join(command)}\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run
