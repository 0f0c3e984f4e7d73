"""Assignment of shares of the samples to workers by the head, and pauses of all workers.

A step has one share for each worker. With a distance, each worker computes the share of its number in each
step. Without one, a share goes to the next worker that asks, so that a slow worker computes fewer. In both
cases, all shares of the steps before a pause are computed once, and no share of a later step is started.
The assignment depends on events only, not on messages or time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleShare:
    """Share number `number` of step `step`."""

    step: int
    number: int


@dataclass
class ShareAssignment:
    """Assignment of the shares of several steps.

    Attributes:
        workers: Number of workers.
        distance: Number of steps that the fastest worker may be ahead of the slowest (stale-synchronous
            training, Ho et al., NIPS 2013). It starts a step when all workers have finished the step
            `distance + 1` before. None for any number.
        step: First step.
        end: Step after the last one.
        done: Number of the next step of each worker; without a distance, the number of its pushed shares.
        paused: Workers that pause.
    """

    workers: int
    distance: int | None
    step: int
    end: int
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.done = [self.step if self.distance is not None else 0] * self.workers
        self._started = list(self.done)
        self._next = self.step * self.workers
        self._asking: set[int] = set()
        self.paused: set[int] = set()

    @property
    def is_finished(self) -> bool:
        """True if all workers pause and have finished their shares."""
        return len(self.paused) == self.workers

    def ask(self, worker: int, pushed: bool) -> None:
        """Record that a worker requests a share. `pushed` is True if it has finished its last one."""
        if worker in self._asking or worker in self.paused:
            raise RuntimeError(f"worker {worker} requested work while it waits or pauses")
        self.done[worker] += pushed
        self._asking.add(worker)

    def pause(self) -> None:
        """Let all workers pause after the last step that any of them has started."""
        if self.distance is None:
            self.end = min(self.end, -(-self._next // self.workers))
        else:
            self.end = min(self.end, max(self._started))

    def stop(self) -> None:
        """Assign no more shares, since the run ends with an error."""
        self.end = self.step
        self._next = self.end * self.workers

    def answers(self) -> list[tuple[int, SampleShare | None]]:
        """Return the workers that get an answer now, with their shares; None for a worker that must pause."""
        assigned: list[tuple[int, SampleShare | None]] = []
        for worker in sorted(self._asking):
            if self.distance is None:
                share = self._next_share(worker)
            elif self._started[worker] >= self.end:
                share = None
            elif self.done[worker] - min(self.done) > self.distance:
                continue
            else:
                share = SampleShare(self.done[worker], worker)
                self._started[worker] = share.step + 1
            if share is None:
                self.paused.add(worker)
            self._asking.discard(worker)
            assigned.append((worker, share))
        return assigned

    def _next_share(self, worker: int) -> SampleShare | None:
        if self._next >= self.end * self.workers:
            return None
        share = SampleShare(*divmod(self._next, self.workers))
        self._next += 1
        self._started[worker] += 1
        return share
