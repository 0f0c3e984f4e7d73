"""What the head of a run with servers notes of the updates: steps, as any run has them, and staleness."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean, median

from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.train.hook import StepDone
from hpctrain.train.server.server_messages import Push
from hpctrain.train.step import StepResult, TrainState
from hpctrain.watch.stragglers import WINDOW, Straggler, find_stragglers, warn_of


class UpdateLog:
    """Advances `state` by the pushes that are applied: as many as there are `workers` are a step.

    `names` are those of the metrics, `moved` tells the bytes that this rank has sent and received, `tell`
    gets every step but the one after which all meet, which stays in `last`. `staleness` counts the pushes of
    each staleness, those of all steps together, `left_out` those that were not finite where others of their
    step were applied.
    """

    def __init__(
        self,
        state: TrainState,
        names: Sequence[str],
        workers: int,
        tell: Callable[[StepDone], None],
        moved: Callable[[], int] = lambda: 0,
    ) -> None:
        self.state, self.names, self.workers, self.tell = state, tuple(names), workers, tell
        self.moved = moved
        self.staleness: Counter[int] = Counter()
        self.left_out = 0
        self.seconds: list[deque[float]] = [deque(maxlen=4 * WINDOW) for _ in range(workers)]
        """How long each worker computed its newest shares, until `SlowWorkers` takes them."""
        self.last: StepDone | None = None
        self.end = state.step
        self._began, self._moved = time.perf_counter(), moved()
        self._begin_step()

    def begin(self, end: int) -> None:
        """Steps up to `end` follow."""
        self.end, self.last = end, None
        self._began, self._moved = time.perf_counter(), self.moved()
        self._begin_step()

    def _begin_step(self) -> None:
        self._pushes: list[Push] = []
        self._stale: Counter[int] = Counter()
        self._norms: list[float] = []
        self._skipped = self._updates = 0

    def enter(
        self,
        senders: Sequence[int],
        pushes: Sequence[Push],
        staleness: Sequence[int],
        norm: float,
        rate: float,
        finite: bool,
        batch: int,
    ) -> None:
        """An update of pushes of workers, the `senders`, was made, or skipped if it is not `finite`."""
        for worker, push in zip(senders, pushes, strict=True):
            self.seconds[worker].append(push.seconds)
        together = len(pushes) > 1 or self.workers == 1
        self._updates += 1
        self._skipped += not finite
        self._stale.update(staleness)
        self._pushes += pushes
        if finite or together:
            self._norms.append(norm)
        if len(self._pushes) == self.workers:
            self._close(rate, batch, together)

    def _close(self, rate: float, batch: int, together: bool) -> None:
        """A step is done: of an update of all pushes its metrics, of several those of what was applied."""
        counted = [push for push in self._pushes if together or push.finite]
        tokens = sum(push.tokens for push in counted)
        columns = zip(*(push.metrics for push in counted), strict=True)
        sums = dict(zip(self.names, map(sum, columns), strict=True)) if counted else {}
        metrics = {name: sums[name] / max(1, tokens) if sums else nan for name in self.names}
        state = self.state
        seen = sum(push.tokens for push in self._pushes)
        state.step += 1
        state.samples += batch
        state.tokens += seen
        self.staleness.update(self._stale)
        histogram = tuple(self._stale[number] for number in range(max(self._stale) + 1))
        norm = (self._norms[0] if together else fmean(self._norms)) if self._norms else nan
        all_skipped = self._skipped == self._updates
        state.skipped += all_skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if all_skipped else 0
        if self._skipped and not all_skipped:
            self.left_out += self._skipped
            logging.getLogger("hpctrain").warning(
                "step %d: %d of %d pushes were not finite and were discarded (%d so far)",
                state.step,
                self._skipped,
                self.workers,
                self.left_out,
            )
        result = StepResult(metrics, norm, rate, batch, seen, all_skipped, staleness=histogram)
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        moved = self.moved()
        payload, self._moved = moved - self._moved, moved
        done = StepDone(result, state, seconds, seconds, payload)
        self._begin_step()
        if state.step == self.end:
            self.last = done
        else:
            self.tell(done)


class SlowWorkers:
    """Finds workers whose shares take longer than the others', by what pushes say; only the head does."""

    def __init__(
        self, book: UpdateLog | None, roles: ServerRoles, hosts: Sequence[str], factor: float
    ) -> None:
        """Named are workers above `factor` times the median; 0: never."""
        self._book, self._roles, self._hosts, self._factor = book, roles, hosts, factor
        self._steps = 0
        self._named: set[int] = set()

    def step(self, seconds: float) -> list[Straggler] | None:  # noqa: ARG002
        """See Comparison; `seconds` are the head's, which computes nothing."""
        if self._book is None or self._factor <= 0:
            return None
        self._steps += 1
        if self._steps < WINDOW:
            return None
        self._steps = 0
        times = [median(each) if each else 0.0 for each in self._book.seconds]
        for each in self._book.seconds:
            each.clear()
        servers = self._roles.servers
        found = find_stragglers(times, [0] * len(times), self._hosts[servers:], self._factor)
        slow = [replace(each, rank=each.rank + servers) for each in found]
        self._named = warn_of(slow, self._named)
        return slow


def histogram_text(staleness: Counter[int]) -> str:
    """`0: 120, 1: 37, 3: 2`: pushes of each staleness."""
    return ", ".join(f"{number}: {staleness[number]}" for number in sorted(staleness))
