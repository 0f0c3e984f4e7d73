"""Guard against silent faults, which checks the results of a step and the state in memory before an update.

If any rank finds a fault, all ranks raise SilentFaultError before any of them changes a parameter. The state
is then as before the step, except for the faults. State that the passes of the step change is restored. The
caller decides whether to repeat the step or to restore an earlier state.

A wrong verdict on one rank would make ranks diverge. So the verdict is exchanged twice: first the number of
faults, then a word that tells whether there is any, in which no single bit matters.
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
from hpctrain.train.repeated_micro_batch import Repetition
from hpctrain.train.step import StepGuard, TrainState
from hpctrain.train.update_only_state import UpdateOnlyState, WatchedMemory, tensors_changed_in_steps

COMPARISONS_PER_REPETITION = 10
"""Number of comparisons of replicas for each repetition of a micro-batch."""

_FAULT_WORD = (1 << 63) - 1
"""Word for a fault; 0 stands for none. The majority of its bits counts."""


class Guard(StepGuard, Hook):
    """Hook that checks every step. It must be the first hook that follows an update.

    Args:
        engine: The engine. If its products and messages are audited, their faults are collected.
        state: Counters of the run.
        every: Number of steps after which replicas are compared.
        repetition: Repeats a micro-batch every `COMPARISONS_PER_REPETITION * every` steps, if given.
    """

    def __init__(
        self, engine: Engine, state: TrainState, every: int, repetition: Repetition | None = None
    ) -> None:
        self.engine, self.every, self.repetition = engine, every, repetition
        self.counters = Counters(engine, state)
        self.update_only = UpdateOnlyState(engine.stage.buckets, engine.state())
        self._changing_tensors = [tensor for tensor in engine.state() if tensor.changes_in_step]
        self.step_state = WatchedMemory(tensors_changed_in_steps(self._changing_tensors), engine.world.rank)
        self.reduced_gradients = ReducedGradients(engine.stage.synchronizer, engine.world.rank)
        self._products, self._messages = (
            engine.stage.layer_context.products.audit,
            message_audit_of(engine.world),
        )
        self._early_faults: list[DetectedFault] = []
        self._repetition_faults: list[DetectedFault] = []
        self._counter_faults: list[DetectedFault] = []
        self._before: StateSnapshot | None = None
        self._step = 0

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Check the state that the step changes, and copy it, so that the step can be repeated."""
        self._counter_faults = self.counters.restore_changed()
        self._step, self._early_faults, self._repetition_faults = (
            self.counters.step or step,
            self.step_state.find_changes(),
            [],
        )
        if self._changing_tensors:
            former, self._before = self._before, StateSnapshot(self._step, {})
            self._before.take(self._changing_tensors, former)
        if self._products is not None:
            self._products.begin_step(self._step)
        if (
            self.repetition is not None
            and self._step > 1
            and self._step % (COMPARISONS_PER_REPETITION * self.every) == 0
        ):
            self._repetition_faults = self.repetition.compare()
            if self._before is not None:
                self._before.restore(self._changing_tensors)
        self.reduced_gradients.discard()
        yield

    @override
    def check_step(self, totals: Sequence[float]) -> None:
        state_faults = [*self._early_faults, *self.update_only.find_changes()]
        product_faults = [] if self._products is None else self._products.collect_faults()
        try:
            counter_faults = [*self._counter_faults, *self.counters.restore_changed()]
            step_faults = [
                *self._repetition_faults,
                *product_faults,
                *self._message_faults(),
                *self.reduced_gradients.find_changes(),
            ]
            faults = [*state_faults, *counter_faults, *step_faults]
            self._agree(totals, faults, changes_state=bool(state_faults))
        except SilentFaultError:
            self.engine.stage.synchronizer.end_step(False, 1.0)
            if self._before is not None:
                self._before.restore(self._changing_tensors)
                self._before = None
            self.engine.world.ledger.phase = "other"
            raise

    @override
    def check_state(self) -> None:
        changed = [*self.step_state.find_changes(), *self.update_only.find_changes()]
        self._agree([], [*changed, *self.update_only.find_replica_differences()])

    def after_step(self, done: StepDone) -> None:
        """Take new fingerprints, and check messages and replicas."""
        self.update_only.record()
        self.step_state.record()
        faults = [*self.counters.record(), *self._message_faults()]
        if done.state.step % self.every == 0:
            faults += self.update_only.find_replica_differences()
        self._agree([], faults)

    @override
    def discard_fingerprints(self) -> None:
        self.update_only.discard()
        self.step_state.discard()
        self.counters.discard()

    def _agree(
        self, totals: Sequence[float], local_faults: list[DetectedFault], changes_state: bool = True
    ) -> None:
        """Raise SilentFaultError on all ranks if any rank has a fault, or other `totals`. Collective.

        Args:
            totals: Values that must be the same on all ranks.
            local_faults: Faults of this rank.
            changes_state: True if these faults have changed the state of this rank.
        """
        everyone = self.engine.world.everyone
        digest = int(word_sum(torch.tensor([0.0, *totals], dtype=torch.float64)))
        counts = everyone.all_gather(
            torch.tensor([[digest, len(local_faults)]], device=everyone.device)
        ).tolist()
        has_fault = any(number != digest or count for number, count in counts)
        word = torch.tensor([_FAULT_WORD if has_fault else 0], device=everyone.device)
        words = everyone.all_gather(word).tolist()
        if not any(each.bit_count() > _FAULT_WORD.bit_count() // 2 for each in words):
            return
        rows = everyone.all_gather_object(
            [[fault.row for fault in local_faults], digest, changes_state and bool(local_faults)]
        )
        faults = [DetectedFault.from_row(row) for row_of in rows for row in row_of[0]]
        if not faults and not totals:
            return  # only this message was wrong, which the check of messages reports
        if not faults:
            faults = [_metrics_fault([row[1] for row in rows], everyone.ranks)]
        raise SilentFaultError(self._step, list(dict.fromkeys(faults)), not any(row[2] for row in rows))

    def _message_faults(self) -> list[DetectedFault]:
        """Return the faults of messages since the last call."""
        return [] if self._messages is None else self._messages.collect_faults()


def _metrics_fault(digests: Sequence[int], ranks: Sequence[int]) -> DetectedFault:
    """Return the fault for metrics that differ between ranks. It names the ranks in the minority."""
    counts = Counter(digests).most_common(2)
    right = counts[0][0] if len(counts) == 1 or counts[0][1] > counts[1][1] else None
    wrong = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != right]
    what = "the metrics of the step differ between ranks"
    return DetectedFault("message", "all_reduce of all ranks", "step", tuple(wrong or ranks), what)
