"""Predicted messages of every rank in a step.

A step of a stage is rehearsed on the meta device, on groups that only record calls. The calls of gradient
reductions, replica synchronization, layers and the pipeline are counted, whatever these objects are. Payload
is counted like in the ledger of a run. `Traffic` is what passes the network link of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
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
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.execute import Executor, PreparedBatch
from hpctrain.pipeline.split import layer_ranges
from hpctrain.plan.silent_part import SilentPart
from hpctrain.plan.step_on_meta import rehearse
from hpctrain.plan.update_messages import send_update_messages
from hpctrain.sharding.weight_maxima import WeightMaxima, products_in_8_bits

LAYERS = frozenset({"tensor", "context", "pipeline", "expert", "expert_tensor", "context x tensor"})
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


class _Listener:
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

    def publish(self) -> None:
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
    deck = steady(deck).with_keys(machine={"compile": False})
    sizes, architecture = axis_sizes(deck, ranks), architecture_of(deck, vocabulary)
    passes = micro_batches(deck, sizes["data"])
    placement = place_by_flops(deck, architecture, sizes["data"])
    schedule, counts = placement.schedule_of(passes), placement.split
    device = device_kind(deck.run.device)
    transport = deck.communication.requested_transport if on_host(device) else "nccl"
    _, *kinds, _ = layer_kinds(architecture)
    planned: dict[object, tuple[tuple[PlannedTransfer, ...], ...]] = {}
    maximum_counts: dict[object, int] = {}
    stages, stage_maximum_counts, complete = [], [], True
    for number in range(schedule.stage_count):
        ranges = layer_ranges(schedule, counts, number)
        ends = number in {0, schedule.stage_count - 1}
        kind: object = (
            ends and number,
            tuple((*kinds[s.first : s.last], s.has_embedding, s.has_head) for s in ranges),
        )
        if deck.model.has_frozen_parameters or deck.model.module is not None:
            kind = number
        if kind not in planned:
            listener = _Listener()
            mesh = PlannedMesh(
                sizes, number, ranks_per_node, transport=transport, calls=PlannedCalls(listener)
            )
            stage = plan_stage(deck, architecture, mesh, PipelinePosition(schedule, counts, number), device)
            layer_transfers = _layer_transfers(deck, architecture, mesh, stage, schedule, passes, listener)
            complete = complete and layer_transfers is not None
            steps, update_transfers = _step_transfers(deck, stage, schedule, number, listener)
            maximum_counts[kind] = stage.layer_context.statistics.count("max")
            counted = LAYERS if layer_transfers is not None else frozenset[str]()
            loss_transfers = [
                *_loss_transfers(deck, architecture, mesh, stage),
                *_weight_maximum_transfers(stage, listener, counted),
            ]
            if layer_transfers is None:
                layer_transfers = _exchange_transfers(deck, stage, schedule, number)
            common = [*layer_transfers, *loss_transfers, *update_transfers]
            planned[kind] = tuple((*(m for m in step if m.axis not in counted), *common) for step in steps)
        stages.append(StageTraffic(number, planned[kind]))
        stage_maximum_counts.append(maximum_counts[kind])
    maximum_transfers = _all_reduce_transfers(mesh.group(*EVERYONE), sum(stage_maximum_counts))
    complete_stages = [
        StageTraffic(s.stage, tuple((*step, *maximum_transfers) for step in s.steps)) for s in stages
    ]
    return TrafficPlan(tuple(complete_stages), passes, complete)


def steady(deck: Deck) -> Deck:
    """Return the deck without the warm-up of compression."""
    return deck.with_keys(communication={"warmup": 0})


def _step_transfers(
    deck: Deck,
    stage: TrainedStage,
    schedule: Schedule,
    number: int,
    listener: _Listener,
) -> tuple[list[list[PlannedTransfer]], list[PlannedTransfer]]:
    """Return the transfers of buckets and replicas in each repeating step, and those of each update."""
    # With ZeRO-0 and ZeRO-1, gradients are reduced once per step for any number of micro-batches.
    schedule = all_forward_schedule(schedule, 1) if deck.layout.zero < 2 else schedule
    local = deck.layout.local_steps
    weights, period, delay = (
        PlannedWeights(stage),
        deck.layout.steps_between_syncs,
        local.delay if local else 0,
    )
    everything = sum(bucket.length for bucket in stage.buckets)
    listener.completed_share = lambda: sum(b.length for b in stage.buckets if b.is_final) / everything
    with META:
        stage.replica_sync.begin(weights)
    steps = []
    for _ in range(2 * period):
        listener.take()
        rehearse(stage, deck.memory.recompute, schedule, number)
        gradient_transfers = listener.take()
        with META:
            send_update_messages(stage.optimizer)
            update_transfers = listener.take()
            weights.publish()
            weights.updates += 1
            gradient_transfers += listener.take()
            stage.replica_sync.after_update(weights)
            replica_transfers = [
                transfer if transfer.start is None else transfer._replace(ahead=delay)
                for transfer in listener.take()
            ]
            stage.synchronizer.end_step(True, 1.0)
        steps.append([*gradient_transfers, *replica_transfers])
    return steps[period:], update_transfers


def _layer_transfers(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[PlannedTransfer] | None:
    """Return the transfers of layers and of the pipeline in a step; None if layers need values to run."""
    if deck.model.experts:
        return None
    if deck.model.module is not None:
        return _module_transfers(deck, architecture, mesh, stage, schedule, passes, listener)
    is_local = all(mesh.group(axis).size == 1 for axis in ("tensor", "context", "pipeline"))
    if is_local and not stage.module_state.statistics_users:
        return []
    return _pass_transfers(deck, architecture, mesh, stage, schedule, passes, listener)


def _module_transfers(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[PlannedTransfer] | None:
    """Return the transfers of a user's module; None if it cannot run without values.

    They are those of its statistics, of pipeline stages, and of activations that tensor ranks split.
    """
    layer_transfers: list[PlannedTransfer] = []
    if mesh.group("tensor").size > 1 or mesh.group("pipeline").size > 1:
        try:
            layer_transfers = _pass_transfers(deck, architecture, mesh, stage, schedule, passes, listener)
        except Exception:  # noqa: BLE001  (code of a user may raise any error without values)
            return None
    listener.take()
    for each in stage.module_state.statistics_users:
        each.after_update({})
    return [*layer_transfers, *_by_axis(listener.take())]


def _pass_transfers(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[PlannedTransfer]:
    """Return the transfers of layers and of the pipeline in a number of micro-batches, by axis."""
    first, second = (
        _transfers_by_axis(deck, architecture, mesh, stage, all_forward_schedule(schedule, count), listener)
        for count in (1, 2)
    )
    return [_extrapolate(first[axis], second[axis], passes) for axis in first]


def _transfers_by_axis(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    listener: _Listener,
) -> dict[str, PlannedTransfer]:
    """Return the transfers of layers and of the pipeline in the micro-batches of a schedule, by axis."""
    listener.take()
    _run_step(deck, architecture, mesh, stage, schedule, schedule.micro_batches)
    return {transfer.axis: transfer for transfer in _by_axis(m for m in listener.take() if m.axis in LAYERS)}


def all_forward_schedule(schedule: Schedule, passes: int) -> Schedule:
    """Return a schedule with all forward passes, then all backward passes of some micro-batches.

    Each micro-batch sends as much as with the given schedule.
    """
    chunks, some = range(schedule.chunks), range(passes)
    forward = tuple(Action("F", micro, chunk) for micro in some for chunk in chunks)
    backward = tuple(Action("B", micro, chunk) for micro in some for chunk in reversed(chunks))
    return Schedule((forward + backward,) * schedule.stage_count, "planned", schedule.placement)


def _run_step(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
) -> None:
    """Run the forward and backward passes of a step with the pipeline executor of a run."""
    objective, layer_context, size = (
        make_objective(deck),
        stage.layer_context,
        (deck.batch.micro_size, architecture.sequence),
    )
    models: Sequence[Any] = stage.models
    if deck.model.module is not None and layer_context.tensor.size == 1:
        models = [SilentPart(part, len(objective.metrics)) for part in stage.models]
    executor = Executor(
        models,
        mesh.group("pipeline"),
        layer_context.weight_gradients,
        mesh.ledger,
        objective.metrics,
        statistics=layer_context.statistics,
    )
    with META:
        positions = context_positions(
            layer_context.context, layer_context.context_form, architecture.sequence
        )
        tokens = torch.zeros(size, dtype=torch.int64)
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


def _exchange_transfers(
    deck: Deck, stage: TrainedStage, schedule: Schedule, number: int
) -> list[PlannedTransfer]:
    """Return the exchange with experts of other ranks if all experts have the same number of rows."""
    parts = part_bytes(deck, stage.models, False, deck.memory.recompute)
    forwards = Counter(action.chunk for action in schedule.stages[number] if action.kind == "F")
    exchanged = sum(count * parts[chunk].exchanged_bytes for chunk, count in forwards.items())
    layers = (layer for part in stage.models for layer in part.layers)
    calls = 4 * forwards.total() * sum(layer.kind.name == "mixture" for layer in layers)
    return [PlannedTransfer("expert", exchanged, Traffic(exchanged, exchanged, calls))] if exchanged else []


def _loss_transfers(
    deck: Deck, architecture: Architecture, mesh: PlannedMesh, stage: TrainedStage
) -> list[PlannedTransfer]:
    """Return the reductions over all ranks of token counts and metrics, as in `train/step.py`."""
    own_metrics = 1 if deck.model.module is not None else len(make_objective(deck).metrics)
    numbers = len(count(architecture).auxiliary_loss_names) + own_metrics + stage.replica[1]
    everyone = mesh.group(*EVERYONE)
    sums = [(mesh.group("data"), 2), (everyone, numbers)]  # predicted and real tokens, then numbers
    sums += [(everyone, 2)] if stage.synchronizer.norm_estimators else []
    return [transfer for group, numbers in sums for transfer in _all_reduce_transfers(group, numbers)]


def _all_reduce_transfers(group: Group, numbers: int) -> list[PlannedTransfer]:
    """Return the transfers of an all-reduce of some fp64 numbers."""
    if group.size == 1 or not numbers:
        return []
    tensor = torch.empty(numbers, dtype=torch.float64, device=META)
    call = Call("all_reduce", tensor, tensor)
    name = group.name if len(group.axes) == 1 else "world"
    return [PlannedTransfer(name, call.payload, traffic_of(call, group.rank, group.size))]


def _weight_maximum_transfers(
    stage: TrainedStage, listener: _Listener, counted: Collection[str]
) -> list[PlannedTransfer]:
    """Return the reductions of weight maxima at the beginning of a step, but for axes in `counted`."""
    listener.take()
    products = products_in_8_bits(layer for model in stage.models for layer in model.layers)
    with META, WeightMaxima(products, stage.buckets, stage.layer_context.tensor).provide_maxima():
        return [transfer for transfer in _by_axis(listener.take()) if transfer.axis not in counted]
