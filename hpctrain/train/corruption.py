"""The guard against silent faults: what a step computed, and what lay in memory, is checked before an update.

Whatever one rank finds, all ranks learn before any of them changes a parameter: they raise SilentFaultError,
and the state is as before the step, but for what was found wrong of it; what the step itself changes is given
back. Who trains decides what follows: the step is made again, or an earlier state is taken up.

A verdict that arrives wrong at one rank would part them. It is exchanged twice: first what was found, then,
as a word of which no single bit matters, whether that was anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from hpctrain.audit.bits import word_sum
from hpctrain.audit.detected_fault import DetectedFault, SilentFaultError
from hpctrain.audit.message_audit import message_audit_of
from hpctrain.checkpoint.state_snapshots import StateSnapshot
from hpctrain.engine.built_engine import Engine
from hpctrain.train.counters import Counters
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.reduced_gradients import ReducedGradients
from hpctrain.train.repeated import Repetition
from hpctrain.train.resting_state import RestingState, WatchedMemory, tensors_changed_in_steps
from hpctrain.train.step import StepGuard, TrainState

REPEATED = 10
"""A micro-batch is computed again so many times less often than copies are compared."""

_WORD = (1 << 63) - 1
"""Something was found; nothing is 0. Of a word with a bit changed, half of the bits tell."""


class Guard(StepGuard, Hook):
    """Checks every step; copies of the same are compared every `every` steps. The engine's products and the
    messages of its groups may be checked, too, and by `repetition`, if there is one, a micro-batch is
    computed again every REPEATED times as many steps.

    Its place is first among the hooks, so that nothing comes between an update and its fingerprints.
    """

    def __init__(
        self, engine: Engine, state: TrainState, every: int, repetition: Repetition | None = None
    ) -> None:
        self.engine, self.every, self.repetition = engine, every, repetition
        self.counters = Counters(engine, state)
        self.resting = RestingState(engine.stage.buckets, engine.state())
        self._learning = [tensor for tensor in engine.state() if tensor.changes_in_step]
        self.learned = WatchedMemory(tensors_changed_in_steps(self._learning), engine.world.rank)
        self.summed = ReducedGradients(engine.stage.synchronizer, engine.world.rank)
        self._products, self._messages = (
            engine.stage.layer_context.products.audit,
            message_audit_of(engine.world),
        )
        self._early: list[DetectedFault] = []
        self._repeated: list[DetectedFault] = []
        self._miscounted: list[DetectedFault] = []
        self._before: StateSnapshot | None = None
        self._step = 0

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Look at what the step itself changes, and keep it: it has to be there again for another try."""
        self._miscounted = self.counters.put_right()
        self._step, self._early, self._repeated = self.counters.step or step, self.learned.changed(), []
        if self._learning:
            former, self._before = self._before, StateSnapshot(self._step, {})
            self._before.take(self._learning, former)
        if self._products is not None:
            self._products.begin_step(self._step)
        if self.repetition is not None and self._step > 1 and self._step % (REPEATED * self.every) == 0:
            self._repeated = self.repetition.compare()
            if self._before is not None:
                self._before.restore(self._learning)
        self.summed.forget()
        yield

    @override
    def require_sound(self, totals: Sequence[float]) -> None:
        resting = [*self._early, *self.resting.changed()]
        computed = [] if self._products is None else self._products.collect_faults()
        try:
            miscounted = [*self._miscounted, *self.counters.put_right()]
            wrong = [*self._repeated, *computed, *self._sent(), *self.summed.changed()]
            found = [*resting, *miscounted, *wrong]
            self._agree(totals, found, spoilt=bool(resting))
        except SilentFaultError:
            self.engine.stage.synchronizer.end_step(False, 1.0)
            if self._before is not None:
                self._before.restore(self._learning)
                self._before = None
            self.engine.world.ledger.phase = "other"
            raise

    @override
    def require_rest(self) -> None:
        changed = [*self.learned.changed(), *self.resting.changed()]
        self._agree([], [*changed, *self.resting.differing()])

    def after_step(self, done: StepDone) -> None:
        """Know again what lies in memory from here on; see whether it is what ranks sent each other."""
        self.resting.take()
        self.learned.take()
        faults = [*self.counters.take(), *self._sent()]
        if done.state.step % self.every == 0:
            faults += self.resting.differing()
        self._agree([], faults)

    @override
    def forget(self) -> None:
        self.resting.forget()
        self.learned.forget()
        self.counters.forget()

    def _agree(self, totals: Sequence[float], own: list[DetectedFault], spoilt: bool = True) -> None:
        """Raise SilentFaultError where any rank found anything, or has other `totals`; `spoilt` says that the
        state of this rank is not to go on from then.
        """
        everyone = self.engine.world.everyone
        digest = int(word_sum(torch.tensor([0.0, *totals], dtype=torch.float64)))
        told = everyone.all_gather(torch.tensor([[digest, len(own)]], device=everyone.device)).tolist()
        found = any(number != digest or count for number, count in told)
        word = torch.tensor([_WORD if found else 0], device=everyone.device)
        words = everyone.all_gather(word).tolist()
        if not any(each.bit_count() > _WORD.bit_count() // 2 for each in words):
            return
        rows = everyone.all_gather_object([[fault.row for fault in own], digest, spoilt and bool(own)])
        faults = [DetectedFault.from_row(row) for row_of in rows for row in row_of[0]]
        if not faults and not totals:
            return  # it was only told wrong, which is for those who look at messages to tell
        if not faults:
            faults = [_of_metrics([row[1] for row in rows], everyone.ranks)]
        raise SilentFaultError(self._step, list(dict.fromkeys(faults)), not any(row[2] for row in rows))

    def _sent(self) -> list[DetectedFault]:
        """What was wrong with messages since the last time."""
        return [] if self._messages is None else self._messages.collect_faults()


def _of_metrics(digests: Sequence[int], ranks: Sequence[int]) -> DetectedFault:
    """What there is to tell where ranks have other metrics of a step, or had when they told each other."""
    counts = Counter(digests).most_common(2)
    right = counts[0][0] if len(counts) == 1 or counts[0][1] > counts[1][1] else None
    wrong = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != right]
    what = "the metrics of the step differ between ranks"
    return DetectedFault("message", "all_reduce of all ranks", "step", tuple(wrong or ranks), what)
