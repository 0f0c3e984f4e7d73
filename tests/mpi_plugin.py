"""Keeps the ranks of one pytest run under mpirun together.

After each phase (setup, call, teardown) of each test all ranks meet in a non-blocking barrier on a
communicator of their own. When they all arrive they share their verdicts, so that every rank reports the
same outcome and goes on to the same next test. A rank whose test failed waits only briefly for the others,
which may hang in a call that it never made: then it prints its traceback and aborts the whole run.
A rank that dies takes the run with it (mpirun sees to that, and names the rank).
Ranks above 0 print nothing but such a last word.

Tests that are not for so many ranks are left out (`tests/selection.py`).

Several runs can share the tests: each begins those that none has begun, and creates a file for each in the
folder that CLAIMS names.
"""

from __future__ import annotations

import faulthandler
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.selection import RankSelection

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

#: Seconds that a failed rank waits for the others before it ends the run.
GRACE = 3.0
#: Seconds that a rank waits for the others to collect the same tests.
COLLECTION_GRACE = 60.0
FAILED_RUN = 70
#: Environment variable: a folder, and ":1/2" for the second of two runs, which begins in the middle.
CLAIMS = "HPCTRAIN_TEST_CLAIMS"


class Together:
    """The plug-in proper: one object per rank."""

    def __init__(self, config: pytest.Config, communicator: Intracomm) -> None:
        """Take over `communicator`, of which nobody else may make use."""
        self.config = config
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.selection = RankSelection.of(self.size, config)
        # mpirun ends the ranks with SIGTERM when one has died: show what this one was waiting for.
        self.last_word = os.dup(2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """All ranks must have collected the same tests; then those that are shared with other runs."""
        mine = (session.testsfailed, [item.nodeid for item in session.items])
        if not self.meet(COLLECTION_GRACE):
            self.end(f"waited {COLLECTION_GRACE:.0f} s for the other ranks to collect the tests")
        others = self.communicator.allgather(mine)
        if any(other != mine for other in others):
            self.end(f"the ranks collected different tests: {[len(items) for _, items in others]} tests each")
        if CLAIMS not in os.environ or session.testsfailed:
            return None
        for item, following in pairwise(chain(self.claimed(session.items), [None])):
            assert item is not None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        return True

    def claimed(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        """The tests that this run is the first to begin."""
        folder, _, share = os.environ[CLAIMS].rpartition(":")
        side, sides = map(int, share.split("/"))
        first = side * len(items) // sides
        for number in (*range(first, len(items)), *range(first)):
            ours = False
            if self.rank == 0:
                with suppress(FileExistsError):
                    Path(folder, str(number)).touch(exist_ok=False)
                    ours = True
            if self.communicator.bcast(ours):
                yield items[number]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """After each phase of each test: meet, then make the report the same on all ranks."""
        report = yield
        if not self.meet(GRACE if report.failed else None):
            self.end(f"{item.nodeid} failed in {report.when}", report.longreprtext)
        words = self.communicator.allgather((report.outcome, report.longreprtext if report.failed else ""))
        outcomes = [outcome for outcome, _ in words]
        if "failed" in outcomes:
            self.tell(
                report, {rank: text for rank, (outcome, text) in enumerate(words) if outcome == "failed"}
            )
        elif len(set(outcomes)) > 1:
            report.outcome = "failed"
            report.longrepr = f"the ranks disagree: {dict(enumerate(outcomes))}"
        return report

    def tell(self, report: pytest.TestReport, failures: dict[int, str]) -> None:
        """Make `report` a failed one that shows each distinct message of the ranks in `failures` once."""
        report.outcome = "failed"
        shown: dict[str, list[int]] = {}
        for rank, text in failures.items():
            shown.setdefault(text.rstrip().rpartition("\n")[2], []).append(rank)
        parts = [f"on ranks {ranks} of {self.size}:\n{failures[ranks[0]]}" for ranks in shown.values()]
        report.longrepr = "\n\n".join(parts)
        if hasattr(report, "wasxfail"):
            del report.wasxfail

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Skip a file with no test for this number of ranks: importing it would take seconds."""
        named = {Path(argument.partition("::")[0]).resolve() for argument in self.config.args}
        if not collection_path.match("test_*.py") or collection_path in named:
            return None
        return None if self.selection.takes_file(collection_path) else True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that do not run on this number of ranks."""
        chosen = [item for item in items if self.selection.takes_item(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Before each test: show the stack on SIGTERM again, for which a run in a test before may have had a
        handler of its own."""
        if self.rank == 0:
            faulthandler.unregister(signal.SIGTERM)
            faulthandler.register(signal.SIGTERM, file=self.last_word, all_threads=False, chain=True)

    def meet(self, patience: float | None) -> bool:
        """Whether all ranks came within `patience` seconds; None waits for ever."""
        request = self.communicator.Ibarrier()
        deadline = None if patience is None else time.monotonic() + patience
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        return True

    def end(self, sentence: str, traceback: str = "") -> None:
        """Print the last word of this rank past all capturing and abort the run."""
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        print(
            f"\n\nrank {self.rank} of {self.size}: {sentence}\n{traceback}", file=sys.__stderr__, flush=True
        )
        sys.stdout.flush()
        self.communicator.Abort(FAILED_RUN)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start on every rank of a run with --with-mpi; silence the ranks above 0."""
    if not config.getoption("--with-mpi"):
        return
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # runs no test itself: its workers do, each a world of one rank
    from hpctrain.host.mpi_library import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    communicator = MPI.COMM_WORLD.Dup()
    config.pluginmanager.register(Together(config, communicator), "together")
    if communicator.rank > 0:
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
        # Of temporary folders that they share, all ranks would remove the same dead links at the end.
        own = tempfile.mkdtemp(prefix="pytest-rank-")
        os.environ["PYTEST_DEBUG_TEMPROOT"] = own
        config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End MPI where a test or this plug-in started it; all ranks wait here until rank 0 has printed all."""
    sys.stdout.flush()
    if "mpi4py.MPI" in sys.modules:
        from hpctrain.host.mpi_library import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
