"""What a server does with pushes and pulls, and when: a decision of events alone, without messages.

In step, or within a distance, the pushes of a step are one update, added in the workers' order once all
are there; `version` counts these, and a pull for a step waits for the update of `distance + 1` steps before.
Without a distance each push is an update, as it comes, and no pull waits.

The staleness of a push is the number of updates between the pull that it was computed with and its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class QueuedPush(Generic[Payload]):
    """What one worker has pushed, and how stale it is."""

    worker: int
    payload: Payload
    staleness: int


class PushQueue(Generic[Payload]):
    """Keeps what cannot be applied yet: at most `bound` parcels."""

    def __init__(self, workers: int, distance: int | None, version: int = 0) -> None:
        self.workers, self.distance, self.version = workers, distance, version
        self._pulled = [version] * workers
        self._waiting: dict[int, int] = {}
        self._kept: dict[int, dict[int, Payload]] = {}
        self._stale: dict[tuple[int, int], int] = {}

    @property
    def bound(self) -> int:
        """The most parcels that are kept at once: of each step that may be under way every worker's."""
        return 1 if self.distance is None else self.workers * (self.distance + 1)

    @property
    def kept(self) -> int:
        """How many are kept now."""
        return sum(map(len, self._kept.values()))

    def push(self, worker: int, step: int, payload: Payload) -> Iterator[list[QueuedPush[Payload]]]:
        """A push of a step; what is to be applied now, as one update each, which the caller has to have done
        when it asks for the next.
        """
        if self.distance is None:
            yield [QueuedPush(worker, payload, self.version - self._pulled[worker])]
            return
        if not self.version <= step <= self.version + self.distance:
            raise RuntimeError(f"worker {worker} pushed step {step} to parameters of step {self.version}")
        of_step = self._kept.setdefault(step, {})
        if worker in of_step:
            raise RuntimeError(f"worker {worker} pushed step {step} twice")
        of_step[worker] = payload
        self._stale[worker, step] = step - self._pulled[worker]
        if self.kept > self.bound:
            raise RuntimeError(f"{self.kept} pushes are waiting, but at most {self.bound} may")
        while len(self._kept.get(self.version, ())) == self.workers:
            done, now = self._kept.pop(self.version), self.version
            yield [QueuedPush(each, done[each], self._stale.pop((each, now))) for each in sorted(done)]

    def applied(self) -> None:
        """What `push` gave was applied, or, of a step, is skipped: there is another version."""
        self.version += 1

    def pull(self, worker: int, step: int) -> None:
        """A worker wants the parameters, to compute its share of a step with."""
        if worker in self._waiting:
            raise RuntimeError(f"worker {worker} requested parameters twice")
        self._waiting[worker] = self.version if self.distance is None else step - self.distance

    def answers(self) -> list[int]:
        """The workers to be sent the parameters as they are now."""
        ready = sorted(worker for worker, version in self._waiting.items() if version <= self.version)
        for worker in ready:
            del self._waiting[worker]
            self._pulled[worker] = self.version
        return ready
