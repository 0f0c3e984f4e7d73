"""Ledger of the payload and the time of this rank's calls, by group, operation and phase of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from hpctrain.comm.calls import CallHistory
from hpctrain.comm.timeline import PHASES, Timeline
from hpctrain.files import write_text


@dataclass(slots=True)
class LedgerEntry:
    """Totals over all calls of one operation, on one axis, in one phase.

    Attributes:
        axis: Name of the group.
        operation: Name of the operation, such as "all_reduce".
        phase: Phase of the step.
        calls: Number of calls.
        bytes: Payload: for an all-reduce twice the size of its tensor, for all others the size of the tensor
            that holds the data of all ranks. Messages count at the sender only. It does not depend on the
            transport.
        seconds: Time that this rank spent inside the calls: starting them, testing them and waiting for them.
    """

    axis: str
    operation: str
    phase: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Entries of this rank, and the times of its phases. All methods are local.

    Attributes:
        timeline: If it is not None, each call of a group and each phase is also recorded there.
        calls: Log of the last calls of this rank. `reset` does not clear it.
        phase_seconds: Time of this rank in each phase that has ended, in seconds.
        call_seconds: Time inside calls by the phase in which it passed; a call may have started in another.
        recompute_seconds: Time inside `recomputing`, without that inside calls.
    """

    def __init__(self) -> None:
        self._phase, self._phase_start = "other", perf_counter()
        self._activity = "starting"
        self.timeline: Timeline | None = None
        self.calls = CallHistory()
        self.phase_seconds: dict[str, float] = {}
        self.call_seconds: dict[str, float] = {}
        self.recompute_seconds = 0.0
        self._entries: dict[tuple[str, str, str], LedgerEntry] = {}

    @property
    def phase(self) -> str:
        """Current phase: forward, backward, synchronize, step, evaluation, checkpoint or other.

        Setting it ends the previous phase, and tells the watchdog that this rank makes progress.
        """
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.calls.signs_of_life += 1
        if phase == self._phase:
            return
        now = perf_counter()
        if self.timeline is not None:
            self.timeline.record(PHASES, self._phase, self._phase_start, now)
        seconds = now - self._phase_start
        self.phase_seconds[self._phase] = self.phase_seconds.get(self._phase, 0.0) + seconds
        self._phase, self._phase_start = phase, now

    @property
    def activity(self) -> str:
        """Current work of the verb, in words that follow "while", such as "starting".

        Setting it tells the watchdog that this rank makes progress.
        """
        return self._activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.calls.signs_of_life += 1
        self._activity = activity

    @property
    def activity_and_phase(self) -> str:
        """Current activity with the phase, if the verb has set one."""
        return self._activity if self._phase == "other" else f"{self._activity} ({self._phase})"

    def enter(self, axis: str, operation: str, bytes: int, seconds: float) -> LedgerEntry:  # noqa: A002
        """Add one call in the current phase to the totals of its group, operation and phase.

        Args:
            axis: Name of the group.
            operation: Name of the operation.
            bytes: Payload of the call.
            seconds: Time that this rank has spent in the call so far, which also counts in `call_seconds`.

        Returns:
            The entry with the totals (not a copy), to which `add_seconds` adds the time of waiting for a
            started operation.
        """
        key = (axis, operation, self._phase)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = LedgerEntry(*key)
        entry.calls += 1
        entry.bytes += bytes
        self.add_seconds(entry, seconds)
        return entry

    def add_seconds(self, entry: LedgerEntry, seconds: float) -> None:
        """Add time that this rank has just spent in calls of an entry, to the entry and to the current phase.

        Args:
            entry: Entry that `enter` has returned. Its own phase may be an earlier one.
            seconds: The time.
        """
        entry.seconds += seconds
        self.call_seconds[self._phase] = self.call_seconds.get(self._phase, 0.0) + seconds

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Return a context manager that adds the time of its block, outside of calls, to `recompute_seconds`.

        It is added even if the block raises an error. The phase must not change in the block.
        """
        start, calls_before = perf_counter(), self.call_seconds.get(self._phase, 0.0)
        try:
            yield
        finally:
            in_calls = self.call_seconds.get(self._phase, 0.0) - calls_before
            self.recompute_seconds += perf_counter() - start - in_calls

    def seconds_by_entry(self) -> Mapping[tuple[str, str, str], float]:
        """Return the seconds of all entries since the last `reset`, by (axis, operation, phase)."""
        return {key: entry.seconds for key, entry in self._entries.items()}

    @property
    def seconds(self) -> float:
        """Seconds that this rank has spent inside calls, over all entries since the last `reset`."""
        return sum(entry.seconds for entry in self._entries.values())

    @property
    def bytes(self) -> int:
        """Payload of all entries since the last `reset`, in bytes."""
        return sum(entry.bytes for entry in self._entries.values())

    def rows(self) -> list[LedgerEntry]:
        """Return copies of all entries since the last `reset`, sorted by axis, operation and phase."""
        return [LedgerEntry(**asdict(self._entries[key])) for key in sorted(self._entries)]

    def reset(self) -> None:
        """Clear all entries and times, and let the current phase start now.

        Phase, activity, timeline and log of calls stay. Time that `add_seconds` adds to an entry from before
        counts in `call_seconds`, but no longer in the totals.
        """
        self._entries.clear()
        self.phase_seconds.clear()
        self.call_seconds.clear()
        self.recompute_seconds = 0.0
        self._phase_start = perf_counter()

    def write(self, path: str | Path) -> None:
        """Write the rows of this rank to a file as a JSON list of objects, one for each entry.

        The keys are the fields of LedgerEntry: axis, operation, phase, calls, bytes and seconds. An existing
        file is overwritten in place, so each rank must use a path of its own.

        Raises:
            OSError: The file cannot be written. The error names it.
        """
        text = json.dumps([asdict(row) for row in self.rows()], indent=1)
        write_text(Path(path), text + "\n")
