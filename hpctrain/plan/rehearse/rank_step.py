"""Programme of one rank in a step, recorded from the executor, buckets and optimizer of the run.

The order of the calls outside these is that of `train/step.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hpctrain.comm.planned import META
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.host.device import device_kind, on_host
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.objective.factory import make_objective
from hpctrain.parallel.sequence import context_positions
from hpctrain.parallel.step_statistics import Reduction, StepStatistics
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.execute import Executor, PreparedBatch, messages_between
from hpctrain.plan.rehearse.audit_messages import AuditMessages
from hpctrain.plan.rehearse.call_recorder import RecordedMesh, Recorder
from hpctrain.plan.rehearse.expert_loads import BalancedLoads, EvenLoads
from hpctrain.plan.rehearse.meta_op_cache import CachedMetaOps, MetaOpCache
from hpctrain.plan.rehearse.programme import RECEIVE, Programme, RehearsedCall
from hpctrain.plan.rehearse.recorded_operations import OperationRecorder, RecordedOperations, ReplayedPart
from hpctrain.plan.traffic_plan import EVERYONE, PlannedWeights, all_forward_schedule
from hpctrain.plan.update_messages import send_update_messages

RECORDED_MICRO_BATCHES = 2
"""Number of recorded micro-batches: the first, and one that stands for all others."""
_ACTION_KINDS: tuple[tuple[Kind, ...], ...] = (("F", "B"), ("F", "I", "W"))
"""Kinds of actions of recorded schedules, without and with deferred weight gradients."""


class RankStep:
    """Calls of one rank in a step, also for the ranks of other stages with layers of the same kinds.

    Args:
        deck: Deck of the job.
        shape: Shape of the model.
        sizes: Size of each axis of the mesh.
        position: Stage of the rank.
        place: Place of the rank in its stage.
        ranks_per_node: Number of ranks of a node.
        cache: Results of operations, shared by all ranks of the job.
    """

    def __init__(
        self,
        deck: Deck,
        shape: ModelShape,
        sizes: dict[str, int],
        position: PipelinePosition,
        place: int,
        ranks_per_node: int,
        cache: MetaOpCache,
    ) -> None:
        self.cache = cache
        self.deck, self.shape, self.sizes = deck, shape, sizes
        device = device_kind(deck.run.device)
        transport = deck.communication.requested_transport if on_host(device) else "nccl"
        self._mesh_of = sizes, ranks_per_node, device, place, transport
        self.recorder = recorder = Recorder(
            None if shape.experts is None else BalancedLoads.of_deck(deck, shape.experts).of,
            AuditMessages(deck.stability.corruption),
        )
        self.mesh = self._mesh(position.number)
        self.mesh.record_creation()
        self.stage = stage = plan_stage(deck, shape, self.mesh, position, device)
        self.weights = PlannedWeights(stage)
        self.objective = make_objective(deck)
        with META:
            positions = context_positions(
                stage.layer_context.context, stage.layer_context.context_form, shape.sequence
            )
            tokens = torch.zeros((deck.batch.micro_size, shape.sequence), dtype=torch.int64)
            one = torch.ones(())
            micro = MicroBatch.of_tokens(tokens, tokens)
            self._batch = PreparedBatch.of(micro, self.objective, one, positions, None, one)
            stage.replica_sync.begin(self.weights)
        self.operations = self._record_operations(position.schedule)
        self._parts = [
            ReplayedPart(
                model,
                chunk,
                self.operations,
                stage.layer_context.weight_gradients,
                len(self.objective.metrics),
            )
            for chunk, model in enumerate(stage.models)
        ]
        recorder.events.clear()

    def _mesh(self, number: int) -> RecordedMesh:
        sizes, ranks_per_node, device, place, transport = self._mesh_of
        return RecordedMesh(self.recorder, sizes, number, ranks_per_node, device, place, transport)

    def _record_operations(self, schedule: Schedule) -> RecordedOperations:
        """Record the operations of the layers of the stage in simple schedules."""
        operations, stage = RecordedOperations(), self.stage
        has_deferred = any(action.kind == "I" for actions in schedule.stages for action in actions)
        for kinds in _ACTION_KINDS if has_deferred else _ACTION_KINDS[:1]:
            steps = all_forward_schedule(schedule, RECORDED_MICRO_BATCHES, kinds[1:])
            timeline = OperationRecorder(self.recorder, steps, operations)
            executor = self._executor(stage.models, self.mesh, stage.layer_context.statistics)
            operations.forget("F")
            with META, self._without_values():
                stage.synchronizer.start(steps.micro_batches)
                with stage.pass_context(("recorded", kinds)), timeline.of(stage), self._timed(timeline):
                    executor.run(steps, [self._batch] * steps.micro_batches)
                stage.synchronizer.finish()
                stage.synchronizer.end_step(True, 1.0)
        return operations

    def _without_values(self) -> CachedMetaOps:
        table = self.shape.experts
        return CachedMetaOps(self.cache) if table is None else EvenLoads(table, self.cache)

    def statistics(self) -> dict[Reduction, int]:
        """Return how many statistics the rank records in a step, by reduction."""
        statistics = self.stage.layer_context.statistics
        return {"max": statistics.count("max"), "sum": statistics.count("sum")}

    def programme(self, schedule: Schedule, number: int, statistics: Mapping[Reduction, int]) -> Programme:
        """Return the programme of the rank in a typical step. If replicas make local steps, they sync in it.

        Args:
            schedule: Pipeline schedule.
            number: Number of the stage.
            statistics: Number of statistics of all ranks together, by reduction.
        """
        recorder, period = self.recorder, self.deck.layout.steps_between_syncs
        before = 2 * period - 1 if period > 1 else 0
        for _ in range(before):
            self._step(all_forward_schedule(schedule, 1), number, statistics)
        if self.deck.layout.zero == 3:
            self._step(schedule, number, statistics)  # gives the next step the order of gathers
            self.weights.updates -= period > 1
        recorder.events.clear()
        recorder.audit.begin_step()
        recorder.listening = True
        self._step(schedule, number, statistics)
        recorder.listening = False
        events, recorder.events = tuple(recorder.events), []
        return events

    def _step(self, schedule: Schedule, number: int, statistics: Mapping[Reduction, int]) -> None:
        recorder, stage = self.recorder, self.stage
        everyone = self.mesh.group(*EVERYONE)
        self._agreement("read")
        data = self.mesh.group("data")
        if data.size > 1:
            data.all_reduce(torch.tensor([0, 0]))
        recorder.action = "begin"
        with META:
            stage.synchronizer.start(schedule.micro_batches, self.weights.updates)
            with stage.pass_context((number, schedule.micro_batches)):
                self._execute(schedule, number)
                recorder.action = "synchronize"
            stage.synchronizer.finish()
            recorder.action = "agree"
            for how, numbers in statistics.items():
                if numbers:
                    everyone.all_reduce(torch.empty(numbers, dtype=torch.float64), how)
            figures = (
                len(self.objective.metrics) + len(count(self.shape).auxiliary_loss_names) + stage.replica[1]
            )
            everyone.all_reduce(torch.empty(figures, dtype=torch.float64))
            self._agree_on_faults("agree")
            if stage.synchronizer.norm_estimators and stage.synchronizer.noise_norm is None:
                everyone.all_reduce(torch.empty(2, dtype=torch.float64))
            recorder.action = "update"
            send_update_messages(stage.optimizer)
            if self.deck.memory.optimizer != "device":
                self._agreement("update")
            self.weights.copy_to_parameters()
            self.weights.updates += 1
            recorder.action = "replicas"
            metrics = stage.replica_sync.after_update(self.weights)
            if metrics:
                everyone.all_reduce(torch.stack(list(metrics.values())))
            stage.synchronizer.end_step(True, 1.0)
            self._agree_on_faults("check")

    def _agree_on_faults(self, action: str) -> None:
        """Exchange records of calls and faults that ranks have found, if silent faults are checked for."""
        if not self.recorder.audit.is_on:
            return
        self.recorder.action = action
        everyone = self.mesh.group(*EVERYONE)
        self.recorder.exchange_records(action)
        everyone.all_gather(torch.empty((1, 2), dtype=torch.int64))  # checksum of the metrics, and faults
        everyone.all_gather(torch.empty(1, dtype=torch.int64))  # whether there are any

    def _agreement(self, action: str) -> None:
        """Record the agreement of all ranks that none has an error."""
        recorder = self.recorder
        recorder.action = action
        if recorder.listening and self.mesh.group(*EVERYONE).size > 1:
            recorder.note(RehearsedCall("agreement", "agreements", action=action))

    def _execute(self, schedule: Schedule, number: int) -> None:
        """Run the actions of a stage, and name the content of each message.

        A sent message is named after the action that it follows, a received one by the order of its sender.
        """
        recorder, first = self.recorder, len(self.recorder.events)
        recorder.action = ""
        self.operations.begin()
        mesh = self._mesh(number)
        group, executor = mesh.group("pipeline"), self._executor(self._parts, mesh, None)
        with self._timed(_Labels(recorder, schedule, number)):
            executor.run(schedule, [self._batch] * schedule.micro_batches)
        recorder.done = recorder.carried = ""
        recorder.label(first, str(schedule.stages[number][-1]))
        orders = {
            (sender - number) % group.size: messages_between(schedule, sender, number)
            for sender in range(schedule.stage_count)
            if sender != number
        }
        for place, event in enumerate(recorder.events[first:], first):
            if event.operation == RECEIVE and event.group == "pipeline":
                sent = next(orders[event.offset])
                what = message_name("F" if sent.kind == "F" else "B", sent.micro_batch, sent.chunk)
                recorder.events[place] = replace(event, what=what)

    def _executor(
        self, parts: Sequence[Any], mesh: RecordedMesh, statistics: StepStatistics | None
    ) -> Executor:
        """Return the executor of the run for these parts. `statistics` are those that layers record."""
        figures, terms = self.objective.metrics, count(self.shape).auxiliary_loss_names
        queue = self.stage.layer_context.weight_gradients
        return Executor(parts, mesh.group("pipeline"), queue, self.mesh.ledger, figures, terms, statistics)

    @contextmanager
    def _timed(self, timeline: object) -> Iterator[None]:
        ledger = self.mesh.ledger
        vars(ledger)["timeline"] = timeline
        yield
        ledger.timeline = None


class _Labels:
    """Timeline of an executor, which sets the action of recorded calls and the content of messages."""

    def __init__(self, recorder: Recorder, schedule: Schedule, number: int) -> None:
        self.recorder, self.schedule, self.number = recorder, schedule, number
        self._actions = iter(schedule.stages[number])
        self._first = len(recorder.events)

    def record_action(self, *_: object) -> None:
        """End an action, as a `Timeline`."""
        recorder, schedule, action = self.recorder, self.schedule, next(self._actions)
        recorder.label(self._first, str(action))
        self._first = len(recorder.events)
        recorder.done, recorder.carried = str(action), ""
        part = schedule.part(self.number, action.chunk) + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= part < schedule.parts:
            kind: Kind = "F" if action.kind == "F" else "B"
            recorder.carried = message_name(kind, action.micro_batch, schedule.stage_and_chunk(part)[1])

    def record(self, *_: object, **__: object) -> None:
        """Do nothing; spans are not recorded."""


def message_name(kind: Kind, micro_batch: int, chunk: int) -> str:
    """Return the name of the content of a message: the action that needs it."""
    return str(Action(kind, micro_batch, chunk))
