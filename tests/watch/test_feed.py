"""Writers that fail, lag or hang cost a run nothing but one warning."""

from __future__ import annotations

import threading
import time

import pytest

from hpctrain.report.metric_rows import Row
from hpctrain.watch import feed as module
from hpctrain.watch.feed import Feed


class Kept:
    """A writer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.abandoned = False

    def write(self, row: Row, now: float) -> None:
        self.told.append(row["step"])

    def roll_back(self, step: int) -> None:
        self.told.append(("back", step))

    def close(self, completed: bool) -> None:
        self.told.append("done" if completed else "failed")

    def abandon(self) -> None:
        self.abandoned = True


class Stuck(Kept):
    """One that hangs at its second row, until it is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, row: Row, now: float) -> None:
        super().write(row, now)
        if row["step"] == 2:
            self.free.wait(60)

    def abandon(self) -> None:
        super().abandon()
        self.free.set()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def test_a_writer_is_told_all_in_its_order() -> None:
    writer = Kept()
    feed = Feed("report.x", lambda: writer)
    for step in (1, 2, 3):
        feed.write({"step": step})
    feed.roll_back(1)
    feed.write({"step": 2})
    feed.end(completed=True)
    feed.close(30)
    assert writer.told == [1, 2, 3, ("back", 1), 2, "done"]
    assert not feed.is_dropped


@pytest.mark.parametrize("where", ["make", "write", "roll_back", "close"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no such\nthing"), "fails: ValueError: no such thing"),
        (
            OSError(28, "No space left on device", "/x/metrics.csv"),
            "No space left on device (/x/metrics.csv)",
        ),
        (SystemExit(3), "fails: SystemExit: 3"),
        (ImportError("gone"), "fails: ImportError: gone"),
    ],
)
def test_one_that_raises_is_given_up_with_one_warning(
    where: str, error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise error

    writer = Kept()
    if where != "make":
        setattr(writer, where, refuse)
    feed = Feed("report.x", refuse if where == "make" else lambda: writer)  # type: ignore[arg-type, return-value]
    for step in (1, 2):
        feed.write({"step": step})
    feed.roll_back(1)
    feed.write({"step": 2})
    feed.end(completed=True)
    feed.close(30)
    (said,) = warned(caplog)
    assert said.startswith("report.x: no further steps are sent, it ")
    assert words in said
    assert "metrics.jsonl is complete" in said
    assert feed.is_dropped
    assert writer.abandoned == (where != "make")


def test_one_that_hangs_holds_nobody_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    writer = Stuck()
    feed = Feed("report.x", lambda: writer, clock=lambda: now[0])
    feed.write({"step": 1})
    feed.write({"step": 2})
    until(lambda: writer.told == [1, 2])
    now[0] = module.SECONDS_FOR_A_ROW
    began = time.perf_counter()
    feed.write({"step": 3})
    assert not feed.is_dropped
    now[0] += 1
    feed.write({"step": 4})
    assert feed.is_dropped
    assert writer.abandoned
    for step in range(5, 1000):
        feed.write({"step": step})
    assert time.perf_counter() - began < 5
    feed.end(completed=True)
    feed.close(30)
    assert writer.told == [1, 2]
    assert warned(caplog) == [
        "report.x: no further steps are sent, it has not answered for 120 s (metrics.jsonl is complete)"
    ]


def test_one_that_lags_far_behind_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 5)
    writer = Stuck()
    feed = Feed("report.x", lambda: writer)
    for step in (1, 2):
        feed.write({"step": step})
    until(lambda: writer.told == [1, 2])
    for step in range(3, 8):
        feed.write({"step": step})
    assert not feed.is_dropped
    feed.write({"step": 8})
    feed.close(30)
    assert feed.is_dropped
    assert "is 5 rows behind" in warned(caplog)[0]
    assert writer.told == [1, 2]


def test_the_end_of_a_run_waits_for_so_long_and_not_longer(caplog: pytest.LogCaptureFixture) -> None:
    writer = Stuck()
    feed = Feed("report.x", lambda: writer)
    for step in (1, 2, 3):
        feed.write({"step": step})
    until(lambda: writer.told == [1, 2])
    feed.end(completed=True)
    began = time.monotonic()
    feed.close(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert writer.abandoned
    assert "did not finish before the run ended" in warned(caplog)[0]


def test_one_that_is_made_too_late_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins after it was given up, and would keep what it has opened as long as the run lasts."""
    free, writer = threading.Event(), Kept()

    def make() -> Kept:
        free.wait(60)
        return writer

    feed = Feed("slow", make, clock=iter([0.0, 500.0, 501.0, 502.0]).__next__)
    feed.write({"step": 1})
    assert feed.is_dropped and len(warned(caplog)) == 1
    free.set()
    until(lambda: writer.abandoned)
    assert writer.told == []


def test_one_that_nothing_ends_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Given up for its rows, it is still at work when the run is over."""
    free = threading.Event()

    class Deaf(Kept):
        def write(self, row: Row, now: float) -> None:
            free.wait(60)

    now = [0.0]
    feed = Feed("deaf", Deaf, clock=lambda: now[0])
    feed.write({"step": 1})
    until(lambda: feed._queue.empty() and feed._busy is not None)
    now[0] = 500.0
    feed.write({"step": 2})
    feed.write({"step": 3})
    feed.end(completed=True)
    feed.close(0.0)
    assert len(warned(caplog)) == 1
    free.set()
