"""The memory that every rank of a deck will hold, told from the deck alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from hpctrain.checkpoint.draft import saving_bytes
from hpctrain.checkpoint.mirror import COPIES
from hpctrain.checkpoint.snapshots import copies_held
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import rank_count
from hpctrain.comm.planned import PlannedCalls, PlannedMesh, ReductionBytes
from hpctrain.comm.transports.progress_counters import COPY_ROUND_BYTES, STAGED_ROUNDS
from hpctrain.comm.transports.shared import SHARED_BYTES
from hpctrain.costs.bucket_bytes import gradient_bytes, pool_bytes, state_bytes, value_bytes
from hpctrain.costs.layer_bytes import byte_functions
from hpctrain.costs.layer_bytes.linear_bytes import planned_converted_bytes
from hpctrain.costs.layer_bytes.prepared_products import prepared_bytes
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.costs.reduction_bytes import synchronizer_bytes
from hpctrain.costs.update_bytes import cell_state_elements, state_per_element, update_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.engine.stages.stage import StageBuilder, TrainedStage, build_trained_stage
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.device_memory import matmul_workspace_bytes
from hpctrain.host.tensor_heap.tensor_heap import can_build_tensor_heap
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.model.construction import architecture_of, layer_kinds
from hpctrain.model.count import count
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.pipeline.execute import receives_ahead
from hpctrain.pipeline.split import layer_ranges
from hpctrain.plan.activations import activation_peak, packing_bytes
from hpctrain.plan.gpu_overhead import with_gpu_overhead
from hpctrain.plan.step_on_meta import rehearse
from hpctrain.sharding.state import MODEL

MALLOC_GAPS = 0.25
"""Freed memory that malloc keeps between tensors, as a part of activations; a heap of tensors keeps none."""

REHEARSED_MICRO_BATCHES = 3
"""Without pipeline stages: a first, one between and a last one; more take no more memory."""


@dataclass(frozen=True)
class StageMemory:
    """What every rank of one pipeline stage holds: blocks, elements of parameters that lie there, bytes.

    Parameters that `sharers` ranks of a node have in common are counted in parts, as large for each.
    `exchanged` are the bytes that it sends to other ranks' experts and back in a step, where all have as many
    rows. Of buffers `passing` ones, and of `other` what is not `kept`, serve all models of a run in turn.
    `beside` is what models hold, by name, beside the one that is trained; of a cache it can do with
    `least_cache`.
    """

    stage: int
    blocks: int
    parameters: int
    memory: MemoryAccount
    exchanged: int = 0
    sharers: int = 1
    passing: int = 0
    kept: int = 0
    beside: Mapping[str, int] = field(default_factory=dict)
    least_cache: int = 0

    @property
    def needed(self) -> int:
        """What it cannot do without."""
        return replace(self.memory, cache=min(self.memory.cache, self.least_cache)).total

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        here: dict[str, object] = {"stage": self.stage, "blocks": self.blocks, "parameters": self.parameters}
        counted = {"exchanged_bytes": self.exchanged, "sharers": self.sharers}
        beside = {"beside_bytes": dict(self.beside)} if self.beside else {}
        return here | self.memory.row() | counted | beside


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of all ranks. `sizes` are ranks by axis, `parameters_total` is without padding, as is
    `parameters_active`, those that a token meets. Where ranks have `roles`, names and numbers of
    ranks, these are the stages, and `sizes` those of the workers. Activations that are not known, of a module
    that users bring, are in no sum; `unknown` is why.
    """

    parameters_total: int
    parameters_active: int
    sizes: Mapping[str, int]
    zero_group: int
    schedule: str
    micro_batches: int
    stages: tuple[StageMemory, ...]
    roles: tuple[tuple[str, int], ...] = ()
    unknown: str | None = None

    @property
    def activations_known(self) -> bool:
        """Whether they are."""
        return self.unknown is None

    @property
    def ranks(self) -> list[int]:
        """How many each stage has."""
        if self.roles:
            return [count for _, count in self.roles]
        return [rank_count(self.sizes) // len(self.stages)] * len(self.stages)

    @property
    def largest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    def node_bytes(self, ranks: int, shared: int = 0) -> int:
        """What the `ranks` ranks of one node hold together, on the node that holds most; what they have in
        common, `shared` bytes, counts once.
        """
        return max(self.bytes_of_nodes(ranks, shared))

    def bytes_of_nodes(self, ranks: int, shared: int = 0) -> list[int]:
        """As `node_bytes`, of each node in the order of ranks."""
        of_ranks = [stage.needed for stage, n in zip(self.stages, self.ranks, strict=True) for _ in range(n)]
        nodes = (of_ranks[first : first + ranks] for first in range(0, len(of_ranks), ranks))
        return [sum(node) - shared * (len(node) - 1) for node in nodes]

    @property
    def _not_known(self) -> dict[str, object]:
        """What a row tells as not known."""
        return {} if self.activations_known else {"activation_bytes": None}

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {
            "parameters_total": self.parameters_total,
            "parameters_active": self.parameters_active,
            "ranks": sum(self.ranks),
            "layout": dict(self.sizes),
            **({"roles": dict(self.roles)} if self.roles else {}),
            "zero_group": self.zero_group,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "stages": [stage.row() | self._not_known for stage in self.stages],
            **({} if self.unknown is None else {"activations_unknown": self.unknown}),
        }


def plan_memory(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    libraries: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    build: StageBuilder = build_trained_stage,
) -> MemoryPlan:
    """What `ranks` ranks of a deck will hold. Allocates nothing of the model.

    `libraries` are the bytes that a process holds without a model; `split` the blocks of every part and
    `schedule` that of a whole step, where a run has measured first; `build` as in `plan_stage`.
    Raises HpctrainError as a run would, and where the deck asks for nodes without `ranks_per_node`.
    """
    sizes = axis_sizes(deck, ranks)
    architecture = architecture_of(deck, vocabulary)
    between = f"communication.{deck.communication.compress}.between"
    nodes = {"layout.zero_group": "node"} | ({between: "nodes"} if deck.communication.compression else {})
    asking = [key for key, value in nodes.items() if deck.value(key) == value]
    if asking and ranks_per_node is None:
        needed = "the number of ranks per node is missing: add --ranks-per-node N"
        raise HpctrainError(deck.problem(asking[0], needed))
    passes = micro_batches(deck, sizes["data"])
    if schedule is None or split is None:
        placement = place_by_flops(deck, architecture, sizes["data"])
        schedule = placement.schedule_of(passes) if schedule is None else schedule
        split = placement.split if split is None else split
    counts = split
    device = device_kind(deck.run.device)
    _, *kinds, _ = layer_kinds(architecture)
    on_node = ranks_per_node or deck.machine.ranks_per_node or deck.machine.gpus_per_node
    per_node, transport = on_node or ranks, deck.communication.requested_transport

    def planned_mesh(number: int, place: int = 0) -> PlannedMesh:
        audited: ReductionBytes | None = None
        if deck.stability.corruption == "full":
            from hpctrain.audit.audited_reduction import audited_scratch_bytes as audited
        calls = PlannedCalls(reduction_bytes=audited)
        return PlannedMesh(sizes, number, per_node, device, place, transport, calls)

    planned: dict[object, tuple[TrainedStage, MemoryAccount, Sequence[Group]]] = {}
    stages, of_stage = [], rank_count(sizes) // schedule.stage_count
    unknown: str | None = None
    for number in range(schedule.stage_count):
        spans = layer_ranges(schedule, counts, number)
        # Stages in the middle differ, if at all, in the micro-batches whose activations they hold, and in how
        # they lie where nodes cut stages.
        begins = number * of_stage % per_node if of_stage % per_node and per_node % of_stage else 0
        kind: object = begins, tuple((*kinds[s.first : s.last], s.has_embedding, s.has_head) for s in spans)
        if deck.model.has_frozen_parameters or deck.model.module is not None:
            kind = number
        if kind not in planned:
            mesh = planned_mesh(number)
            stage = plan_stage(
                deck, architecture, mesh, PipelinePosition(schedule, counts, number), device, build
            )
            place = loneliest_place(stage, sizes, number, per_node) or fullest_place(
                deck, stage, sizes, number
            )
            if place:
                mesh = planned_mesh(number, place)
                stage = plan_stage(
                    deck, architecture, mesh, PipelinePosition(schedule, counts, number), device, build
                )
            if deck.layout.zero > 1:
                alone = schedule.stage_count == 1
                step = accumulation(min(passes, REHEARSED_MICRO_BATCHES)) if alone else schedule
                for _ in range(2):  # the second step gathers ahead, in the order of the first
                    rehearse(stage, deck.memory.recompute, step, number)
            planned[kind] = stage, _states(deck, stage, device), _communicating(deck, mesh)
        stage, states, groups = planned[kind]
        parts = part_bytes(deck, stage.models, not on_host(device), deck.memory.recompute)
        unknown = next((part.unknown_reason for part in parts if part.unknown_reason), unknown)
        used = sum(bucket.layout.used_length for bucket in stage.buckets)
        senders = {number - 1, number + 1} & set(range(schedule.stage_count))
        # Hidden states and their gradients on their way between stages.
        buffer = (receives_ahead(device) + 1) * len(senders) * parts[0].hidden.bytes
        kept = 0
        activation = activation_peak(deck, parts, schedule.stages[number]) if unknown is None else 0
        other = libraries + matmul_workspace_bytes(device) + _workspace(deck, parts)
        halves = parts[0].sizes.itemsize < torch.float32.itemsize and deck.communication.half_sums == "fp32"
        if on_host(device) or halves:
            # What the sum of an input gradient receives, while the weight gradient is computed.
            summed = parts[0].sizes.tokens * parts[0].part.hidden_shape(1)[-1], parts[0].sizes.itemsize
            host = stage.layer_context.tensor.host
            buffer += host.scratch_bytes(*summed, deck.layout.sequence_parallel)
            if host.sharers > 1 and prod(summed) >= SHARED_BYTES:
                other += STAGED_ROUNDS * COPY_ROUND_BYTES
        if on_host(device):
            if not can_build_tensor_heap():
                other += int(MALLOC_GAPS * activation)
            layers = (layer for part in parts for layer in part.part.layers)
            other += prepared_bytes(layers, parts[0].sizes, deck.machine.prepared_product)
            other += _saving_bytes(stage)
            kept = _snapshot(deck, stage) + held_bytes(deck, stage)
            kept += mirror_bytes(deck, stage) if ranks > per_node else 0
        memory = replace(
            states,
            parameter=states.parameter
            + planned_converted_bytes(layer for part in parts for layer in part.part.layers),
            activation=activation,
            buffer=states.buffer + buffer,
            other=other + kept,
        )
        memory = memory if on_host(device) else with_gpu_overhead(memory, groups, transport)
        forwards = Counter(action.chunk for action in schedule.stages[number] if action.kind == "F")
        exchanged = sum(count * parts[chunk].exchanged_bytes for chunk, count in forwards.items())
        sharers = max(bucket.sharers for bucket in stage.buckets)
        blocks = sum(span.blocks for span in spans)
        passing = buffer + synchronizer_bytes(stage.synchronizer)
        stages.append(StageMemory(number, blocks, used, memory, exchanged, sharers, passing, kept))
    zero_group = stage.buckets[0].sharding.group.size
    numbers = count(architecture)
    totals = numbers.parameters, numbers.active_parameters
    return MemoryPlan(*totals, sizes, zero_group, schedule.name, passes, tuple(stages), unknown=unknown)


def loneliest_place(stage: TrainedStage, sizes: Mapping[str, int], number: int, ranks_per_node: int) -> int:
    """The place, among a pipeline stage's ranks, of one with parameters in common with fewest others, where
    nodes cut groups otherwise than the first one's.
    """
    cut = [bucket.sharding.group for bucket in stage.buckets if bucket.sharers > 1]
    groups = {(group.axes, group.size) for group in cut}

    def shared(place: int) -> int:
        mesh, least = PlannedMesh(sizes, number, ranks_per_node, place=place), rank_count(sizes)
        for axes, size in groups:
            whole = mesh.group(*axes)
            first = whole.rank // size * size
            least = min(least, ranks_per_node_of(mesh.nodes(whole)[first : first + size]))
        return least

    # How the groups of a rank lie follows from where it is on its node.
    ranks = rank_count(sizes) // sizes["pipeline"]
    return min(range(min(ranks, ranks_per_node)), key=shared) if groups else 0


def fullest_place(deck: Deck, stage: TrainedStage, sizes: Mapping[str, int], number: int) -> int:
    """The place, among the ranks of a pipeline stage, of the one whose shares of buckets take most memory,
    where they differ: where blocks are not cut (`sharding/ownership.py`).
    """
    rules = RULES[deck.optimizer.name](deck)
    cut = [bucket for bucket in stage.buckets if bucket.layout.sizes is not None and bucket.sharding.zero]
    if not cut or not isinstance(rules, MatrixRules):
        return 0

    def held(place: int) -> int:
        mesh, total = PlannedMesh(sizes, number, 1, place=place), 0
        for bucket in cut:
            group, zero = bucket.sharding.group, bucket.sharding.zero
            rank = mesh.group(*group.axes).rank % group.size
            first, last = bucket.layout.borders[rank : rank + 2]
            kept = 4 * (bucket.dtype != torch.float32) + bucket.gradient_dtype.itemsize * (zero > 1)
            kept += bucket.dtype.itemsize * (zero == 3 and bucket.sharers == 1)
            for treated in bucket.layout.update_ranges:
                elements = max(0, min(last, treated.part.stop) - max(first, treated.part.start))
                total += elements * (kept + 4 * state_per_element(rules, treated.update_settings))
            for segment in bucket.segments:
                elements = min(last, segment.start + segment.length) - max(first, segment.start)
                total += 4 * cell_state_elements(rules, segment.parameter, max(0, elements))
        return total

    ranks = rank_count(sizes) // sizes["pipeline"]
    return max(range(0, ranks, sizes["tensor"]), key=held)


def _states(deck: Deck, stage: TrainedStage, device: torch.device) -> MemoryAccount:
    """Parameters, gradients, what else belongs to parameters, and what these take turns in.

    Without what lives elsewhere; what of that is on its way lies in host memory, which beside a GPU's does
    not count.
    """
    memory, buckets = deck.memory, stage.buckets
    turns = pool_bytes(buckets) + synchronizer_bytes(stage.synchronizer)
    if on_host(device):
        turns += update_bytes(stage.optimizer)
    if memory.parameters == "disk" and on_host(device):
        turns += (
            max(bucket.owned_slice.stop - bucket.owned_slice.start for bucket in buckets)
            * buckets[0].dtype.itemsize
        )
    return MemoryAccount(
        value_bytes(buckets) if memory.parameters == "device" else 0,
        gradient_bytes(buckets),
        state_bytes(stage.state(), buckets),
        buffer=turns,
    )


def _communicating(deck: Deck, mesh: PlannedMesh) -> list[Group]:
    """The groups that send tensors: without experts, no sum of a micro-batch's ranks does."""
    return [group for group in mesh.made if deck.model.experts or group.axes != ("context", "tensor")]


def _snapshot(deck: Deck, stage: TrainedStage) -> int:
    """Host memory that a checkpoint takes while training goes on: at most that of all that a rank writes of
    what belongs to parameters, besides parameters that are made from it.
    """
    if deck.checkpoint.mode != "background" or not deck.checkpoint.every:
        return 0
    written = (
        t for t in stage.state() if t.writes_checkpoint and (t.kind, t.resume_mode) != (MODEL, "never")
    )
    return min(deck.checkpoint.buffer, sum(t.values.nbytes // t.holder_position[1] for t in written))


def _saving_bytes(stage: TrainedStage) -> int:
    """Return the host memory that a rank needs to save a checkpoint, beside `_snapshot`."""
    saved = [tensor.values for tensor in stage.state() if tensor.writes_checkpoint]
    return max((saving_bytes(values.numel(), values.dtype.itemsize) for values in saved), default=0)


def held_bytes(deck: Deck, stage: TrainedStage) -> int:
    """Host memory of the copies of all state that a run can go back to."""
    back = deck.stability.spike_back if deck.stability.spike == "rollback" else 0
    copies = copies_held(deck.checkpoint.memory_every, back)
    return copies * sum(tensor.values.nbytes for tensor in stage.state()) if copies else 0


def mirror_bytes(deck: Deck, stage: TrainedStage) -> int:
    """Memory of its node that a rank has for mirrors of its state and of a neighbour's, about as large."""
    if not deck.checkpoint.mirror:
        return 0
    return COPIES * sum(t.values.nbytes // t.holder_position[1] for t in stage.state() if t.writes_checkpoint)


def _workspace(deck: Deck, parts: Sequence[PartBytes]) -> int:
    """What computing needs in passing beside activations at their peak: the loss of a chunk of tokens, the
    last block's backward, by when the head's activations are gone, or the compression of what waits.
    """
    gone = sum(part.head for part in parts)
    placed = [(layer, part.sizes) for part in parts for layer in part.part.layers]
    layers = [
        byte_functions.workspace_bytes(layer, at) - (gone if layer.is_block else 0) for layer, at in placed
    ]
    return max(
        *layers, *(packing_bytes(deck, segment) for part in parts for segment in part.saved_segments()), 0
    )
