"""Predicted and measured seconds of a run's steps by cause, compared at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING, TypeVar

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.measured_step import MeasuredStep, StepRecord, mean, middle, separate_stage_waits
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from hpctrain.plan.time.time_text import comparison_lines
from hpctrain.report.trace import gather_steps
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.units import format_seconds

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

MAX_RECORDS = 64
"""Number of the last steps that are measured."""

Key = TypeVar("Key")


@dataclass(frozen=True)
class PredictedSeconds:
    """Predicted step on the machine whose rates the deck names.

    Attributes:
        on_rank_0: Rates of the machine and the step, on rank 0; None on other ranks.
    """

    on_rank_0: tuple[MachineRates, StepPlan] | None

    def row(self) -> dict[str, object]:
        """Return the values for JSON, on rank 0."""
        if self.on_rank_0 is None:
            return {}
        machine, step = self.on_rank_0
        return {"machine": machine.name, "stage": step.stage, "predicted": step.row()}


def plan_seconds(world: World, deck: Deck, *, is_resumed: bool) -> tuple[PredictedSeconds | None, str]:
    """Predict the seconds of a step from `machine.rates`. Collective.

    Args:
        world: The world.
        deck: The deck.
        is_resumed: True if the run resumes. If the rates of its earlier deck cannot be used, that is not an
            error.

    Returns:
        The prediction, None if the deck names no rates, and a sentence about it.

    Raises:
        HpctrainError: The rates cannot be used; raised on all ranks.
    """
    if deck.machine.rates is None:
        return None, ""
    prediction, sentence = None, ""
    nodes = {"ranks_per_node": deck.machine.ranks_per_node or world.local_size}
    with world.agreement():
        if world.rank == 0:
            try:
                machine = deck_rates(deck)
                assert machine is not None and deck.model.vocabulary is not None
                step = plan_step(deck.with_keys(machine=nodes), world.size, deck.model.vocabulary, machine)
                prediction, sentence = (
                    (machine, step),
                    f"predicted step time: {format_seconds(step.seconds)} ({machine.name})",
                )
            except HpctrainError as error:
                if not is_resumed or deck.sources.place("machine.rates").override is not None:
                    raise
                sentence = f"the step time is not predicted: {error.problems[0]}"
    is_predicted = world.everyone.broadcast_object(prediction is not None)
    return PredictedSeconds(prediction) if is_predicted else None, sentence


class StepSeconds(Hook):
    """Hook that measures the seconds of the last steps by cause, and compares them with the prediction.

    The first step is left out if there are others, since it counts activations and allocates buffers.
    """

    def __init__(self, trainer: Trainer, prediction: PredictedSeconds) -> None:
        self.engine, self.prediction = trainer.engine, prediction
        self.full = trainer.deck.batch.global_size
        self.zero = trainer.deck.layout.zero
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self.measured: MeasuredStep | None = None
        """Measured seconds of the predicted stage, on rank 0; None before the end."""
        self._first: int | None = None
        self._of_step: StepRecord | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Record what the ledger counts during the step."""
        if self._first is None:
            self._first = step
        ledger = self.engine.world.ledger
        phases, inside = dict(ledger.phase_seconds), dict(ledger.call_seconds)
        calls, again = ledger.seconds_by_entry(), ledger.recompute_seconds
        yield
        self._of_step = StepRecord(
            step,
            0.0,
            _since(phases, ledger.phase_seconds),
            _since(inside, ledger.call_seconds),
            _since(calls, ledger.seconds_by_entry()),
            ledger.recompute_seconds - again,
        )

    def after_step(self, done: StepDone) -> None:
        """Store the record of the step, if it has a full batch."""
        record, self._of_step = self._of_step, None
        if record is None or done.result.batch != self.full:
            return
        if len(self.records) == 1 and self.records[0].step == self._first:
            self.records.clear()
        self.records.append(replace(record, seconds=done.seconds))

    def at_end(self, decision: StepDecision) -> None:  # noqa: ARG002
        """Compute the mean over the ranks of the predicted stage and over undisturbed steps. Collective."""
        world, mesh = self.engine.world, self.engine.mesh
        everyone, timeline = world.everyone, world.ledger.timeline
        if not self.records:
            return
        steps = set(everyone.broadcast_object([each.step for each in middle(self.records)]))
        chosen = [each for each in self.records if each.step in steps]
        stages = mesh.size("pipeline")
        causes = mean([each.by_cause(stages, self.zero) for each in chosen])
        if timeline is not None and stages > 1:
            waits = [
                step.waits(mesh.coordinate("pipeline"))
                for step in gather_steps(timeline, mesh, self.engine.schedule)
            ]
            causes = separate_stage_waits(
                causes, fsum(wait for wait, _ in waits), fsum(sent for _, sent in waits)
            )
        seconds = fsum(each.seconds for each in chosen) / len(chosen)
        ranks = everyone.all_gather_object((mesh.coordinate("pipeline"), seconds, causes))
        if self.prediction.on_rank_0 is None:
            return
        _, step = self.prediction.on_rank_0
        of_stage = [(seconds, causes) for stage, seconds, causes in ranks if stage == step.stage]
        self.measured = MeasuredStep(
            fsum(seconds for seconds, _ in of_stage) / len(of_stage),
            mean([causes for _, causes in of_stage]) if on_host(world.device) else None,
            len(chosen),
            len(of_stage),
        )

    def table(self) -> list[str]:
        """Return lines that compare predicted and measured seconds, on rank 0."""
        if self.prediction.on_rank_0 is None or self.measured is None:
            return []
        machine, step = self.prediction.on_rank_0
        return comparison_lines(step, machine, self.measured, self.engine.mesh.size("pipeline"))

    def row(self) -> dict[str, object]:
        """Return the values for JSON, on rank 0."""
        measured = {} if self.measured is None else {"measured": self.measured.row()}
        return self.prediction.row() | measured


def _since(before: Mapping[Key, float], now: Mapping[Key, float]) -> dict[Key, float]:
    """Return the difference of each value."""
    return {key: seconds - before.get(key, 0.0) for key, seconds in now.items()}
