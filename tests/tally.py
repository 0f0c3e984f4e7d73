"""A pytest plug-in that writes every verdict into a file as it falls: what `tests/run.py` counts.

A run that a rank aborts prints no summary; the file still tells how far it came.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
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
            self.write(report.outcome)

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
            self.write("failed")

    def write(self, verdict: str) -> None:
        """One line."""
        together = self.config.pluginmanager.get_plugin("together")
        if together is None or together.rank == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{verdict}\n")


def count(path: Path) -> Counter[str]:
    """How many tests ended how, so far, and under "" how many there are that did not."""
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    verdicts = Counter(word for word in words if not word.startswith(EXPECTED))
    sizes = [int(word.removeprefix(EXPECTED)) for word in words if word.startswith(EXPECTED)]
    return verdicts + Counter({"": max(0, max(sizes, default=0) - verdicts.total())})


def pytest_configure(config: pytest.Config) -> None:
    """Begin, where somebody wants to know."""
    path = os.environ.get(VARIABLE, "")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(config, Path(path)), "tally")
