"""Order in which a server applies pushes and answers pulls. It depends on events only, not on messages.

With a distance, the pushes of a step are one update, which is made when all have arrived, in the order of the
workers. A pull for a step waits until the update of `distance + 1` steps before is made; a distance of 0 is
synchronous training. Without a distance, each push is one update when it arrives, and no pull waits.

The staleness of a push is the number of updates between the pull that it was computed with and its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class QueuedPush(Generic[Payload]):
    """Push of a worker that can be applied now, with its staleness."""

    worker: int
    payload: Payload
    staleness: int


class PushQueue(Generic[Payload]):
    """Queue of pushes that cannot be applied yet, and of pulls that cannot be answered yet.

    Attributes:
        workers: Number of workers.
        distance: Number of steps that a worker may be ahead of the slowest one; None for any number.
        version: Number of updates so far.
    """

    def __init__(self, workers: int, distance: int | None, version: int = 0) -> None:
        self.workers, self.distance, self.version = workers, distance, version
        self._pulled_versions = [version] * workers
        self._waiting_pulls: dict[int, int] = {}
        self._pushes: dict[int, dict[int, Payload]] = {}
        self._staleness: dict[tuple[int, int], int] = {}

    @property
    def bound(self) -> int:
        """Largest number of pushes in the queue: one per worker and unfinished step."""
        return 1 if self.distance is None else self.workers * (self.distance + 1)

    @property
    def size(self) -> int:
        """Number of pushes in the queue."""
        return sum(map(len, self._pushes.values()))

    def push(self, worker: int, step: int, payload: Payload) -> Iterator[list[QueuedPush[Payload]]]:
        """Add a push of a step, and yield the pushes of each update that must be made now.

        The caller must make an update before it requests the next one.
        """
        if self.distance is None:
            yield [QueuedPush(worker, payload, self.version - self._pulled_versions[worker])]
            return
        if not self.version <= step <= self.version + self.distance:
            raise RuntimeError(f"worker {worker} pushed step {step} to parameters of step {self.version}")
        of_step = self._pushes.setdefault(step, {})
        if worker in of_step:
            raise RuntimeError(f"worker {worker} pushed step {step} twice")
        of_step[worker] = payload
        self._staleness[worker, step] = step - self._pulled_versions[worker]
        if self.size > self.bound:
            raise RuntimeError(f"{self.size} pushes are waiting, but at most {self.bound} may")
        while len(self._pushes.get(self.version, ())) == self.workers:
            done, now = self._pushes.pop(self.version), self.version
            yield [QueuedPush(each, done[each], self._staleness.pop((each, now))) for each in sorted(done)]

    def finish_update(self) -> None:
        """Record that the update which `push` yielded was made, or skipped."""
        self.version += 1

    def pull(self, worker: int, step: int) -> None:
        """Add the request of a worker for the parameters of a step."""
        if worker in self._waiting_pulls:
            raise RuntimeError(f"worker {worker} requested parameters twice")
        self._waiting_pulls[worker] = self.version if self.distance is None else step - self.distance

    def answers(self) -> list[int]:
        """Return the workers to which the present parameters must be sent."""
        ready = sorted(worker for worker, version in self._waiting_pulls.items() if version <= self.version)
        for worker in ready:
            del self._waiting_pulls[worker]
            self._pulled_versions[worker] = self.version
        return ready
