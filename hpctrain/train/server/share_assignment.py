"""Who computes which share of the samples next, and when all pause: decided by the first server alone.

A step has one share for each worker. In step, or within a distance, every worker has the share of its
number in each step; without one, shares go in their order to whoever asks, so that a slow worker takes fewer.
Either way all shares of the steps before a pause are computed once, and none of a later one is begun.
No message and no clock is known here: events go in, answers come out.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleShare:
    """Number `number` of the shares of step `step`."""

    step: int
    number: int


@dataclass
class ShareAssignment:
    """Shares of the steps `step` to `end`, of `workers` a step.

    `distance` is how many steps the fastest worker may be ahead of the slowest (stale-synchronous,
    Ho et al., NIPS 2013): it begins a step once all have done that of `distance + 1` before; None: any.
    """

    workers: int
    distance: int | None
    step: int
    end: int
    done: list[int] = field(init=False)
    """Steps of which each worker has pushed its share; without a distance, all shares that it has pushed."""

    def __post_init__(self) -> None:
        self.done = [self.step if self.distance is not None else 0] * self.workers
        self._begun = list(self.done)
        self._next = self.step * self.workers
        self._asking: set[int] = set()
        self.paused: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether all workers pause: all they began is done."""
        return len(self.paused) == self.workers

    def ask(self, worker: int, pushed: bool) -> None:
        """A worker asks for work, having `pushed` the share that it was given before, if it was."""
        if worker in self._asking or worker in self.paused:
            raise RuntimeError(f"worker {worker} requested work while it waits or pauses")
        self.done[worker] += pushed
        self._asking.add(worker)

    def pause(self) -> None:
        """Let all workers pause as soon as none has begun a later step than the others have done."""
        if self.distance is None:
            self.end = min(self.end, -(-self._next // self.workers))
        else:
            self.end = min(self.end, max(self._begun))

    def break_off(self) -> None:
        """Give out nothing more: the run ends by an error."""
        self.end = self.step
        self._next = self.end * self.workers

    def answers(self) -> list[tuple[int, SampleShare | None]]:
        """Whom to give which share now; None to whoever is to pause."""
        given: list[tuple[int, SampleShare | None]] = []
        for worker in sorted(self._asking):
            if self.distance is None:
                share = self._take(worker)
            elif self._begun[worker] >= self.end:
                share = None
            elif self.done[worker] - min(self.done) > self.distance:
                continue
            else:
                share = SampleShare(self.done[worker], worker)
                self._begun[worker] = share.step + 1
            if share is None:
                self.paused.add(worker)
            self._asking.discard(worker)
            given.append((worker, share))
        return given

    def _take(self, worker: int) -> SampleShare | None:
        if self._next >= self.end * self.workers:
            return None
        share = SampleShare(*divmod(self._next, self.workers))
        self._next += 1
        self._begun[worker] += 1
        return share
