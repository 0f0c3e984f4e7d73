"""Going back: a run that takes up an earlier state of its own, from memory or from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from hpctrain.checkpoint.held import HeldState
from hpctrain.checkpoint.keep import agreed_checkpoints
from hpctrain.checkpoint.names import checkpoint_step
from hpctrain.checkpoint.verify import verify
from hpctrain.errors import HpctrainError
from hpctrain.optim.spikes import Spike, Spikes
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.step import TrainState
from hpctrain.train.trainer import Trainer
from hpctrain.watch.reporter import Reporter
from hpctrain.words import counted


class GoingBack(Hook):
    """What a run does about a step that was a spike: it leaves the update out, or goes back.

    `wanted` is the spike for which it is to `go` back, between steps; `stop` why it is to stop. Its place
    among the hooks is before those who report.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, reporter: Reporter) -> None:
        self.trainer, self.checkpoints, self.reporter = trainer, checkpoints, reporter
        self.wanted: Spike | None = None
        self.stop = ""
        newest = self.spikes.found[-1] if self.spikes.found else None
        # One that was killed on the way tells of it in its next row.
        self._told = newest if newest is not None and newest.back_to == trainer.state.step else None

    @property
    def spikes(self) -> Spikes:
        """Those of the run."""
        return self.trainer.engine.spikes

    def after_step(self, done: StepDone) -> None:
        """See what is to be done about a step that was a spike."""
        done.went_back, self._told = self._told, None
        spike = done.result.spike
        if spike is None:
            return
        log, spikes = logging.getLogger("hpctrain"), self.spikes
        if spikes.count >= spikes.most:
            spikes.remember(spike)
            self.stop = f"step {spike.step}: {spike.why}; {_more_than(spikes.most)}"
            log.warning("%s", self.stop)
        elif spikes.treatment == "rollback":
            self.wanted = spike
        else:
            spikes.remember(spike)
            so_far = counted(spikes.count, "spike")
            log.warning("step %d: %s; update left out (%s so far)", spike.step, spike.why, so_far)

    def go(self) -> None:
        """Go back for the spike that was found, to a state that is old enough, or else the oldest there is.

        Without any, what is left is that its update was left out. Collective.
        """
        spike, self.wanted = self.wanted, None
        assert spike is not None
        trainer, spikes = self.trainer, self.spikes
        log = logging.getLogger("hpctrain")
        here, record = replace(trainer.state), spikes.record
        self.checkpoints.finish()
        source = self._source(here.step - trainer.deck.stability.spike_back, here.step - 1)
        if source is None:
            spikes.remember(spike)
            log.warning("step %d: %s; no earlier state to go back to, update left out", spike.step, spike.why)
            return
        checkpoints = self.checkpoints
        if isinstance(source, Path):
            before = checkpoints.restore(source)
        else:
            before = checkpoints.give_back(source)
        self._take_up(before, here)
        left = here.samples - before.samples
        spike = replace(spike, first_sample=before.samples, samples=left, back_to=before.step)
        spikes.went_back(record, spike)
        log.warning(
            "step %d: %s; goes back to step %d without the %s since (%s so far)",
            *(spike.step, spike.why, before.step, counted(left, "sample"), counted(spikes.count, "spike")),
        )
        self._told = spike
        # Whoever resumes the run from here on finds what was left out.
        self.reporter.working("checkpointing")
        self.checkpoints.save(trainer.state)
        self.checkpoints.finish()
        self.reporter.saved(self.checkpoints.newest)

    def _source(self, old_enough: int, latest: int) -> HeldState | Path | None:
        """What to go back to: the newest of a step up to `old_enough`, else the oldest up to `latest`, in
        memory or, if it is good, on the disk. Collective.
        """
        held, everyone = self.checkpoints.held, self.trainer.world.everyone
        on_disk = [
            (checkpoint_step(path) or 0, path)
            for path in agreed_checkpoints(self.checkpoints.folder, everyone)
        ]
        copy = held.newest(old_enough)
        for step, path in on_disk:
            if step <= old_enough and (copy is None or step > copy.step) and self._is_good(path):
                return path
        if copy is not None:
            return copy
        copy = held.oldest
        for step, path in sorted(on_disk):
            if step <= latest and (copy is None or step < copy.step) and self._is_good(path):
                return path
        return copy

    def _is_good(self, path: Path) -> bool:
        try:
            verify(path, self.trainer.world.everyone)
        except HpctrainError as error:
            logging.getLogger("hpctrain").warning("%s; passed over", error.problems[0])
            return False
        return True

    def _take_up(self, before: TrainState, here: TrainState) -> None:
        """Go on from the state `before`, with the samples behind those up to `here`."""
        state = self.trainer.state
        state.step, state.tokens, state.skipped = before.step, before.tokens, before.skipped
        state.samples = here.samples
        self.checkpoints.held.forget_beyond(before.step)
        self.reporter.went_back(before.step)


def _more_than(most: int) -> str:
    return f"more than stability.spike_most = {most} spikes: the run stops, to be looked at"
