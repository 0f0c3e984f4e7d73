"""Watchdog that ends a job that hangs and reports which rank it hangs on.

`run_verb` starts a watchdog on every rank right after the World and stops it after MPI has been finalized.
Its thread looks for signs of life of its rank: group calls that begin or end, actions of the schedule, phases
of the step, and bytes read from or written to disks. Outside of training steps, processor time of the rank
and its child processes is a sign of life, too, unless the rank waits in a group call: building a model,
reading a checkpoint or compiling may take any time. A rank that waits for a disk may be silent for
`_DISK_PATIENCE` times as long, except in calls that open or close a file on all ranks.

A rank without a sign of life for `HangSettings.seconds` writes its position in the program into
`hang.<rank>.txt` and creates the file REPORT_REQUEST, which asks the other ranks to do the same. A rank that
still makes progress removes the request, and the job continues, since the other ranks only wait for that one.
If the request remains, the lowest rank that has written a report prints a diagnosis and ends the job. The
reports stay in the folder. All of this works without MPI, since MPI itself may hang.
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
from typing import TYPE_CHECKING, NoReturn

from hpctrain.comm.error_messages import describe_os_error, print_error
from hpctrain.comm.hangs.hang_report import (
    THREAD_PREFIX,
    HangReport,
    diagnose,
    read_report,
    take_report,
    write_report,
)
from hpctrain.errors import EXIT_INTERNAL
from hpctrain.files import user_cache
from hpctrain.host.process_lifetime import descendants, stat_fields

if TYPE_CHECKING:
    from hpctrain.comm.world import World

REPORT_REQUEST = "hang.ask"
"""Name of the file by which a silent rank asks all other ranks for a report."""

_ENDING = " ending"
"""Suffix of the content of the request file while a rank ends the job."""

_ABORT_SECONDS = 10.0
_SECONDS_TO_APPEAR = 5.0
"""Time after which a file that one node has written must be visible on all nodes, in seconds."""

_BUSY_SHARE = 0.2
"""Share of the time from which on a process counts as working."""

_DISK_PATIENCE = 4
"""Number of time limits for which a rank may wait for a disk, as in the fsync of a large checkpoint."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Watchdog:
    """Context manager whose thread watches this rank inside the block, with the settings in `World.hang`.

    Entering it is collective: the ranks agree on a folder for reports. If another watchdog already runs, this
    one does nothing. Leaving it is local.
    """

    def __init__(self, world: World) -> None:
        self.world, self.settings = world, world.hang
        self._token = ""
        self._default_folder: Path | None = None
        self._over = False
        self._thread: threading.Thread | None = None
        self._work_meter = _WorkMeter()
        self._processes: list[tuple[str, int]] = []
        """Host name and process id of each rank."""

    def __enter__(self) -> Watchdog:
        if self.settings.watched:
            return self
        self.settings.watched = True
        everyone = self.world.everyone
        token = f"{time.time():.3f} {os.getpid()} {secrets.token_hex(8)}"
        self._token, temporary = everyone.broadcast_object((token, tempfile.gettempdir()))
        self._processes = [
            tuple(each) for each in everyone.all_gather_object((self.world.hostname, os.getpid()))
        ]
        name = f"hpctrain-hang-{self._token.split()[-1]}"
        if self.world.nodes == 1:
            self._default_folder = Path(temporary) / name
        else:
            self._default_folder = _shared_folder(self.world, name)
        self._thread = threading.Thread(target=self._watch, name=THREAD_PREFIX, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._over = True
        self.settings.changed.set()
        self._thread.join(self.grace)
        self.settings.watched = False
        self._remove_default_folder()

    @property
    def pause(self) -> float:
        """Seconds between two checks: a twentieth of the time limit, but between 0.05 and 10."""
        return min(10.0, max(0.05, self.settings.seconds / 20)) if self.settings.seconds > 0 else 10.0

    @property
    def grace(self) -> float:
        """Seconds that this rank waits for the reports of the other ranks before it decides without them.

        It is a fifth of the time limit, but between 3 and 60 seconds.
        """
        return min(60.0, max(3.0, self.settings.seconds / 5))

    @property
    def folder(self) -> Path | None:
        """Folder for the reports, visible to all ranks; None if no folder is known that all nodes share.

        Before `HangSettings.report_to` sets one, it is a folder of the watchdog's own, which a rank makes
        when it hangs.
        """
        return self.settings.folder or self._default_folder

    def _watch(self) -> None:
        signs: tuple[object, ...] = ()
        silent, last_check = 0.0, time.monotonic()
        while not self._wait():
            now, before = time.monotonic(), signs
            # While this process is stopped (SIGSTOP) the thread does not run. That time does not count.
            silent += min(now - last_check, 2 * self.pause)
            last_check, signs = now, (*self._signs(), *_disk_bytes())
            if signs != before or self._is_excused():
                silent = 0.0
            requested = self._is_report_requested()
            if silent > 0 and silent >= self._patience() / (2 if requested else 1):
                self._report_hang(silent)
                silent, last_check = 0.0, time.monotonic()
            elif requested:
                self._remove(REPORT_REQUEST)

    def _wait(self) -> bool:
        """Sleep until the next check. Return True if the watchdog was stopped."""
        if self.settings.changed.wait(self.pause):
            self.settings.changed.clear()
        return self._over

    def _signs(self) -> tuple[object, ...]:
        """Return values that change when this rank communicates."""
        calls = self.world.ledger.calls
        newest = calls.recent[-1] if calls.recent else None
        return newest, calls.current, calls.signs_of_life

    def _patience(self) -> float:
        """Return the seconds without a sign of life after which this rank, as it is now, reports a hang."""
        ledger = self.world.ledger
        current = ledger.calls.current
        opens_file = current is not None and current.file != ""
        may_wait_for_disk = ledger.phase == "checkpoint" or not self.settings.training
        if may_wait_for_disk and not opens_file and _waits_for_disk():
            return _DISK_PATIENCE * self.settings.seconds
        return self.settings.seconds

    def _is_excused(self) -> bool:
        """Return True if this rank needs to give no sign of life now.

        That is so if the watchdog is turned off or has no folder, while the rank waits for a person or
        another program, and outside of training steps if the rank uses the processor or is the only one.
        """
        settings = self.settings
        if settings.seconds <= 0 or self.folder is None or settings.waits_outside:
            return True
        if settings.training:
            return False
        works = self._work_meter.is_working()
        return self.world.size == 1 or (works and self.world.ledger.calls.current is None)

    def _report_hang(self, silent: float) -> None:
        """Write a report, wait for the other ranks' reports, and end the job.

        Returns only if this rank or another one makes progress after all.

        Args:
            silent: Seconds without a sign of life of this rank.
        """
        own, signs = take_report(self.world, self._token, silent), self._signs()
        # If access to the folder hangs, too, this ends the process without a report.
        last_resort = _exit_after(4 * self.grace + 30)
        written = self._write(own)
        begin = time.monotonic()
        neighbors = _NodeProcesses(self._processes_here(without=own.rank))
        while (self._is_report_requested() or self._is_ending() or not written) and self._signs() == signs:
            if self._is_excused():
                break
            late = time.monotonic() > begin + self.grace
            neighbors.update()
            reports = self._reports(own, late or bool(neighbors.stopped))
            if late and any(rank not in reports for rank in neighbors.working()):
                break  # that rank computes in a call of a library in which its watchdog thread cannot run
            if late or all(rank in reports or rank in neighbors.stopped for rank in range(self.world.size)):
                if own.rank == min(reports):
                    self._end_job(reports, neighbors.stopped)
                if time.monotonic() > begin + 3 * self.grace:
                    os._exit(EXIT_INTERNAL)
            if self._wait():
                break
        last_resort.cancel()
        if self._is_ending():  # a launcher may continue a stopped rank before it kills all ranks
            return
        self._remove(REPORT_REQUEST)
        self._remove(self._report_path(own.rank).name)
        self._remove_default_folder()

    def _write(self, report: HangReport) -> bool:
        """Write this rank's report and the request file. Return False if they cannot be written."""
        try:
            if self.folder == self._default_folder:
                self._path(REPORT_REQUEST).parent.mkdir(mode=0o700, exist_ok=True)
            write_report(self._report_path(report.rank), report, self.world.size)
            self._write_request(self._token)
        except OSError as error:
            why = describe_os_error(error)
            sentence = f"rank {report.rank} hangs and cannot write its report: {why}; it is {report.state}"
            _print_sentence(report.rank, sentence)
            return False
        return True

    def _write_request(self, text: str) -> None:
        path = self._path(REPORT_REQUEST)
        temporary = path.with_name(f".{REPORT_REQUEST}.{self.world.rank}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def _processes_here(self, without: int) -> dict[int, int]:
        """Return the process ids of the ranks on this node other than `without`, by rank."""
        return {
            rank: process
            for rank, (host, process) in enumerate(self._processes)
            if host == self.world.hostname and rank != without
        }

    def _end_job(self, reports: dict[int, HangReport], stopped: Collection[int]) -> NoReturn:
        """Print a diagnosis and end the job on all ranks.

        Args:
            reports: Reports of the ranks that have written one.
            stopped: Ranks whose processes are stopped.
        """
        with contextlib.suppress(OSError):
            self._write_request(self._token + _ENDING)
        silent = max(report.silent for report in reports.values())
        why = diagnose(reports, self.world.size, stopped)
        activity = self.world.ledger.activity_and_phase
        first = f"the run hangs while {activity}: no rank gave a sign of life for {silent:.0f} s"
        for line in (first, *why, f"stacks and last calls of each rank: {self.folder}/hang.<rank>.txt"):
            _print_sentence(self.world.rank, line)
        _exit_after(_ABORT_SECONDS)  # the main thread may hold a lock that MPI_Abort needs
        on_hang = self.settings.on_hang  # the main thread may set it to None at any time
        if on_hang is not None:
            on_hang(f"hang: {why[0]} (while {activity})")
        self.world.abort(EXIT_INTERNAL)

    def _reports(self, report: HangReport, late: bool) -> dict[int, HangReport]:
        """Return the reports that this rank needs to decide which rank ends the job.

        Rank 0 needs all reports. Another rank needs the first report of a lower rank. If there is none and
        it is `late`, this rank is the lowest one that can end the job, and needs all reports.
        """
        reports = {report.rank: report}
        for rank in range(report.rank):
            other = read_report(self._report_path(rank), self._token)
            if other is not None:
                return reports | {rank: other}
        for rank in range(report.rank + 1, self.world.size if late or report.rank == 0 else 0):
            other = read_report(self._report_path(rank), self._token)
            if other is not None:
                reports[rank] = other
        return reports

    def _report_path(self, rank: int) -> Path:
        return self._path(f"hang.{rank}.txt")

    def _path(self, name: str) -> Path:
        assert self.folder is not None, "_is_excused() is True without a folder"
        return self.folder / name

    def _is_report_requested(self) -> bool:
        return self._read_request() == self._token

    def _is_ending(self) -> bool:
        return self._read_request() == self._token + _ENDING

    def _read_request(self) -> str:
        if self.folder is None:
            return ""
        try:
            return self._path(REPORT_REQUEST).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _remove_default_folder(self) -> None:
        """Remove the watchdog's own folder if it is empty."""
        if self._default_folder is not None:
            with contextlib.suppress(OSError):
                self._default_folder.rmdir()


class _WorkMeter:
    """Measurement of the work of this process and its descendants between two calls."""

    def __init__(self) -> None:
        self._since, self._work_seconds = time.monotonic(), _work_seconds()

    def is_working(self) -> bool:
        """Return True if this process and its descendants worked for at least `_BUSY_SHARE` of the time.

        Local. The time is that since the last call; in the first call, that since this object was made. Work
        is the processor time of all threads, added up, also of those that wait by polling, and the time for
        which main threads waited for a processor.

        Only descendants that are still running count. If one has ended since the last call, its earlier work
        is missing, and the result may be False by mistake.
        """
        now, work_seconds = time.monotonic(), _work_seconds()
        share = (work_seconds - self._work_seconds) / max(now - self._since, 1e-3)
        self._since, self._work_seconds = now, work_seconds
        return share >= _BUSY_SHARE


class _NodeProcesses:
    """State of the other ranks of this node according to the kernel.

    Args:
        processes: Process id of each rank.

    Attributes:
        stopped: Ranks whose processes were stopped at the last two updates.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = processes
        self._start = time.monotonic()
        self._work_seconds = {rank: _state_of(process)[1] for rank, process in processes.items()}
        self._stopped_before: frozenset[int] = frozenset()
        self.stopped: frozenset[int] = frozenset()

    def update(self) -> None:
        """Read the states of the processes.

        `stopped` becomes the ranks that are stopped now (by a signal or a debugger) and were stopped at the
        update before, so it is empty after the first one.
        """
        states = {rank: _state_of(process)[0] for rank, process in self._processes.items()}
        stopped_now = frozenset(rank for rank, state in states.items() if state in {"T", "t"})
        self.stopped, self._stopped_before = stopped_now & self._stopped_before, stopped_now

    def working(self) -> list[int]:
        """Return the ranks that worked for at least `_BUSY_SHARE` of the time since this object was made.

        They are in the order of `processes`. The kernel's counts are read now. Waiting for a processor counts
        as work. A rank whose process has ended, or cannot be read, is left out.
        """
        passed = max(time.monotonic() - self._start, 1e-3)
        now = {rank: _state_of(process)[1] for rank, process in self._processes.items()}
        return [rank for rank in now if now[rank] - self._work_seconds[rank] >= _BUSY_SHARE * passed]


def _work_seconds() -> float:
    """Return the seconds for which this process and its running descendants have worked."""
    return sum(_state_of(process)[1] for process in (os.getpid(), *descendants(os.getpid())))


def _state_of(process: int) -> tuple[str, float]:
    """Return the state of a process as a letter of /proc/<pid>/stat, and the seconds for which it worked.

    The seconds include those for which its main thread waited for a processor, as on a crowded node.
    """
    fields = stat_fields(Path(f"/proc/{process}/stat"))
    if not fields:
        return "", 0.0
    waited = 0
    with contextlib.suppress(OSError, LookupError):  # the file is empty or absent in some kernels
        waited = int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1])
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS + waited / 1e9


def _shared_folder(world: World, name: str) -> Path | None:
    """Return the path of a folder `name` inside a folder that all nodes see. Collective.

    The candidates are the user's cache and the current folder: rank 0 creates a file there, and all ranks
    must see it within a few seconds. If no candidate is shared, rank 0 prints a warning, and the result is
    None.
    """
    for parent in (user_cache(), Path.cwd()):
        chosen = Path(world.everyone.broadcast_object(str(parent)))
        mark = chosen / f".{name}"
        if world.rank == 0:
            with contextlib.suppress(OSError):
                chosen.mkdir(parents=True, exist_ok=True)
                mark.touch()
        world.everyone.barrier()
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while not (visible := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        shared = all(world.everyone.all_gather_object(visible))
        if world.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
        if shared:
            return chosen / name
    if world.rank == 0:
        print_error(
            "warning: the nodes share neither the user's cache folder nor the current folder; until the "
            "run folder is known, a job that hangs is not ended"
        )
    return None


def _exit_after(seconds: float) -> threading.Timer:
    """Start a timer that ends this process with exit code 70 after `seconds`, unless it is cancelled.

    The launcher then ends the other ranks.
    """
    timer = threading.Timer(seconds, os._exit, (EXIT_INTERNAL,))
    timer.name, timer.daemon = f"{THREAD_PREFIX}'s timer", True
    timer.start()
    return timer


def _print_sentence(rank: int, sentence: str) -> None:
    """Print a sentence to stderr and, if this rank has a log, write it there, too."""
    log = logging.getLogger("hpctrain")
    if log.handlers:
        log.error("%s", sentence)
    if rank != 0 or not log.handlers:  # the log of rank 0 goes to the screen as well
        print_error(f"error: {sentence}")


def _disk_bytes() -> tuple[str, ...]:
    """Return the kernel's counters of bytes that this process has read from and written to disks.

    The tuple is empty if the kernel does not provide them.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.startswith(("read_bytes", "write_bytes")))


def _waits_for_disk() -> bool:
    """Return True if a thread of this process waits for a disk (kernel state D), as in a long fsync."""
    return any(stat_fields(task)[:1] == ["D"] for task in Path("/proc/self/task").glob("*/stat"))
