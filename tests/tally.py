"""A pytest plug-in that writes every verdict, with seconds and id, into a file for `tests/run.py`.

A run that a rank aborts prints no summary; the file still tells how far it came.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

VARIABLE = "HPCTRAIN_TEST_TALLY"
KINDS = ("passed", "failed", "skipped")
EXPECTED = "expected:"
"""Before the number of tests that a run will begin."""


class Tally:
    """Writes on the process that reports: rank 0, and not on workers of pytest-xdist."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's verdict is that of its call; setup and teardown count where they fail or skip."""
        if report.when == "call" or report.outcome != "passed":
            self.write(f"{report.outcome} {report.duration:.3f} {report.nodeid}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """So many verdicts have to come."""
        if session.items:
            self.write(f"{EXPECTED}{len(session.items)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """The same, of workers."""
        self.write(f"{EXPECTED}{len(ids)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected counts as a failure."""
        if report.outcome == "failed":
            self.write(f"failed 0 {report.nodeid}")

    def write(self, line: str) -> None:
        """Append a line."""
        together = self.config.pluginmanager.get_plugin("together")
        if together is None or together.rank == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def count(path: Path) -> Counter[str]:
    """Return how many tests ended how so far, and under "" how many have not ended."""
    lines = _lines(path)
    verdicts = Counter(line.split()[0] for line in lines if not line.startswith(EXPECTED))
    sizes = [int(line.removeprefix(EXPECTED)) for line in lines if line.startswith(EXPECTED)]
    return verdicts + Counter({"": max(0, max(sizes, default=0) - verdicts.total())})


def durations(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the id of each case that passed so far, and its seconds."""
    for line in _lines(path):
        if line.startswith("passed "):
            _, seconds, case = line.split(" ", 2)
            yield case, float(seconds)


def _lines(path: Path) -> list[str]:
    """Return the lines written so far."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def pytest_configure(config: pytest.Config) -> None:
    """Begin, where somebody wants to know."""
    path = os.environ.get(VARIABLE, "")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(config, Path(path)), "tally")
