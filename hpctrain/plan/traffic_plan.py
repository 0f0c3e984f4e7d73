"""Predicted messages of every rank in a step.

A step of a stage is rehearsed on the meta device, on groups that only record calls. The calls of gradient
reductions, replica synchronization, layers and the pipeline are counted, whatever these objects are. Payload
is counted like in the ledger of a run. `Traffic` is what passes the network link of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.planned import META, PlannedCalls, PlannedMesh
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.costs.layer_bytes.meta_device import simulated_host
from hpctrain.costs.layer_bytes.module_trace import example_inputs
from hpctrain.costs.part_bytes import part_bytes
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.engine.stages.stage import TrainedStage
from hpctrain.host.device import device_kind, on_host
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import architecture_of, layer_kinds
from hpctrain.model.count import count
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.objective.factory import make_objective
from hpctrain.optim.optimizer import gather_updated
from hpctrain.parallel.sequence import context_positions
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.execute import Executor, PreparedBatch
from hpctrain.pipeline.split import layer_ranges
from hpctrain.plan.silent_part import SilentPart
from hpctrain.plan.step_on_meta import rehearse
from hpctrain.plan.update_messages import send_update_messages
from hpctrain.sharding.weight_maxima import WeightMaxima, products_in_8_bits

LAYER_AXES = frozenset({"tensor", "context", "pipeline", "expert", "expert_tensor", "context x tensor"})
"""Axes along which layers and pipeline stages communicate in every micro-batch."""


EVERYONE = ("pipeline", "data", "context", "tensor")
"""Axes that together have all ranks."""


class PlannedTransfer(NamedTuple):
    """One or several calls of a rehearsed step along an axis.

    Attributes:
        axis: Name of the axis.
        payload: Bytes of payload.
        traffic: Traffic to and from other nodes.
        start: Share of the parameters whose gradients are complete when the call starts in the backward pass;
            None if the rank waits for the call.
        ahead: Number of steps during which replicas may complete the call.
    """

    axis: str
    payload: int
    traffic: Traffic
    start: float | None = None
    ahead: int = 0


@dataclass(frozen=True)
class StageTraffic:
    """Messages of a rank of a pipeline stage, in each step of a repeating sequence of steps.

    Attributes:
        stage: Number of the stage.
        steps: Transfers of each step.
    """

    stage: int
    steps: tuple[tuple[PlannedTransfer, ...], ...]

    def payload(self) -> dict[str, float]:
        """Return the bytes of payload per step by axis, as the mean over the steps."""
        return self._by_axis(lambda transfer: transfer.payload)

    def sent(self) -> dict[str, float]:
        """Return the bytes per step that a rank sends to other nodes, by axis, as the mean over the steps."""
        return self._by_axis(lambda transfer: transfer.traffic.sent)

    def _by_axis(self, size: Callable[[PlannedTransfer], int]) -> dict[str, float]:
        sizes_by_axis: dict[str, float] = {}
        for transfer in (transfer for step in self.steps for transfer in step):
            sizes_by_axis[transfer.axis] = sizes_by_axis.get(transfer.axis, 0.0) + size(transfer) / len(
                self.steps
            )
        return dict(sorted(sizes_by_axis.items()))


@dataclass(frozen=True)
class TrafficPlan:
    """Messages of the ranks of every stage.

    Attributes:
        stages: Messages of each stage.
        micro_batches: Number of micro-batches per step.
        complete: False if messages of layers are not included, except the exchange with experts. They are
            unknown if they depend on the data, or if a user's module does not run without values.
    """

    stages: tuple[StageTraffic, ...]
    micro_batches: int
    complete: bool

    @property
    def largest(self) -> StageTraffic:
        """Stage whose ranks have most payload."""
        return max(self.stages, key=lambda stage: sum(stage.payload().values()))

    def row(self) -> dict[str, object]:
        """Return the bytes of a step by axis, as a value that can be written as JSON."""
        return {"stages": [stage.payload() for stage in self.stages], "whole": self.complete}


class _TransferRecorder:
    """Recorder of the calls on a planned mesh.

    Attributes:
        transfers: Recorded transfers.
        completed_share: Function that returns the share of the parameters whose gradients are complete.
    """

    def __init__(self) -> None:
        self.transfers: list[PlannedTransfer] = []
        self.completed_share: Callable[[], float] = lambda: 0.0

    def __call__(self, call: Call, traffic: Traffic) -> None:
        start = None if call.blocking else self.completed_share()
        self.transfers.append(PlannedTransfer(call.group.name, call.payload, traffic, start))

    def take(self) -> list[PlannedTransfer]:
        """Return what was recorded since the last call."""
        transfers, self.transfers = self.transfers, []
        return transfers


class PlannedWeights:
    """Weights of a rehearsed stage, for `sharding/replica_sync.py`."""

    def __init__(self, stage: TrainedStage) -> None:
        self.buckets, self.masters, self.updates = stage.buckets, stage.optimizer.masters, 0

    def copy_to_parameters(self) -> None:
        """Copy the weights into the parameters. Collective over the group of each bucket."""
        gather_updated([bucket for bucket in self.buckets if bucket.trained])


def plan_traffic(deck: Deck, ranks: int, vocabulary: int, ranks_per_node: int = 1) -> TrafficPlan:
    """Return the bytes that `ranks` ranks of a deck will move in the steps after the warm-up.

    Ranks of one node do not use a network link between each other.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        vocabulary: Number of tokens of the vocabulary.
        ranks_per_node: Number of ranks per node.

    Raises:
        HpctrainError: A run of the deck would raise this error, too.
    """
    # Layers run without values, for which there are no compiled functions. Torch's functions send the same.
    deck = without_warmup(deck).with_keys(machine={"compile": False})
    sizes, architecture = axis_sizes(deck, ranks), architecture_of(deck, vocabulary)
    passes = micro_batches(deck, sizes["data"])
    placement = place_by_flops(deck, architecture, sizes["data"])
    schedule, split = placement.schedule_of(passes), placement.split
    kinds = stage_kinds(deck, architecture, schedule, split)
    planned: dict[object, _PlannedSteps] = {}
    for number, kind in enumerate(kinds):
        if kind not in planned:
            position = PipelinePosition(schedule, split, number)
            stage = _RehearsedStage(deck, architecture, sizes, ranks_per_node, position)
            planned[kind] = stage.plan()
    maximum_count = sum(planned[kind].maximum_count for kind in kinds)
    maximum_transfers = _all_reduce_transfers(stage.everyone, maximum_count)
    stages = [
        StageTraffic(number, tuple((*step, *maximum_transfers) for step in planned[kind].steps))
        for number, kind in enumerate(kinds)
    ]
    return TrafficPlan(tuple(stages), passes, all(each.complete for each in planned.values()))


def stage_kinds(
    deck: Deck, architecture: Architecture, schedule: Schedule, split: Sequence[int]
) -> list[object]:
    """Return the kind of each stage, by its layers. Stages of a kind make the same calls in an action."""
    _, *blocks, _ = layer_kinds(architecture)
    is_unique = deck.model.has_frozen_parameters or deck.model.module is not None
    kinds: list[object] = []
    for number in range(schedule.stage_count):
        ranges = layer_ranges(schedule, split, number)
        parts = tuple((*blocks[each.first : each.last], each.has_embedding, each.has_head) for each in ranges)
        is_end = number in {0, schedule.stage_count - 1}
        kinds.append((number if is_unique or is_end else None, parts))
    return kinds


def without_warmup(deck: Deck) -> Deck:
    """Return the deck without the warm-up of compression."""
    return deck.with_keys(communication={"warmup": 0})


class _PlannedSteps(NamedTuple):
    """Messages of a stage.

    Attributes:
        steps: Transfers of each step in a repeating sequence of steps, without reductions of maxima.
        maximum_count: Number of maxima that the stage records in a step.
        complete: False if messages of layers are not included, as in `TrafficPlan`.
    """

    steps: list[list[PlannedTransfer]]
    maximum_count: int
    complete: bool


class _RehearsedStage:
    """Stage on a planned mesh, whose calls are recorded.

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        sizes: Number of ranks along each axis.
        ranks_per_node: Number of ranks per node.
        position: Stage of the pipeline.
    """

    def __init__(
        self,
        deck: Deck,
        architecture: Architecture,
        sizes: Mapping[str, int],
        ranks_per_node: int,
        position: PipelinePosition,
    ) -> None:
        self._deck, self._architecture, self._position = deck, architecture, position
        self._schedule, self._recorder = position.schedule, _TransferRecorder()
        device = device_kind(deck.run.device)
        transport = deck.communication.requested_transport if on_host(device) else "nccl"
        calls = PlannedCalls(self._recorder)
        self._mesh = PlannedMesh(sizes, position.number, ranks_per_node, transport=transport, calls=calls)
        self._stage = plan_stage(deck, architecture, self._mesh, position, device)

    @property
    def everyone(self) -> Group:
        """Group of all ranks."""
        return self._mesh.group(*EVERYONE)

    def plan(self) -> _PlannedSteps:
        """Return the messages of the stage."""
        layer_transfers = self._layer_transfers()
        complete = layer_transfers is not None
        steps, update_transfers = self._bucket_transfers()
        maximum_count = self._stage.layer_context.statistics.count("max")
        counted = LAYER_AXES if complete else frozenset[str]()
        loss_transfers = [*self._loss_transfers(), *self._weight_maximum_transfers(counted)]
        if layer_transfers is None:
            layer_transfers = self._exchange_transfers()
        common = [*layer_transfers, *loss_transfers, *update_transfers]
        steps = [[*(each for each in step if each.axis not in counted), *common] for step in steps]
        return _PlannedSteps(steps, maximum_count, complete)

    def _bucket_transfers(self) -> tuple[list[list[PlannedTransfer]], list[PlannedTransfer]]:
        """Return the transfers of buckets and replicas in each repeating step, and those of each update."""
        deck, stage, recorder = self._deck, self._stage, self._recorder
        # With ZeRO-0 and ZeRO-1, gradients are reduced once per step for any number of micro-batches.
        schedule = all_forward_schedule(self._schedule, 1) if deck.layout.zero < 2 else self._schedule
        local = deck.layout.local_steps
        weights, period = PlannedWeights(stage), deck.layout.steps_between_syncs
        length = sum(bucket.length for bucket in stage.buckets)
        recorder.completed_share = lambda: sum(b.length for b in stage.buckets if b.is_final) / length
        with META:
            stage.replica_sync.begin(weights)
        steps = []
        for _ in range(2 * period):
            recorder.take()
            rehearse(stage, deck.memory.recompute, schedule, self._position.number)
            gradient_transfers = recorder.take()
            with META:
                send_update_messages(stage.optimizer)
                update_transfers = recorder.take()
                weights.copy_to_parameters()
                weights.updates += 1
                gradient_transfers += recorder.take()
                stage.replica_sync.after_update(weights)
                replica_transfers = [
                    each if each.start is None else each._replace(ahead=local.delay if local else 0)
                    for each in recorder.take()
                ]
                stage.synchronizer.end_step(True, 1.0)
            steps.append([*gradient_transfers, *replica_transfers])
        return steps[period:], update_transfers

    def _layer_transfers(self) -> list[PlannedTransfer] | None:
        """Return the transfers of layers and of the pipeline in a step; None if layers need values to run."""
        if self._deck.model.experts:
            return None
        if self._deck.model.module is not None:
            return self._module_transfers()
        is_local = all(self._mesh.group(axis).size == 1 for axis in ("tensor", "context", "pipeline"))
        if is_local and not self._stage.module_state.statistics_users:
            return []
        return self._pass_transfers()

    def _module_transfers(self) -> list[PlannedTransfer] | None:
        """Return the transfers of a user's module; None if it cannot run without values.

        They are those of its statistics, of pipeline stages, and of activations that tensor ranks split.
        """
        layer_transfers: list[PlannedTransfer] = []
        if self._mesh.group("tensor").size > 1 or self._mesh.group("pipeline").size > 1:
            try:
                layer_transfers = self._pass_transfers()
            except Exception:  # noqa: BLE001  (code of a user may raise any error without values)
                return None
        self._recorder.take()
        for each in self._stage.module_state.statistics_users:
            each.after_update({})
        return [*layer_transfers, *_by_axis(self._recorder.take())]

    def _pass_transfers(self) -> list[PlannedTransfer]:
        """Return the transfers of layers and of the pipeline in a step, by axis.

        They are extrapolated from those of one and of two micro-batches.
        """
        first, second = (self._transfers_of_passes(count) for count in (1, 2))
        return [_extrapolate(first[axis], second[axis], self._schedule.micro_batches) for axis in first]

    def _transfers_of_passes(self, passes: int) -> dict[str, PlannedTransfer]:
        """Return the transfers of layers and of the pipeline in a number of micro-batches, by axis."""
        self._recorder.take()
        self._run_passes(all_forward_schedule(self._schedule, passes))
        transfers = (each for each in self._recorder.take() if each.axis in LAYER_AXES)
        return {transfer.axis: transfer for transfer in _by_axis(transfers)}

    def _run_passes(self, schedule: Schedule) -> None:
        """Run the forward and backward passes of a schedule with the pipeline executor of a run."""
        deck, architecture, stage = self._deck, self._architecture, self._stage
        objective, layer_context, passes = make_objective(deck), stage.layer_context, schedule.micro_batches
        models: Sequence[Any] = stage.models
        if deck.model.module is not None and layer_context.tensor.size == 1:
            models = [SilentPart(part, len(objective.metrics)) for part in stage.models]
        executor = Executor(
            models,
            self._mesh.group("pipeline"),
            layer_context.weight_gradients,
            self._mesh.ledger,
            objective.metrics,
            statistics=layer_context.statistics,
        )
        with META:
            positions = context_positions(
                layer_context.context, layer_context.context_form, architecture.sequence
            )
            tokens = torch.zeros((deck.batch.micro_size, architecture.sequence), dtype=torch.int64)
            one = torch.ones(())
            batch = PreparedBatch.of(MicroBatch.of_tokens(tokens, tokens), objective, one, positions, None)
            context: AbstractContextManager[object] = META
            if isinstance(architecture, ModuleArchitecture):
                inputs = example_inputs(architecture, deck.batch.micro_size)
                batch, context = PreparedBatch(inputs, objective.loss_function(inputs, one)), simulated_host()
            stage.synchronizer.start(passes)
        with context, stage.pass_context(("rehearsed", passes)):
            executor.run(schedule, [batch] * passes)
        with META:
            stage.synchronizer.finish()

    def _exchange_transfers(self) -> list[PlannedTransfer]:
        """Return the exchange with experts of other ranks if all experts have the same number of rows."""
        models, actions = self._stage.models, self._schedule.stages[self._position.number]
        parts = part_bytes(self._deck, models, False, self._deck.memory.recompute)
        forwards = Counter(action.chunk for action in actions if action.kind == "F")
        size = sum(count * parts[chunk].exchanged_bytes for chunk, count in forwards.items())
        layers = (layer for part in models for layer in part.layers)
        calls = 4 * forwards.total() * sum(layer.kind.name == "mixture" for layer in layers)
        return [PlannedTransfer("expert", size, Traffic(size, size, calls))] if size else []

    def _loss_transfers(self) -> list[PlannedTransfer]:
        """Return the reductions over all ranks of token counts and metrics, as in `train/step.py`."""
        deck, stage = self._deck, self._stage
        metrics = 1 if deck.model.module is not None else len(make_objective(deck).metrics)
        metrics += len(count(self._architecture).auxiliary_loss_names) + stage.replica[1]
        # The first reduction has the numbers of predicted and of real tokens.
        counts = [(self._mesh.group("data"), 2), (self.everyone, metrics)]
        counts += [(self.everyone, 2)] if stage.synchronizer.norm_estimators else []
        return [transfer for group, numbers in counts for transfer in _all_reduce_transfers(group, numbers)]

    def _weight_maximum_transfers(self, counted: Collection[str]) -> list[PlannedTransfer]:
        """Return the reductions of weight maxima at the beginning of a step, but for axes in `counted`."""
        self._recorder.take()
        stage = self._stage
        products = products_in_8_bits(layer for model in stage.models for layer in model.layers)
        with META, WeightMaxima(products, stage.buckets, stage.layer_context.tensor).provide_maxima():
            return [each for each in _by_axis(self._recorder.take()) if each.axis not in counted]


def all_forward_schedule(schedule: Schedule, passes: int, backward: Sequence[Kind] = ("B",)) -> Schedule:
    """Return a schedule of all forward passes, then all backward passes, of some micro-batches.

    Each micro-batch sends as much as with the given schedule.

    Args:
        schedule: Schedule with the number of stages and the placement of parts.
        passes: Number of micro-batches.
        backward: Actions of a backward pass: "B", or "I" and "W" if weight gradients are deferred.
    """
    chunks, some = range(schedule.chunks), range(passes)
    actions = [Action("F", micro, chunk) for micro in some for chunk in chunks]
    actions += [
        Action(kind, micro, chunk) for micro in some for chunk in reversed(chunks) for kind in backward
    ]
    return Schedule((tuple(actions),) * schedule.stage_count, "planned", schedule.placement)


def _by_axis(transfers: Iterable[PlannedTransfer]) -> list[PlannedTransfer]:
    """Return the sum of the transfers of each axis."""
    ordered = sorted(transfers, key=lambda each: each.axis)
    return [
        _sum_transfers(axis, list(of_axis)) for axis, of_axis in groupby(ordered, key=lambda each: each.axis)
    ]


def _sum_transfers(axis: str, transfers: Sequence[PlannedTransfer]) -> PlannedTransfer:
    sent, received, rounds = (
        sum(numbers) for numbers in zip(*(each.traffic for each in transfers), strict=True)
    )
    return PlannedTransfer(axis, sum(each.payload for each in transfers), Traffic(sent, received, rounds))


def _extrapolate(first: PlannedTransfer, second: PlannedTransfer, passes: int) -> PlannedTransfer:
    """Extrapolate linearly from one and two micro-batches to `passes` micro-batches."""

    def at(one: int, two: int) -> int:
        return one + (two - one) * (passes - 1)

    return PlannedTransfer(
        first.axis,
        at(first.payload, second.payload),
        Traffic(*(at(one, two) for one, two in zip(first.traffic, second.traffic, strict=True))),
    )


def _all_reduce_transfers(group: Group, numbers: int) -> list[PlannedTransfer]:
    """Return the transfers of an all-reduce of some fp64 numbers."""
    if group.size == 1 or not numbers:
        return []
    tensor = torch.empty(numbers, dtype=torch.float64, device=META)
    call = Call("all_reduce", tensor, tensor)
    name = group.name if len(group.axes) == 1 else "world"
    return [PlannedTransfer(name, call.payload, traffic_of(call, group.rank, group.size))]
