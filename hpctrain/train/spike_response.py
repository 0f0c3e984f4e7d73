"""Response of a run to spikes of the loss or the gradient norm: skip the update, or roll back."""

from __future__ import annotations

import logging
from dataclasses import replace

from hpctrain.fault_checks.spikes import Spike, SpikeDetector
from hpctrain.text import counted
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.rollback import Rollback
from hpctrain.train.trainer import Trainer


class SpikeResponse(Hook):
    """Hook that decides what a run does after a spike. It must come before hooks that report.

    Attributes:
        trainer: The trainer.
        rollback: Restores earlier states.
        pending_spike: Spike because of which the run must roll back before the next step, if any.
        reason_to_stop: Reason why the run must stop; "" if it continues.
    """

    def __init__(self, trainer: Trainer, rollback: Rollback) -> None:
        self.trainer, self.rollback = trainer, rollback
        self.pending_spike: Spike | None = None
        self.reason_to_stop = ""
        newest = self.spikes.recorded[-1] if self.spikes.recorded else None
        # A run that was killed during a rollback reports it in its next row of metrics.
        self._unreported = newest if newest is not None and newest.back_to == trainer.state.step else None

    @property
    def spikes(self) -> SpikeDetector:
        """Spike detector of the run."""
        return self.trainer.engine.control.spikes

    def after_step(self, done: StepDone) -> None:
        """Decide what to do if the step was a spike."""
        done.rollback_cause, self._unreported = self._unreported, None
        spike = done.result.spike
        if spike is None:
            return
        log, spikes = logging.getLogger("hpctrain"), self.spikes
        if spikes.count >= spikes.limit:
            spikes.record_spike(spike)
            self.reason_to_stop = f"step {spike.step}: {spike.why}; {_limit_text(spikes.limit)}"
            log.warning("%s", self.reason_to_stop)
        elif spikes.action == "rollback":
            self.pending_spike = spike
        else:
            spikes.record_spike(spike)
            so_far = counted(spikes.count, "spike")
            log.warning("step %d: %s; update skipped (%s so far)", spike.step, spike.why, so_far)

    def roll_back(self) -> None:
        """Return to a state that is `stability.spike_back` steps old, or else to the oldest one. Collective.

        If there is none, only the update of the spike is skipped.
        """
        spike, self.pending_spike = self.pending_spike, None
        assert spike is not None
        state, spikes, rollback = self.trainer.state, self.spikes, self.rollback
        log, record = logging.getLogger("hpctrain"), spikes.record
        samples = self.trainer.next_unused_sample(state.samples)
        latest = state.step - self.trainer.deck.stability.spike_back
        source = rollback.newest(latest) or rollback.oldest(state.step - 1)
        if source is None:
            spikes.record_spike(spike)
            log.warning("step %d: %s; no earlier state is left, update skipped", spike.step, spike.why)
            return
        before = rollback.restore(source)
        state.samples, left = samples, samples - before.samples
        spike = replace(spike, first_sample=before.samples, samples=left, back_to=before.step)
        spikes.restore_record(record, spike)
        log.warning(
            "step %d: %s; returns to step %d and skips the %s since then (%s so far)",
            *(spike.step, spike.why, before.step, counted(left, "sample"), counted(spikes.count, "spike")),
        )
        self._unreported = spike
        rollback.save()


def _limit_text(limit: int) -> str:
    return f"the run stops after more than stability.spike_most = {limit} spikes"
