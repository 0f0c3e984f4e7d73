"""The watchdog: ends a job that hangs, and says which rank it hangs on.

`run_verb` starts one on every rank, right after the World, and stops it after MPI has been finalized. A
thread of every rank looks for signs of life: calls of groups begun and ended, actions of the schedule,
phases of the step, bytes to and from disks. Outside of training steps, processor time that a rank and its
child processes use is a sign of life, too, unless the rank waits in a call of a group: building a model,
reading a checkpoint or compiling may take any time.

When there was no sign of life for `HangSettings.seconds`, a rank writes where it is into `hang.<rank>.txt`,
and asks the other ranks by a file to do the same. A rank that still moves removes the question, and the job
goes on: someone works, and the others wait for it with good reason. Otherwise rank 0, or the lowest rank that
can, says what follows from the reports, and the job ends; the reports stay. None of this needs MPI, which may
be what hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from hpctrain.comm.hang_report import THREAD, HangReport, read_report, take_report, verdict, write_report
from hpctrain.comm.helper import descendants
from hpctrain.comm.outcome import describe, print_error
from hpctrain.comm.world import World
from hpctrain.errors import EXIT_INTERNAL
from hpctrain.files import user_cache

QUESTION = "hang.ask"  # name of the file by which a silent rank asks all others how they are

_JUDGED = " judged"  # behind what the question holds once the job is being ended
_ABORT_SECONDS = 10.0
_SECONDS_TO_APPEAR = 5.0  # a network file system may take to show one node what another has written
_BUSY = 0.2  # share of one core from which on a rank counts as working
_TICKS = os.sysconf("SC_CLK_TCK")


class Watchdog:
    """Watches over this rank, from `start` to `stop`, by the settings in `World.hang`.

    As a context it is started and stopped. Starting is collective.
    """

    def __init__(self, world: World) -> None:
        self.world, self.settings = world, world.hang
        self.grace_seconds: float | None = None
        self._token = ""
        self._default_folder: Path | None = None
        self._over = False
        self._thread: threading.Thread | None = None
        self._disk_waits = 0
        self._worked = _WorkMeter()
        self._processes: list[tuple[str, int]] = []

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(10.0, max(0.05, self.settings.seconds / 20)) if self.settings.seconds > 0 else 10.0

    @property
    def grace(self) -> float:
        """Seconds in which files of the other ranks are to be seen on this node."""
        if self.grace_seconds is not None:
            return self.grace_seconds
        return min(60.0, max(3.0, self.settings.seconds / 5))

    @property
    def folder(self) -> Path | None:
        """Folder for the reports that all ranks see; None where none is known yet."""
        return self.settings.folder or self._default_folder

    def start(self) -> None:
        """Agree on a folder for reports, and begin to watch, unless another watchdog does. Collective."""
        if self.settings.watched:
            return
        self.settings.watched = True
        everyone = self.world.everyone
        named = (f"{time.time():.3f} {os.getpid()} {secrets.token_hex(8)}", tempfile.gettempdir())
        self._token, temporary = everyone.broadcast_object(named)
        self._processes = [
            tuple(each) for each in everyone.all_gather_object((self.world.hostname, os.getpid()))
        ]
        name = f"hpctrain-hang-{self._token.split()[-1]}"
        if self.world.nodes == 1:
            self._default_folder = Path(temporary) / name
        else:
            self._default_folder = _shared_folder(self.world, name)
        self._thread = threading.Thread(target=self._watch, name=THREAD, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        if self._thread is None:
            return
        self._over = True
        self.settings.changed.set()
        self._thread.join(self.grace)
        self.settings.watched = False
        self._remove_default_folder()

    def _watch(self) -> None:
        signs: tuple[object, ...] = ()
        silent, looked = 0.0, time.monotonic()
        while not self._wait():
            now, before = time.monotonic(), signs
            # A job that was stopped and goes on was not silent for so long.
            silent += min(now - looked, 2 * self.pause)
            looked, signs = now, (*self._signs(), *_disk_bytes())
            if signs != before or self._is_excused():
                silent = 0.0
            asked = self._is_question_open()
            if silent > 0 and silent >= self.settings.seconds / (2 if asked else 1):
                self._ask(silent)
                silent, looked = 0.0, time.monotonic()
            elif asked:
                self._remove(QUESTION)

    def _wait(self) -> bool:
        """Sleep until the next look; return whether it is over."""
        if self.settings.changed.wait(self.pause):
            self.settings.changed.clear()
        return self._over

    def _signs(self) -> tuple[object, ...]:
        """Return what differs from the last time if this rank communicates or waits for a disk."""
        ledger = self.world.ledger
        calls = ledger.calls
        newest = calls.recent[-1] if calls.recent else None
        if (ledger.phase == "checkpoint" or not self.settings.training) and _waits_for_disk():
            self._disk_waits += 1
        return newest, calls.current, calls.beats, self._disk_waits

    def _is_excused(self) -> bool:
        """Return True if this rank may be silent now: it waits for nobody here, or it computes."""
        settings = self.settings
        if settings.seconds <= 0 or self.folder is None or settings.waits_outside:
            return True
        if settings.training:
            return False
        works = self._worked.is_working()
        return self.world.size == 1 or (works and self.world.ledger.calls.current is None)

    def _ask(self, silent: float) -> None:
        """Report, wait for the others' reports, and end the job; return if someone is alive after all."""
        own, signs = take_report(self.world, self._token, silent), self._signs()
        # If the folder hangs, too, nobody can be told.
        last_resort = _exit_after(4 * self.grace + 30)
        written = self._write(own)
        asked = time.monotonic()
        neighbors = _NodeProcesses(self._here(without=own.rank))
        while (self._is_question_open() or self._is_judged() or not written) and self._signs() == signs:
            if self._is_excused():
                break
            late = time.monotonic() > asked + self.grace
            neighbors.look()
            reports = self._reports(own, late or bool(neighbors.stopped))
            if late and any(rank not in reports for rank in neighbors.working()):
                break  # no thread of it could answer meanwhile, as in a long call of a library
            if late or all(rank in reports or rank in neighbors.stopped for rank in range(self.world.size)):
                if own.rank == min(reports):
                    self._judge(reports, neighbors.stopped)
                if time.monotonic() > asked + 3 * self.grace:
                    os._exit(EXIT_INTERNAL)
            if self._wait():
                break
        last_resort.cancel()
        if self._is_judged():  # a launcher lets a stopped rank go on before it ends all
            return
        self._remove(QUESTION)
        self._remove(self._report(own.rank).name)
        self._remove_default_folder()

    def _write(self, report: HangReport) -> bool:
        """Write this rank's report and the question; whether the folder took them."""
        try:
            if self.folder == self._default_folder:
                self._path(QUESTION).parent.mkdir(mode=0o700, exist_ok=True)
            write_report(self._report(report.rank), report, self.world.size)
            self._put(self._token)
        except OSError as error:
            sentence = (
                f"rank {report.rank} is silent and cannot report it: {describe(error)}; it is {report.state}"
            )
            _print_sentence(report.rank, sentence)
            return False
        return True

    def _put(self, text: str) -> None:
        path = self._path(QUESTION)
        temporary = path.with_name(f".{QUESTION}.{self.world.rank}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def _here(self, without: int) -> dict[int, int]:
        """Process ids of the other ranks of this machine, by rank."""
        named = enumerate(self._processes)
        here = {rank: process for rank, (host, process) in named if host == self.world.hostname}
        return {rank: process for rank, process in here.items() if rank != without}

    def _judge(self, reports: dict[int, HangReport], stopped: Collection[int]) -> NoReturn:
        with contextlib.suppress(OSError):
            self._put(self._token + _JUDGED)
        silent = max(report.silent for report in reports.values())
        why = verdict(reports, self.world.size, stopped)
        activity = self.world.ledger.described
        first = f"the run hangs while {activity}: no rank gave a sign of life for {silent:.0f} s"
        for line in (first, *why, f"stacks and last calls of each rank: {self.folder}/hang.<rank>.txt"):
            _print_sentence(self.world.rank, line)
        _exit_after(_ABORT_SECONDS)  # the main thread may hold what MPI's abort needs
        self.settings.on_hang(f"hang: {why[0]} (while {activity})")
        self.world.abort(EXIT_INTERNAL)

    def _reports(self, report: HangReport, late: bool) -> dict[int, HangReport]:
        """Return the reports that this rank needs to decide who tells of the hang.

        Rank 0 needs all reports. Another rank needs the first report of a lower rank, or all reports where
        there is none although it is `late`: then this rank is the lowest that can tell of the hang.
        """
        reports = {report.rank: report}
        for rank in range(report.rank):
            other = read_report(self._report(rank), self._token)
            if other is not None:
                return reports | {rank: other}
        for rank in range(report.rank + 1, self.world.size if late or report.rank == 0 else 0):
            other = read_report(self._report(rank), self._token)
            if other is not None:
                reports[rank] = other
        return reports

    def _report(self, rank: int) -> Path:
        return self._path(f"hang.{rank}.txt")

    def _path(self, name: str) -> Path:
        assert self.folder is not None, "a rank that knows no folder is excused"
        return self.folder / name

    def _is_question_open(self) -> bool:
        return self._question() == self._token

    def _is_judged(self) -> bool:
        return self._question() == self._token + _JUDGED

    def _question(self) -> str:
        if self.folder is None:
            return ""
        try:
            return self._path(QUESTION).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _remove_default_folder(self) -> None:
        """Remove the watchdog's own folder where it is empty."""
        if self._default_folder is not None:
            with contextlib.suppress(OSError):
                self._default_folder.rmdir()


class _WorkMeter:
    """Processor time that this process and its child processes use between two questions."""

    def __init__(self) -> None:
        self._since, self._used = time.monotonic(), 0.0

    def is_working(self) -> bool:
        """Return True if a good part of one core was used since the last question."""
        now, used = time.monotonic(), _used_seconds()
        share = (used - self._used) / max(now - self._since, 1e-3)
        self._since, self._used = now, used
        return share >= _BUSY


class _NodeProcesses:
    """The other ranks of this machine, as the kernel sees them: by rank their process ids."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = processes
        self._start = time.monotonic()
        self._used = {rank: _state_of(process)[1] for rank, process in processes.items()}
        self._previous: frozenset[int] = frozenset()
        self.stopped: frozenset[int] = frozenset()

    def look(self) -> None:
        """Note which ranks are stopped, if they were so at the look before, too."""
        states = {rank: _state_of(process)[0] for rank, process in self._processes.items()}
        seen = frozenset(rank for rank, state in states.items() if state in {"T", "t"})
        self.stopped, self._previous = seen & self._previous, seen

    def working(self) -> list[int]:
        """Ranks that have used a good part of one core since the beginning."""
        passed = max(time.monotonic() - self._start, 1e-3)
        used = {rank: _state_of(process)[1] for rank, process in self._processes.items()}
        return [rank for rank in used if used[rank] - self._used[rank] >= _BUSY * passed]


def _used_seconds() -> float:
    """Processor seconds of this process and of all its descendants that still run."""
    return sum(_state_of(process)[1] for process in (os.getpid(), *descendants(os.getpid())))


def _state_of(process: int) -> tuple[str, float]:
    """Return the kernel's letter for the state of a process, and its processor seconds."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "", 0.0
    state, *fields = text.rpartition(")")[2].split()
    return state, (int(fields[10]) + int(fields[11])) / _TICKS


def _shared_folder(world: World, name: str) -> Path | None:
    """Return a folder whose parent all nodes share; None, with a warning, where there is none. Collective."""
    for parent in (user_cache(), Path.cwd()):
        chosen = Path(world.everyone.broadcast_object(str(parent)))
        mark = chosen / f".{name}"
        if world.rank == 0:
            with contextlib.suppress(OSError):
                chosen.mkdir(parents=True, exist_ok=True)
                mark.touch()
        world.everyone.barrier()
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while not (seen := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        shared = all(world.everyone.all_gather_object(seen))
        if world.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
        if shared:
            return chosen / name
    if world.rank == 0:
        print_error(
            "warning: the nodes share neither the user's cache folder nor the current folder: a rank that "
            "hangs is named only while a run trains"
        )
    return None


def _exit_after(seconds: float) -> threading.Timer:
    """End this process by then, and with it the job, unless the timer is cancelled."""
    timer = threading.Timer(seconds, os._exit, (EXIT_INTERNAL,))
    timer.name, timer.daemon = f"{THREAD}'s timer", True
    timer.start()
    return timer


def _print_sentence(rank: int, sentence: str) -> None:
    """Write a sentence on stderr and, where this rank has a log, into that."""
    log = logging.getLogger("hpctrain")
    if log.handlers:
        log.error("%s", sentence)
    if rank != 0 or not log.handlers:  # the log of rank 0 goes to the screen as well
        print_error(f"error: {sentence}")


def _disk_bytes() -> tuple[str, ...]:
    """Bytes that this process has read from disks and written, where the kernel tells."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.startswith(("read_bytes", "write_bytes")))


def _waits_for_disk() -> bool:
    """Return True if a thread of this process sleeps until a disk has done its work, as in a long fsync."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if task.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:1] == ["D"]:
                return True
    return False
