"""What watches a run, and when it is called: hooks observe, and change no bit of what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from hpctrain.fault_checks.spikes import Spike
from hpctrain.train.control import StepDecision
from hpctrain.train.step import StepResult, TrainState


@dataclass
class StepDone:
    """A step that was made: its result, the state after it, and this rank's seconds, of which it spent
    `computing` outside of communication, and payload in bytes. `evaluated` are figures of each set that was
    evaluated after it, by name, the loss among them; `went_back` is why the run went back to the state before
    it, if it did.
    """

    result: StepResult
    state: TrainState
    seconds: float
    computing: float
    payload: int = 0
    evaluated: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    went_back: Spike | None = None


class Hook:
    """Called by the trainer and the run at these points, in a fixed order, on all ranks alike.

    Each method may be collective; what one does not care for does nothing.
    """

    def around_step(self, step: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """What surrounds the making of a step, from reading its samples to the update."""
        return nullcontext()

    def before_update(self) -> None:
        """Parameters and moments are about to change, by gradients that are summed and finite."""

    def after_step(self, done: StepDone) -> None:
        """A step was made."""

    def told_of_step(self, done: StepDone) -> None:
        """A step was made at which rank 0 is alone, and calls this alone: in a run with servers ranks meet
        where something is due, and only then `after_step` comes instead.
        """

    def before_going_back(self) -> None:
        """All state is about to be that of an earlier step."""

    def after_save(self) -> None:
        """A checkpoint was written, or begun."""

    def at_end(self, order: StepDecision) -> None:
        """No other step comes: all are done, or `order` says to stop. Its checkpoints are complete."""
