"""What every rank of a deck will send to others in a step, told from the deck alone.

A step of the run's own stage is rehearsed on groups that only listen: what Summations and Outers, layers and
the pipeline call there is counted, so that nothing here knows them by name. Payload is as the ledger of the
run counts it; `Traffic` is what passes a rank's link.
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
"""Axes along which layers and stages of the pipeline talk, in every micro-batch."""


EVERYONE = ("pipeline", "data", "context", "tensor")
"""Axes along which all ranks lie."""


class Moved(NamedTuple):
    """A call of a rehearsed step, or several: what it moves along an axis, and what passes to other nodes.

    It is started when a share `begun` of the parameters had their gradients, and then moves meanwhile; with
    None the rank waits for it. What replicas start after a step has so many steps `ahead` to move.
    """

    axis: str
    payload: int
    traffic: Traffic
    begun: float | None = None
    ahead: int = 0


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that a rank of a pipeline stage moves in each step of a repeating sequence of steps."""

    stage: int
    steps: tuple[tuple[Moved, ...], ...]

    def payload(self) -> dict[str, float]:
        """Bytes of a step by axis, the mean over the steps."""
        return self._by_axis(lambda moved: moved.payload)

    def sent(self) -> dict[str, float]:
        """Return the bytes per step that a rank sends to other nodes, by axis, as the mean over the steps."""
        return self._by_axis(lambda moved: moved.traffic.sent)

    def _by_axis(self, size: Callable[[Moved], int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for moved in (moved for step in self.steps for moved in step):
            found[moved.axis] = found.get(moved.axis, 0.0) + size(moved) / len(self.steps)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class TrafficPlan:
    """What the ranks of every stage move; where it is not `whole`, without what layers send along axes other
    than that of experts, since that depends on what comes, or on a module that does not run without values.
    """

    stages: tuple[StageTraffic, ...]
    micro_batches: int
    whole: bool

    @property
    def most(self) -> StageTraffic:
        """The stage whose ranks move most."""
        return max(self.stages, key=lambda stage: sum(stage.payload().values()))

    def row(self) -> dict[str, object]:
        """Return the bytes of a step by axis, as a value that can be written as JSON."""
        return {"stages": [stage.payload() for stage in self.stages], "whole": self.whole}


class _Listener:
    """Notes every call of a planned mesh."""

    def __init__(self) -> None:
        self.moved: list[Moved] = []
        self.begun: Callable[[], float] = lambda: 0.0

    def __call__(self, call: Call, traffic: Traffic) -> None:
        begun = None if call.blocking else self.begun()
        self.moved.append(Moved(call.group.name, call.payload, traffic, begun))

    def take(self) -> list[Moved]:
        """Return what was recorded since the last call."""
        moved, self.moved = self.moved, []
        return moved


class PlannedWeights:
    """The weights of a planned stage, see sharding/replica_sync.py."""

    def __init__(self, stage: TrainedStage) -> None:
        self.buckets, self.masters, self.updates = stage.buckets, stage.optimizer.masters, 0

    def publish(self) -> None:
        """Copy the weights into the parameters. Collective over each bucket's own group."""
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
    # Layers run without values, for which there are no compiled functions; torch's communicate alike.
    deck = steady(deck).with_keys(machine={"compile": False})
    sizes, architecture = axis_sizes(deck, ranks), architecture_of(deck, vocabulary)
    passes = micro_batches(deck, sizes["data"])
    placement = place_by_flops(deck, architecture, sizes["data"])
    schedule, counts = placement.schedule_of(passes), placement.split
    device = device_kind(deck.run.device)
    transport = deck.communication.requested_transport if on_host(device) else "nccl"
    _, *kinds, _ = layer_kinds(architecture)
    planned: dict[object, tuple[tuple[Moved, ...], ...]] = {}
    noted: dict[object, int] = {}
    stages, of_stages, whole = [], [], True
    for number in range(schedule.stage_count):
        spans = layer_ranges(schedule, counts, number)
        ends = number in {0, schedule.stage_count - 1}
        kind: object = (
            ends and number,
            tuple((*kinds[s.first : s.last], s.has_embedding, s.has_head) for s in spans),
        )
        if deck.model.has_frozen_parameters or deck.model.module is not None:
            kind = number
        if kind not in planned:
            listener = _Listener()
            mesh = PlannedMesh(
                sizes, number, ranks_per_node, transport=transport, calls=PlannedCalls(listener)
            )
            stage = plan_stage(deck, architecture, mesh, PipelinePosition(schedule, counts, number), device)
            layers = _layers(deck, architecture, mesh, stage, schedule, passes, listener)
            whole = whole and layers is not None
            steps, of_update = _steps(deck, stage, schedule, number, listener)
            noted[kind] = stage.layer_context.statistics.count("max")
            keep = LAYERS if layers is not None else frozenset[str]()
            of_all = [*_of_all(deck, architecture, mesh, stage), *_of_weights(stage, listener, keep)]
            in_layers = layers if layers is not None else _exchanges(deck, stage, schedule, number)
            more = [*in_layers, *of_all, *of_update]
            planned[kind] = tuple((*(m for m in step if m.axis not in keep), *more) for step in steps)
        stages.append(StageTraffic(number, planned[kind]))
        of_stages.append(noted[kind])
    maxima = _all_reduced(mesh.group(*EVERYONE), sum(of_stages))
    every = [StageTraffic(s.stage, tuple((*step, *maxima) for step in s.steps)) for s in stages]
    return TrafficPlan(tuple(every), passes, whole)


def steady(deck: Deck) -> Deck:
    """The deck without its first steps, which are exact."""
    return deck.with_keys(communication={"warmup": 0})


def _steps(
    deck: Deck,
    stage: TrainedStage,
    schedule: Schedule,
    number: int,
    listener: _Listener,
) -> tuple[list[list[Moved]], list[Moved]]:
    """Return what buckets and replicas move in each of the repeating steps, and what each update moves."""
    # How often gradients are summed does not depend on the micro-batches, but where they are cut.
    schedule = plain(schedule, 1) if deck.layout.zero < 2 else schedule
    local = deck.layout.local_steps
    weights, period, delay = (
        PlannedWeights(stage),
        deck.layout.steps_between_syncs,
        local.delay if local else 0,
    )
    everything = sum(bucket.length for bucket in stage.buckets)
    listener.begun = lambda: sum(b.length for b in stage.buckets if b.is_final) / everything
    with META:
        stage.replica_sync.begin(weights)
    steps = []
    for _ in range(2 * period):
        listener.take()
        rehearse(stage, deck.memory.recompute, schedule, number)
        of_gradients = listener.take()
        with META:
            send_update_messages(stage.optimizer)
            of_update = listener.take()
            weights.publish()
            weights.updates += 1
            of_gradients += listener.take()
            stage.replica_sync.after_update(weights)
            of_replicas = [
                moved if moved.begun is None else moved._replace(ahead=delay) for moved in listener.take()
            ]
            stage.synchronizer.end_step(True, 1.0)
        steps.append([*of_gradients, *of_replicas])
    return steps[period:], of_update


def _layers(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[Moved] | None:
    """Return what layers and the pipeline move in a step, by axis; None if layers need values to run."""
    if deck.model.experts:
        return None
    if deck.model.module is not None:
        return _of_module(deck, architecture, mesh, stage, schedule, passes, listener)
    alone = all(mesh.group(axis).size == 1 for axis in ("tensor", "context", "pipeline"))
    if alone and not stage.module_state.statistics_users:
        return []
    return _of_all_passes(deck, architecture, mesh, stage, schedule, passes, listener)


def _of_module(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[Moved] | None:
    """What a module that users bring moves: what it keeps goes round, stages pass on what they do, and where
    tensor ranks split it, so do activations, unless the module cannot compute without values.
    """
    of_layers: list[Moved] = []
    if mesh.group("tensor").size > 1 or mesh.group("pipeline").size > 1:
        try:
            of_layers = _of_all_passes(deck, architecture, mesh, stage, schedule, passes, listener)
        except Exception:  # noqa: BLE001  (whatever a user's code does where there are no values)
            return None
    listener.take()
    for each in stage.module_state.statistics_users:
        each.after_update({})
    return [*of_layers, *_by_axis(listener.take())]


def _of_all_passes(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
    listener: _Listener,
) -> list[Moved]:
    """Return what layers and the pipeline move, by axis, in a number of micro-batches."""
    first, second = (
        _of_passes(deck, architecture, mesh, stage, plain(schedule, few), listener) for few in (1, 2)
    )
    return [_further(first[axis], second[axis], passes) for axis in first]


def _of_passes(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    listener: _Listener,
) -> dict[str, Moved]:
    """Return what layers and the pipeline move, by axis, in the micro-batches of a schedule."""
    listener.take()
    _run(deck, architecture, mesh, stage, schedule, schedule.micro_batches)
    return {moved.axis: moved for moved in _by_axis(m for m in listener.take() if m.axis in LAYERS)}


def plain(schedule: Schedule, passes: int) -> Schedule:
    """Return a schedule with all forward passes, then all backward passes of some micro-batches.

    Each micro-batch sends as much as with the given schedule.
    """
    chunks, some = range(schedule.chunks), range(passes)
    forward = tuple(Action("F", micro, chunk) for micro in some for chunk in chunks)
    backward = tuple(Action("B", micro, chunk) for micro in some for chunk in reversed(chunks))
    return Schedule((forward + backward,) * schedule.stage_count, "planned", schedule.placement)


def _run(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    stage: TrainedStage,
    schedule: Schedule,
    passes: int,
) -> None:
    """Forward and backward of a step by the run's own executor."""
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
        running: AbstractContextManager[object] = META
        if isinstance(architecture, ModuleArchitecture):
            inputs = example_inputs(architecture, deck.batch.micro_size)
            batch, running = PreparedBatch(inputs, objective.loss_function(inputs, one)), simulated_host()
        stage.synchronizer.start(passes)
    with running, stage.pass_context(("rehearsed", passes)):
        executor.run(schedule, [batch] * passes)
    with META:
        stage.synchronizer.finish()


def _by_axis(moved: Iterable[Moved]) -> list[Moved]:
    """The sum of each axis."""
    ordered = sorted(moved, key=lambda each: each.axis)
    return [_sum(axis, list(of_axis)) for axis, of_axis in groupby(ordered, key=lambda each: each.axis)]


def _sum(axis: str, moved: Sequence[Moved]) -> Moved:
    sent, received, rounds = (sum(numbers) for numbers in zip(*(each.traffic for each in moved), strict=True))
    return Moved(axis, sum(each.payload for each in moved), Traffic(sent, received, rounds))


def _further(first: Moved, second: Moved, passes: int) -> Moved:
    """Extrapolate linearly from what one and two micro-batches move to `passes` micro-batches."""

    def at(one: int, two: int) -> int:
        return one + (two - one) * (passes - 1)

    return Moved(
        first.axis,
        at(first.payload, second.payload),
        Traffic(*(at(one, two) for one, two in zip(first.traffic, second.traffic, strict=True))),
    )


def _exchanges(deck: Deck, stage: TrainedStage, schedule: Schedule, number: int) -> list[Moved]:
    """Return what goes to the experts of other ranks and back if all experts have the same number of rows."""
    parts = part_bytes(deck, stage.models, False, deck.memory.recompute)
    forwards = Counter(action.chunk for action in schedule.stages[number] if action.kind == "F")
    exchanged = sum(count * parts[chunk].exchanged_bytes for chunk, count in forwards.items())
    layers = (layer for part in stage.models for layer in part.layers)
    calls = 4 * forwards.total() * sum(layer.kind.name == "mixture" for layer in layers)
    return [Moved("expert", exchanged, Traffic(exchanged, exchanged, calls))] if exchanged else []


def _of_all(deck: Deck, architecture: Architecture, mesh: PlannedMesh, stage: TrainedStage) -> list[Moved]:
    """The counts and figures that all ranks sum, see Step; of a module's own loss it has one."""
    own = 1 if deck.model.module is not None else len(make_objective(deck).metrics)
    figures = len(count(architecture).auxiliary_loss_names) + own + stage.replica[1]
    everyone = mesh.group(*EVERYONE)
    sums = [(mesh.group("data"), 2), (everyone, figures)]  # predicted and real tokens, then figures
    sums += [(everyone, 2)] if stage.synchronizer.norm_estimators else []
    return [moved for group, numbers in sums for moved in _all_reduced(group, numbers)]


def _all_reduced(group: Group, numbers: int) -> list[Moved]:
    """Return what an all-reduce of so many fp64 numbers moves."""
    if group.size == 1 or not numbers:
        return []
    tensor = torch.empty(numbers, dtype=torch.float64, device=META)
    call = Call("all_reduce", tensor, tensor)
    name = group.name if len(group.axes) == 1 else "world"
    return [Moved(name, call.payload, traffic_of(call, group.rank, group.size))]


def _of_weights(stage: TrainedStage, listener: _Listener, counted: Collection[str]) -> list[Moved]:
    """Maxima of weights that a step begins with, but along the axes that are counted with layers."""
    listener.take()
    products = products_in_8_bits(layer for model in stage.models for layer in model.layers)
    with META, WeightMaxima(products, stage.buckets, stage.layer_context.tensor).provide_maxima():
        return [moved for moved in _by_axis(listener.take()) if moved.axis not in counted]
