"""Log of the updates of a run with servers, kept by the head: steps as in any run, and staleness."""

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
from hpctrain.watch.stragglers import WINDOW, Straggler, find_stragglers, warn_of_new


class UpdateLog:
    """Counts the applied pushes of workers as steps: one step has as many pushes as there are workers.

    Attributes:
        state: Counters of the run, which the log advances.
        names: Names of the metrics.
        workers: Number of workers.
        on_step: Called after each step without synchronization.
        transferred_bytes: Returns the number of bytes that this rank has sent and received.
        staleness: Number of pushes of each staleness so far.
        discarded_pushes: Number of pushes that were not finite while others of their step were applied.
        seconds: Seconds of the last shares of each worker, until `SlowWorkers` takes them.
        last_step: The step at which all ranks synchronize, once it is done.
        end: Number of that step.
    """

    def __init__(
        self,
        state: TrainState,
        names: Sequence[str],
        workers: int,
        on_step: Callable[[StepDone], None],
        transferred_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.state, self.names, self.workers, self.on_step = state, tuple(names), workers, on_step
        self.transferred_bytes = transferred_bytes
        self.staleness: Counter[int] = Counter()
        self.discarded_pushes = 0
        self.seconds: list[deque[float]] = [deque(maxlen=4 * WINDOW) for _ in range(workers)]
        self.last_step: StepDone | None = None
        self.end = state.step
        self._step_start, self._bytes_before = time.perf_counter(), transferred_bytes()
        self._start_step()

    def start(self, end: int) -> None:
        """Start the steps up to `end`."""
        self.end, self.last_step = end, None
        self._step_start, self._bytes_before = time.perf_counter(), self.transferred_bytes()
        self._start_step()

    def _start_step(self) -> None:
        self._pushes: list[Push] = []
        self._stale: Counter[int] = Counter()
        self._norms: list[float] = []
        self._skipped = self._updates = 0

    def record(
        self,
        senders: Sequence[int],
        pushes: Sequence[Push],
        staleness: Sequence[int],
        norm: float,
        rate: float,
        finite: bool,
        batch: int,
    ) -> None:
        """Record an update that was made, or skipped if it is not finite.

        Args:
            senders: Workers of the pushes.
            pushes: Pushes of the update.
            staleness: Staleness of each push.
            norm: Gradient norm of the update.
            rate: Learning rate.
            finite: True if the update was made.
            batch: Number of sequences of a step.
        """
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
            self._finish_step(rate, batch, together)

    def _finish_step(self, rate: float, batch: int, together: bool) -> None:
        """Finish a step. With one update per push, its metrics are those of the applied pushes."""
        counted = [push for push in self._pushes if together or push.finite]
        tokens = sum(push.tokens for push in counted)
        columns = zip(*(push.metrics for push in counted), strict=True)
        sums = dict(zip(self.names, map(sum, columns), strict=True)) if counted else {}
        metrics = {name: sums[name] / max(1, tokens) if sums else nan for name in self.names}
        state = self.state
        tokens_of_all = sum(push.tokens for push in self._pushes)
        state.step += 1
        state.samples += batch
        state.tokens += tokens_of_all
        self.staleness.update(self._stale)
        histogram = tuple(self._stale[number] for number in range(max(self._stale) + 1))
        norm = (self._norms[0] if together else fmean(self._norms)) if self._norms else nan
        all_skipped = self._skipped == self._updates
        state.skipped += all_skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if all_skipped else 0
        if self._skipped and not all_skipped:
            self.discarded_pushes += self._skipped
            logging.getLogger("hpctrain").warning(
                "step %d: %d of %d pushes were not finite and were discarded (%d so far)",
                state.step,
                self._skipped,
                self.workers,
                self.discarded_pushes,
            )
        result = StepResult(metrics, norm, rate, batch, tokens_of_all, all_skipped, staleness=histogram)
        now = time.perf_counter()
        seconds, self._step_start = now - self._step_start, now
        total_bytes = self.transferred_bytes()
        payload, self._bytes_before = total_bytes - self._bytes_before, total_bytes
        done = StepDone(result, state, seconds, seconds, payload)
        self._start_step()
        if state.step == self.end:
            self.last_step = done
        else:
            self.on_step(done)


class SlowWorkers:
    """Finds, on the head, workers whose shares take longer than those of others."""

    def __init__(
        self, update_log: UpdateLog | None, roles: ServerRoles, hosts: Sequence[str], factor: float
    ) -> None:
        """Report workers above `factor` times the median; a factor of 0 turns the check off."""
        self._update_log, self._roles, self._hosts, self._factor = update_log, roles, hosts, factor
        self._steps = 0
        self._reported: set[int] = set()

    def step(self, seconds: float) -> list[Straggler] | None:  # noqa: ARG002
        """Return the slow workers at the end of a window of steps, otherwise None (see TimeComparison)."""
        if self._update_log is None or self._factor <= 0:
            return None
        self._steps += 1
        if self._steps < WINDOW:
            return None
        self._steps = 0
        times = [median(each) if each else 0.0 for each in self._update_log.seconds]
        for each in self._update_log.seconds:
            each.clear()
        servers = self._roles.servers
        stragglers = find_stragglers(times, [0] * len(times), self._hosts[servers:], self._factor)
        slow = [replace(each, rank=each.rank + servers) for each in stragglers]
        self._reported = warn_of_new(slow, self._reported)
        return slow


def histogram_text(staleness: Counter[int]) -> str:
    """Return the number of pushes of each staleness as text, such as `0: 120, 1: 37, 3: 2`."""
    return ", ".join(f"{number}: {staleness[number]}" for number in sorted(staleness))
