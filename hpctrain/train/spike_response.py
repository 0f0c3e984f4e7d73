"""Going back: a run that takes up an earlier state of its own, from memory or from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace

from hpctrain.fault_checks.spikes import Spike, SpikeDetector
from hpctrain.text import counted
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.rollback import Rollback
from hpctrain.train.trainer import Trainer


class SpikeResponse(Hook):
    """What a run does about a step that was a spike: it leaves the update out, or goes back.

    `wanted` is the spike for which it is to `go` back, between steps; `stop` why it is to stop. Its place
    among the hooks is before those who report.
    """

    def __init__(self, trainer: Trainer, way: Rollback) -> None:
        self.trainer, self.way = trainer, way
        self.wanted: Spike | None = None
        self.stop = ""
        newest = self.spikes.recorded[-1] if self.spikes.recorded else None
        # One that was killed on the way tells of it in its next row.
        self._told = newest if newest is not None and newest.back_to == trainer.state.step else None

    @property
    def spikes(self) -> SpikeDetector:
        """Those of the run."""
        return self.trainer.engine.control.spikes

    def after_step(self, done: StepDone) -> None:
        """See what is to be done about a step that was a spike."""
        done.rollback_cause, self._told = self._told, None
        spike = done.result.spike
        if spike is None:
            return
        log, spikes = logging.getLogger("hpctrain"), self.spikes
        if spikes.count >= spikes.limit:
            spikes.record_spike(spike)
            self.stop = f"step {spike.step}: {spike.why}; {_more_than(spikes.limit)}"
            log.warning("%s", self.stop)
        elif spikes.action == "rollback":
            self.wanted = spike
        else:
            spikes.record_spike(spike)
            so_far = counted(spikes.count, "spike")
            log.warning("step %d: %s; update skipped (%s so far)", spike.step, spike.why, so_far)

    def go(self) -> None:
        """Go back for the spike that was found, to a state that is old enough, or else the oldest there is.

        Without any, what is left is that its update was left out. Collective.
        """
        spike, self.wanted = self.wanted, None
        assert spike is not None
        state, spikes, way = self.trainer.state, self.spikes, self.way
        log, record = logging.getLogger("hpctrain"), spikes.record
        samples = self.trainer.next_unused_sample(state.samples)
        source = way.newest(state.step - self.trainer.deck.stability.spike_back) or way.oldest(state.step - 1)
        if source is None:
            spikes.record_spike(spike)
            log.warning("step %d: %s; no earlier state is left, update skipped", spike.step, spike.why)
            return
        before = way.take(source)
        state.samples, left = samples, samples - before.samples
        spike = replace(spike, first_sample=before.samples, samples=left, back_to=before.step)
        spikes.restore_record(record, spike)
        log.warning(
            "step %d: %s; returns to step %d and skips the %s since then (%s so far)",
            *(spike.step, spike.why, before.step, counted(left, "sample"), counted(spikes.count, "spike")),
        )
        self._told = spike
        way.save()


def _more_than(most: int) -> str:
    return f"the run stops after more than stability.spike_most = {most} spikes"
