"""Hooks: observers of a run. A hook never changes a bit of what the run computes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from hpctrain.fault_checks.spikes import Spike
from hpctrain.train.control import StepDecision
from hpctrain.train.step import StepResult, TrainState


@dataclass
class StepDone:
    """A completed step, as hooks receive it.

    Attributes:
        result: Result of the step.
        state: State of the run after the step.
        seconds: Seconds of this rank.
        compute_seconds: Seconds of this rank outside of communication.
        payload: Number of bytes that this rank has sent.
        evaluated: Metrics of each set that was evaluated after the step, by set and metric.
        rollback_cause: Spike because of which the run returned to the state before this step; None if it did
            not.
    """

    result: StepResult
    state: TrainState
    seconds: float
    compute_seconds: float
    payload: int = 0
    evaluated: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rollback_cause: Spike | None = None


class Hook:
    """Methods that the trainer and the run call at fixed points, in the order of the hooks.

    All ranks call them, so each method may be collective, except `after_step_alone`. By default they do
    nothing.
    """

    def around_step(self, step: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context in which step `step` is made, from reading its samples to the update."""
        return nullcontext()

    def before_update(self) -> None:
        """Act before a step changes parameters and moments. The reduced gradients are finite."""

    def after_step(self, done: StepDone) -> None:
        """Act after a step."""

    def after_step_alone(self, done: StepDone) -> None:
        """Act after a step on rank 0 only.

        In a run with servers, ranks synchronize only where an evaluation or a checkpoint is due. After such a
        step `after_step` is called on all ranks, after any other step this method on rank 0.
        """

    def before_rollback(self) -> None:
        """Act before the run returns to the state of an earlier step."""

    def after_save(self) -> None:
        """Act after a checkpoint was written or started."""

    def at_end(self, decision: StepDecision) -> None:
        """Act after the last step. All checkpoints are complete, and `decision` says why the run stops."""
