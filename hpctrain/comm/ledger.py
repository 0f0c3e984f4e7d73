"""The ledger: what every group sent, in which phase of the step, and how long it took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from hpctrain.comm.calls import Calls
from hpctrain.comm.timeline import PHASES, Timeline
from hpctrain.files import write_text


@dataclass(slots=True)
class LedgerEntry:
    """The sum over all calls of one operation, on one axis, in one phase.

    `bytes` is payload as the closed forms count it (an all-reduce twice its tensor, all others the
    whole tensor once); `seconds` is the time this rank spent inside the calls, starting and waiting.
    """

    axis: str
    operation: str
    phase: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Entries of one rank, by what it does meanwhile.

    `phase` is forward, backward, synchronize, step, evaluation, checkpoint or other, as the run sets it.
    `phase_seconds` is the host's time in each phase that has ended, `inside_seconds` that spent in calls in
    each phase, whenever these were started, `again_seconds` that spent `computing_again`. A `timeline`, where
    there is one, gets every call of a group and every phase with its start and end. `calls` are the newest
    calls of this rank, and `activity` is what the verb does now ("opening the token files"), for the
    watchdog; `reset` leaves both.
    """

    def __init__(self) -> None:
        self._phase, self._since = "other", perf_counter()
        self._activity = "starting"
        self.timeline: Timeline | None = None
        self.calls = Calls()
        self.phase_seconds: dict[str, float] = {}
        self.inside_seconds: dict[str, float] = {}
        self.again_seconds = 0.0
        self._entries: dict[tuple[str, str, str], LedgerEntry] = {}

    @property
    def phase(self) -> str:
        """The present phase; setting another ends it."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.calls.beats += 1
        if phase == self._phase:
            return
        now = perf_counter()
        if self.timeline is not None:
            self.timeline.record(PHASES, self._phase, self._since, now)
        self.phase_seconds[self._phase] = self.phase_seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @property
    def activity(self) -> str:
        """Present work of the verb, in words that follow "while"; setting it is a sign of life."""
        return self._activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.calls.beats += 1
        self._activity = activity

    @property
    def described(self) -> str:
        """The activity and, where the verb has set one, the phase."""
        return self._activity if self._phase == "other" else f"{self._activity} ({self._phase})"

    def enter(self, axis: str, operation: str, bytes: int, seconds: float) -> LedgerEntry:  # noqa: A002
        """Add one call in the present phase; its LedgerEntry, to which a waiting Work adds more seconds."""
        key = (axis, operation, self._phase)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = LedgerEntry(*key)
        entry.calls += 1
        entry.bytes += bytes
        self.spend(entry, seconds)
        return entry

    def spend(self, entry: LedgerEntry, seconds: float) -> None:
        """Add what this rank has spent now in calls that are in an entry."""
        entry.seconds += seconds
        self.inside_seconds[self._phase] = self.inside_seconds.get(self._phase, 0.0) + seconds

    @contextmanager
    def computing_again(self) -> Iterator[None]:
        """What is computed within was computed before; what is sent meanwhile counts as sending."""
        began, inside = perf_counter(), self.inside_seconds.get(self._phase, 0.0)
        yield
        sent = self.inside_seconds.get(self._phase, 0.0) - inside
        self.again_seconds += perf_counter() - began - sent

    def seconds_of(self) -> Mapping[tuple[str, str, str], float]:
        """Those of all entries, by axis, operation and phase."""
        return {key: entry.seconds for key, entry in self._entries.items()}

    @property
    def seconds(self) -> float:
        """The time this rank has spent inside calls, all entries together."""
        return sum(entry.seconds for entry in self._entries.values())

    @property
    def bytes(self) -> int:
        """The payload of all of them."""
        return sum(entry.bytes for entry in self._entries.values())

    def rows(self) -> list[LedgerEntry]:
        """Copies of all entries, sorted by axis, operation and phase."""
        return [LedgerEntry(**asdict(self._entries[key])) for key in sorted(self._entries)]

    def reset(self) -> None:
        """Forget everything but the phase."""
        self._entries.clear()
        self.phase_seconds.clear()
        self.inside_seconds.clear()
        self.again_seconds = 0.0
        self._since = perf_counter()

    def write(self, path: str | Path) -> None:
        """Write the rows as a JSON list of objects."""
        text = json.dumps([asdict(row) for row in self.rows()], indent=1)
        write_text(Path(path), text + "\n")
