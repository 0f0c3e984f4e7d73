"""The watchdog: ends a run that hangs, and says which rank it hangs on.

A thread of every rank looks for signs of life: calls of groups begun and ended, actions of the schedule,
phases of the step, bytes to and from disks. When there was none for `stability.hang_seconds`, it writes
where the rank is into `hang.<rank>.txt` of the run's folder, and asks the other ranks by a file to do the
same. A rank that still moves takes the question away, and the run goes on: someone works, and the others
wait for it with good reason. Otherwise rank 0, or the lowest one that can, says what follows from the
reports, and the job ends; these stay, whoever moves meanwhile. None of this needs MPI, which may be what
hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpctrain.comm.outcome import describe
from hpctrain.comm.world import World
from hpctrain.errors import EXIT_INTERNAL
from hpctrain.watch.hang import THREAD, HangReport, read_report, take_report, verdict, write_report

QUESTION = "hang.ask"  # name of the file by which a silent rank asks all others how they are

_JUDGED = " judged"  # behind what the question holds once the job is being ended
_ABORT_SECONDS = 10.0


class Watchdog:
    """Watches over this rank while it is entered as a context, which is collective. 0 seconds: not at all.

    `on_hang` gets one sentence on the rank that ends the job.
    """

    def __init__(
        self, world: World, folder: Path, seconds: float, on_hang: Callable[[str], None] = lambda _: None
    ) -> None:
        self.on_hang = on_hang
        self.world, self.folder, self.seconds = world, folder, seconds
        self.pause = min(10.0, max(0.05, seconds / 20))
        # Files need their time to be seen on other nodes.
        self.grace = min(60.0, max(3.0, seconds / 5))
        self._token = ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._disk_waits = 0

    def __enter__(self) -> Watchdog:
        if self.seconds > 0:
            if self.world.rank == 0:
                self._remove(QUESTION)  # an earlier run's
            self._token = self.world.everyone.broadcast_object(f"{time.time():.3f} {os.getpid()}")
            self._thread = threading.Thread(target=self._watch, name=THREAD, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(self.grace)

    def _watch(self) -> None:
        signs: tuple[object, ...] = ()
        silent, looked = 0.0, time.monotonic()
        while not self._over.wait(self.pause):
            now, before = time.monotonic(), signs
            # A job that was stopped and goes on was not silent for so long.
            silent += min(now - looked, 2 * self.pause)
            looked, signs = now, (*self._signs(), *_disk_bytes())
            if signs != before:
                silent = 0.0
            asked = self._asked()
            if silent >= self.seconds or (asked and silent >= self.seconds / 2):
                self._ask(silent)
                silent, looked = 0.0, time.monotonic()
            elif asked:
                self._remove(QUESTION)

    def _signs(self) -> tuple[object, ...]:
        """What differs from the last time if this rank is alive; the bytes to and from disks do as well."""
        ledger = self.world.ledger
        calls = ledger.calls
        newest = calls.recent[-1] if calls.recent else None
        if ledger.phase == "checkpoint" and _waits_for_disk():
            self._disk_waits += 1
        return newest, calls.current, calls.beats, self._disk_waits

    def _ask(self, silent: float) -> None:
        """Report, wait for the others' reports, and end the job; return if someone is alive after all."""
        own, signs = take_report(self.world, self._token, silent), self._signs()
        # If the folder hangs, too, nobody can be told.
        last_resort = _exit_after(4 * self.grace + 30)
        written = self._write(own)
        asked = time.monotonic()
        while (self._asked() or self._judged() or not written) and self._signs() == signs:
            late = time.monotonic() > asked + self.grace
            reports = self._reports(own, late)
            if len(reports) == self.world.size or late:
                if own.rank == min(reports):
                    self._judge(reports)
                if time.monotonic() > asked + 3 * self.grace:
                    os._exit(EXIT_INTERNAL)
            if self._over.wait(self.pause):
                break
        last_resort.cancel()
        if self._judged():  # a launcher lets a stopped rank go on before it ends all
            return
        self._remove(QUESTION)
        self._remove(self._path(own.rank).name)

    def _write(self, own: HangReport) -> bool:
        """Write this rank's report and the question; whether the folder took them."""
        try:
            write_report(self._path(own.rank), own, self.world.size)
            self._put(self._token)
        except OSError as error:
            sentence = f"rank {own.rank} is silent and cannot report it: {describe(error)}; it is {own.state}"
            _tell(own.rank, sentence)
            return False
        return True

    def _put(self, text: str) -> None:
        temporary = self.folder / f".{QUESTION}.{self.world.rank}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / QUESTION)

    def _judge(self, reports: dict[int, HangReport]) -> NoReturn:
        with contextlib.suppress(OSError):
            self._put(self._token + _JUDGED)
        silent = max(report.silent for report in reports.values())
        why = verdict(reports, self.world.size)
        first = f"the run hangs: no rank gave a sign of life for {silent:.0f} s"
        for line in (first, *why, f"stacks and last calls of each rank: {self.folder}/hang.<rank>.txt"):
            _tell(self.world.rank, line)
        _exit_after(_ABORT_SECONDS)  # the main thread may hold what MPI's abort needs
        self.on_hang(f"hang: {why[0]}")
        self.world.abort(EXIT_INTERNAL)

    def _reports(self, own: HangReport, late: bool) -> dict[int, HangReport]:
        """All reports there are, for rank 0; for others the first one of a lower rank, and where there is
        none, though it is `late`, all: the lowest of these ranks tells of them.
        """
        reports = {own.rank: own}
        for rank in range(own.rank):
            report = read_report(self._path(rank), self._token)
            if report is not None:
                return reports | {rank: report}
        for rank in range(own.rank + 1, self.world.size if late or own.rank == 0 else 0):
            report = read_report(self._path(rank), self._token)
            if report is not None:
                reports[rank] = report
        return reports

    def _path(self, rank: int) -> Path:
        return self.folder / f"hang.{rank}.txt"

    def _asked(self) -> bool:
        return self._question() == self._token

    def _judged(self) -> bool:
        return self._question() == self._token + _JUDGED

    def _question(self) -> str:
        try:
            return (self.folder / QUESTION).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)


def _exit_after(seconds: float) -> threading.Timer:
    """End this process by then, and with it the job, unless the timer is cancelled."""
    timer = threading.Timer(seconds, os._exit, (EXIT_INTERNAL,))
    timer.name, timer.daemon = f"{THREAD}'s timer", True
    timer.start()
    return timer


def _tell(rank: int, sentence: str) -> None:
    """On stderr and in the log of this rank."""
    logging.getLogger("hpctrain").error("%s", sentence)
    if rank != 0:  # whose log does not go to the screen
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def _disk_bytes() -> tuple[str, ...]:
    """Bytes that this process has read from disks and written, where the kernel tells."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.startswith(("read_bytes", "write_bytes")))


def _waits_for_disk() -> bool:
    """Whether a thread of this process sleeps until a disk has done its work, as in a long fsync."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if task.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:1] == ["D"]:
                return True
    return False
