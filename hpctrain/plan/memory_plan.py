"""Prediction of the memory of every rank, from the deck alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from hpctrain.checkpoint.draft import saving_bytes
from hpctrain.checkpoint.memory_mirror import COPIES
from hpctrain.checkpoint.state_snapshots import snapshot_count
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import rank_count
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.transports.progress_counters import COPY_ROUND_BYTES, STAGED_ROUNDS
from hpctrain.comm.transports.shared import LEAST_SHARED_BYTES
from hpctrain.costs.bucket_bytes import gradient_bytes, pool_bytes, state_bytes, value_bytes
from hpctrain.costs.layer_bytes import byte_functions
from hpctrain.costs.layer_bytes.linear_bytes import planned_converted_bytes
from hpctrain.costs.layer_bytes.prepared_products import prepared_bytes
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.costs.reduction_bytes import synchronizer_bytes
from hpctrain.costs.update_bytes import update_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition
from hpctrain.engine.stages.stage import StageBuilder, TrainedStage, build_trained_stage
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.device_memory import matmul_workspace_bytes
from hpctrain.host.tensor_heap.tensor_heap import can_build_tensor_heap
from hpctrain.model.construction import architecture_of, layer_kinds
from hpctrain.model.count import count
from hpctrain.model.part import Layer
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.execute import receives_ahead
from hpctrain.pipeline.split import layer_ranges
from hpctrain.plan.activation_memory import activation_peak, packing_bytes
from hpctrain.plan.gpu_overhead import with_gpu_overhead
from hpctrain.plan.stages_on_meta import build_stage_on_meta
from hpctrain.sharding.state import MODEL

MALLOC_GAPS = 0.25
"""Freed memory that malloc, unlike the heap of tensors, keeps between tensors: a fraction of activations."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted memory of each rank of one pipeline stage, or of the ranks of one role.

    Attributes:
        stage: Number of the stage.
        blocks: Number of transformer blocks of the stage.
        parameters: Number of parameters of the stage on a tensor rank, without padding. ZeRO may split them.
        memory: Bytes by kind, those of auxiliary models included.
        exchanged_bytes: Bytes that a rank sends to experts of other ranks and back in a step, if the loads of
            all experts are equal.
        sharers: Number of ranks of a node that have the parameters in common. Each counts an equal part.
        reused_buffer_bytes: Part of `memory.buffer` that the models of a run use one after the other.
        state_copy_bytes: Part of `memory.other` for copies of the state. Each model of a run has its own.
        auxiliary_bytes: Bytes of parameters, gradients and optimizer state of each auxiliary model, by name.
        least_cache_bytes: Smallest size of the key and value cache with which the rank can generate.
    """

    stage: int
    blocks: int
    parameters: int
    memory: MemoryAccount
    exchanged_bytes: int = 0
    sharers: int = 1
    reused_buffer_bytes: int = 0
    state_copy_bytes: int = 0
    auxiliary_bytes: Mapping[str, int] = field(default_factory=dict)
    least_cache_bytes: int = 0

    @property
    def required_bytes(self) -> int:
        """Bytes without which a rank cannot run: those of `memory`, with the smallest possible cache."""
        return replace(self.memory, cache=min(self.memory.cache, self.least_cache_bytes)).total

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {"stage": self.stage, "blocks": self.blocks, "parameters": self.parameters}
        row |= self.memory.row()
        row |= {"exchanged_bytes": self.exchanged_bytes, "sharers": self.sharers}
        return row | ({"beside_bytes": dict(self.auxiliary_bytes)} if self.auxiliary_bytes else {})


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of all ranks.

    Attributes:
        parameters_total: Number of parameters of the model, without padding.
        parameters_active: Number of parameters that a token uses.
        sizes: Number of ranks along each axis; with servers, of the workers.
        zero_group: Number of ranks over which ZeRO splits.
        schedule: Name of the pipeline schedule.
        micro_batches: Number of micro-batches of a data rank in a step.
        stages: Memory of the pipeline stages, in their order; if ranks have roles, of each role.
        roles: Names of the roles and their numbers of ranks, such as ("servers", 2); empty without roles.
        unknown_reason: Explanation why the activations of a stage are not known, as for some modules of
            users. Then no account includes those of this stage and of later ones. None if all are known.
    """

    parameters_total: int
    parameters_active: int
    sizes: Mapping[str, int]
    zero_group: int
    schedule: str
    micro_batches: int
    stages: tuple[StageMemory, ...]
    roles: tuple[tuple[str, int], ...] = ()
    unknown_reason: str | None = None

    @property
    def activations_known(self) -> bool:
        """True if the memory of activations is known for all stages."""
        return self.unknown_reason is None

    @property
    def ranks_per_stage(self) -> list[int]:
        """Number of ranks of each of `stages`."""
        if self.roles:
            return [count for _, count in self.roles]
        return [rank_count(self.sizes) // len(self.stages)] * len(self.stages)

    @property
    def largest(self) -> StageMemory:
        """Stage whose ranks need most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    def max_node_bytes(self, ranks_per_node: int, shared_bytes: int = 0) -> int:
        """Return the bytes of the node that needs most. The arguments are those of `bytes_by_node`."""
        return max(self.bytes_by_node(ranks_per_node, shared_bytes))

    def bytes_by_node(self, ranks_per_node: int, shared_bytes: int = 0) -> list[int]:
        """Return the bytes that the ranks of each node require together, in the order of ranks.

        Args:
            ranks_per_node: Number of consecutive ranks that share a node, or another limit of memory.
            shared_bytes: Bytes of each rank that all ranks of a node have in common, such as the code of
                libraries. They count once.
        """
        counts = zip(self.stages, self.ranks_per_stage, strict=True)
        by_rank = [stage.required_bytes for stage, ranks in counts for _ in range(ranks)]
        nodes = (by_rank[first : first + ranks_per_node] for first in range(0, len(by_rank), ranks_per_node))
        return [sum(node) - shared_bytes * (len(node) - 1) for node in nodes]

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        unknown = {} if self.activations_known else {"activation_bytes": None}
        return {
            "parameters_total": self.parameters_total,
            "parameters_active": self.parameters_active,
            "ranks": sum(self.ranks_per_stage),
            "layout": dict(self.sizes),
            **({"roles": dict(self.roles)} if self.roles else {}),
            "zero_group": self.zero_group,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "stages": [stage.row() | unknown for stage in self.stages],
            **({} if self.activations_known else {"activations_unknown": self.unknown_reason}),
        }


def plan_memory(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    process_bytes: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """Return the predicted memory of the model that a deck trains, without its auxiliary models. Local.

    Nothing of the model is allocated.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        vocabulary: Number of token ids of the model.
        process_bytes: Bytes of a process without a model; 0 on a GPU.
        ranks_per_node: Number of ranks of a node. By default it is that of the deck, or else all ranks.
        split: Number of blocks of each pipeline part. By default parts are balanced by FLOPs.
        schedule: Schedule of a complete step. By default it follows from the deck.

    Raises:
        HpctrainError: A run of the deck would fail with the same error, or the deck depends on the number of
            ranks per node, which is missing.
    """
    planner = MemoryPlanner(deck, ranks, vocabulary, ranks_per_node, split, schedule)
    return planner.plan(process_bytes)


class _BuiltStage(NamedTuple):
    """Pipeline stage without memory, and what follows from it for all stages that are built equally.

    Attributes:
        stage: The stage.
        account: Account of its parameters, gradients, optimizer state and reused buffers.
        groups: Groups through which its ranks send tensors.
    """

    stage: TrainedStage
    account: MemoryAccount
    groups: Sequence[Group]


class MemoryPlanner:
    """Predicts the memory of the ranks that train one model.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        vocabulary: Number of token ids of the model.
        ranks_per_node: As in `plan_memory`.
        split: As in `plan_memory`.
        schedule: As in `plan_memory`.
        build: Function that builds a stage.

    Raises:
        HpctrainError: As in `plan_memory`.
    """

    def __init__(
        self,
        deck: Deck,
        ranks: int,
        vocabulary: int,
        ranks_per_node: int | None = None,
        split: Sequence[int] | None = None,
        schedule: Schedule | None = None,
        build: StageBuilder = build_trained_stage,
    ) -> None:
        self._deck, self._ranks, self._build = deck, ranks, build
        self._sizes = axis_sizes(deck, ranks)
        self._architecture = architecture_of(deck, vocabulary)
        if ranks_per_node is None:
            _refuse_node_keys(deck)
        self._ranks_per_node = ranks_per_node or deck.machine.known_ranks_per_node or ranks
        self._micro_batches = micro_batches(deck, self._sizes["data"])
        if schedule is None or split is None:
            placement = place_by_flops(deck, self._architecture, self._sizes["data"])
            schedule = placement.schedule_of(self._micro_batches) if schedule is None else schedule
            split = placement.split if split is None else split
        self._schedule, self._split = schedule, split
        self._device = device_kind(deck.run.device)
        _, *self._block_kinds, _ = layer_kinds(self._architecture)
        self._built_stages: dict[object, _BuiltStage] = {}

    def plan(self, process_bytes: int = 0) -> MemoryPlan:
        """Return the predicted memory of all ranks. Local.

        Args:
            process_bytes: Bytes of a process without a model; 0 on a GPU.
        """
        deck, stages, unknown_reason = self._deck, list[StageMemory](), None
        built_stages = [self._build_stage(number) for number in range(self._schedule.stage_count)]
        for number, built in enumerate(built_stages):
            parts = part_bytes(deck, built.stage.models, not on_host(self._device), deck.memory.recompute)
            reasons = (part.unknown_reason for part in parts)
            unknown_reason = next(filter(None, reasons), unknown_reason)
            activation = 0
            if unknown_reason is None:
                activation = activation_peak(deck, parts, self._schedule.stages[number])
            stages.append(self._stage_memory(number, built, parts, activation, process_bytes))
        numbers = count(self._architecture)
        return MemoryPlan(
            parameters_total=numbers.parameters,
            parameters_active=numbers.active_parameters,
            sizes=self._sizes,
            zero_group=built_stages[-1].stage.buckets[0].sharding.group.size,
            schedule=self._schedule.name,
            micro_batches=self._micro_batches,
            stages=tuple(stages),
            unknown_reason=unknown_reason,
        )

    def _stage_memory(
        self,
        number: int,
        built: _BuiltStage,
        parts: Sequence[PartBytes],
        activation: int,
        process_bytes: int,
    ) -> StageMemory:
        """Return the memory of the ranks of a stage.

        Args:
            number: Number of the stage.
            built: The stage without memory.
            parts: Saved bytes of its model parts.
            activation: Bytes of its activations, at their peak.
            process_bytes: Bytes of a process without a model.
        """
        deck, device, (stage, account, groups) = self._deck, self._device, built
        buffer, other = self._message_bytes(number, parts), process_bytes + matmul_workspace_bytes(device)
        scratch, staged = _input_gradient_reduction_bytes(deck, stage, parts[0], device)
        buffer += scratch
        other += staged + _workspace_bytes(deck, parts)
        copies = 0
        if on_host(device):
            uses_malloc = deck.runtime_choices.uses_malloc
            if not can_build_tensor_heap() if uses_malloc is None else uses_malloc:
                other += int(MALLOC_GAPS * activation)
            other += prepared_bytes(_layers_of(parts), parts[0].sizes, deck.machine.prepared_product)
            other += _saving_bytes(stage)
            copies = self._state_copy_bytes(stage)
        memory = replace(
            account,
            parameter=account.parameter + planned_converted_bytes(_layers_of(parts)),
            activation=activation,
            buffer=account.buffer + buffer,
            other=other + copies,
        )
        if not on_host(device):
            memory = with_gpu_overhead(memory, groups, deck.communication.requested_transport)
        return StageMemory(
            stage=number,
            blocks=sum(part.part.span.blocks for part in parts),
            parameters=sum(bucket.layout.used_length for bucket in stage.buckets),
            memory=memory,
            exchanged_bytes=self._exchanged_bytes(number, parts),
            sharers=max(bucket.sharers for bucket in stage.buckets),
            reused_buffer_bytes=buffer + synchronizer_bytes(stage.synchronizer),
            state_copy_bytes=copies,
        )

    def _build_stage(self, number: int) -> _BuiltStage:
        """Return a stage without memory.

        Stages with the same layers at the same place on nodes are built once. They differ at most in the
        number of micro-batches whose activations they keep.
        """
        deck, schedule = self._deck, self._schedule
        key: object = number
        if not deck.model.has_frozen_parameters and deck.model.module is None:
            ranges = layer_ranges(schedule, self._split, number)
            layers = (
                (*self._block_kinds[each.first : each.last], each.has_embedding, each.has_head)
                for each in ranges
            )
            key = self._first_rank_on_node(number), tuple(layers)
        if key not in self._built_stages:
            stage, mesh = build_stage_on_meta(
                deck,
                self._architecture,
                self._sizes,
                self._ranks_per_node,
                PipelinePosition(schedule, self._split, number),
                self._device,
                self._build,
            )
            account = _state_account(deck, stage, self._device)
            self._built_stages[key] = _BuiltStage(stage, account, _sending_groups(deck, mesh))
        return self._built_stages[key]

    def _first_rank_on_node(self, number: int) -> int:
        """Return which rank of its node is the first one of a stage; 0 if it makes no difference."""
        ranks, per_node = rank_count(self._sizes) // self._schedule.stage_count, self._ranks_per_node
        return number * ranks % per_node if ranks % per_node and per_node % ranks else 0

    def _message_bytes(self, number: int, parts: Sequence[PartBytes]) -> int:
        """Return the bytes of hidden states, and of their gradients, that a stage receives and sends."""
        neighbors = {number - 1, number + 1} & set(range(self._schedule.stage_count))
        return (receives_ahead(self._device) + 1) * len(neighbors) * parts[0].hidden.bytes

    def _exchanged_bytes(self, number: int, parts: Sequence[PartBytes]) -> int:
        """Return the bytes that a rank of a stage sends to experts and back in a step."""
        actions = self._schedule.stages[number]
        forwards = Counter(action.chunk for action in actions if action.kind == "F")
        return sum(count * parts[chunk].exchanged_bytes for chunk, count in forwards.items())

    def _state_copy_bytes(self, stage: TrainedStage) -> int:
        """Return the bytes of copies of the state of a rank: for checkpoints, rollback and mirrors."""
        copies = _background_save_bytes(self._deck, stage) + rollback_copy_bytes(self._deck, stage)
        has_several_nodes = self._ranks > self._ranks_per_node
        return copies + (mirror_bytes(self._deck, stage) if has_several_nodes else 0)


def rollback_copy_bytes(deck: Deck, stage: TrainedStage) -> int:
    """Return the bytes of host memory for the copies of a rank's state to which a run can go back."""
    back = deck.stability.spike_back if deck.stability.spike == "rollback" else 0
    copies = snapshot_count(deck.checkpoint.memory_every, back)
    return copies * sum(tensor.values.nbytes for tensor in stage.state()) if copies else 0


def mirror_bytes(deck: Deck, stage: TrainedStage) -> int:
    """Return the bytes of host memory for mirrors of a rank's state and of that of a rank on another node.

    Both states are assumed to have the same size. Returns 0 if the deck has no mirrors.
    """
    if not deck.checkpoint.mirror:
        return 0
    return COPIES * sum(t.values.nbytes // t.holder_position[1] for t in stage.state() if t.writes_checkpoint)


def _refuse_node_keys(deck: Deck) -> None:
    """Raise HpctrainError if a key of the deck depends on which ranks share a node."""
    values = {"layout.zero_group": "node"}
    if deck.communication.compression:
        values |= {f"communication.{deck.communication.compress}.between": "nodes"}
    for key, value in values.items():
        if deck.value(key) == value:
            reason = "the number of ranks per node is missing: add --ranks-per-node N"
            raise HpctrainError(deck.problem(key, reason))


def _layers_of(parts: Iterable[PartBytes]) -> Iterable[Layer]:
    return chain.from_iterable(part.part.layers for part in parts)


def _state_account(deck: Deck, stage: TrainedStage, device: torch.device) -> MemoryAccount:
    """Return the account of parameters, gradients and optimizer state, and of the buffers for them.

    Buckets, reductions and updates use the buffers in turn. Offloaded tensors do not count. The buffers for
    their transfer are in host memory, so they count if the ranks compute on CPUs.
    """
    memory, buckets = deck.memory, stage.buckets
    buffer = pool_bytes(buckets) + synchronizer_bytes(stage.synchronizer)
    if on_host(device):
        buffer += update_bytes(stage.optimizer)
    if memory.parameters == "disk" and on_host(device):
        slices = (bucket.owned_slice for bucket in buckets)
        buffer += max(each.stop - each.start for each in slices) * buckets[0].dtype.itemsize
    return MemoryAccount(
        value_bytes(buckets) if memory.parameters == "device" else 0,
        gradient_bytes(buckets),
        state_bytes(stage.state(), buckets),
        buffer=buffer,
    )


def _sending_groups(deck: Deck, mesh: PlannedMesh) -> list[Group]:
    """Return the groups of a mesh that send tensors.

    The group of all context and tensor ranks does so only in models with experts.
    """
    return [
        group
        for group in mesh.communicating_groups
        if deck.model.experts or group.axes != ("context", "tensor")
    ]


def _input_gradient_reduction_bytes(
    deck: Deck, stage: TrainedStage, part: PartBytes, device: torch.device
) -> tuple[int, int]:
    """Return the bytes that reductions of input gradients over tensor ranks need.

    A reduction runs while the weight gradient of the same layer is computed.

    Args:
        deck: The deck.
        stage: Stage without memory.
        part: One of its model parts.
        device: Device of the run.

    Returns:
        Bytes of host memory into which the reduction receives, and bytes of shared memory through which the
        ranks of a node copy.
    """
    itemsize = part.sizes.itemsize
    reduces_in_fp32 = itemsize < torch.float32.itemsize and deck.communication.half_sums == "fp32"
    if not on_host(device) and not reduces_in_fp32:
        return 0, 0
    gradient = part.sizes.tokens * part.part.hidden_shape(1)[-1], itemsize
    transport = stage.layer_context.tensor.host
    is_staged = transport.sharers > 1 and prod(gradient) >= LEAST_SHARED_BYTES
    staged = STAGED_ROUNDS * COPY_ROUND_BYTES if is_staged else 0
    return transport.scratch_bytes(*gradient, deck.layout.sequence_parallel), staged


def _workspace_bytes(deck: Deck, parts: Sequence[PartBytes]) -> int:
    """Return the temporary bytes of computations at the peak of activations.

    They are those of the loss, of the backward pass of the last block, or of the compression of a segment,
    whichever is largest. When the last block computes, the activations of the head are free already.
    """
    head = sum(part.head for part in parts)
    layers = [
        byte_functions.workspace_bytes(layer, part.sizes) - (head if layer.is_block else 0)
        for part in parts
        for layer in part.part.layers
    ]
    segments = (packing_bytes(deck, segment) for part in parts for segment in part.saved_segments())
    return max(*layers, *segments, 0)


def _background_save_bytes(deck: Deck, stage: TrainedStage) -> int:
    """Return the bytes of host memory for a checkpoint in the background.

    It copies what an update would change before it is written, at most `checkpoint.buffer` bytes. Parameters
    that are rounded copies of master weights are not copied.
    """
    if deck.checkpoint.mode != "background" or not deck.checkpoint.every:
        return 0
    written = (
        t for t in stage.state() if t.writes_checkpoint and (t.kind, t.resume_mode) != (MODEL, "never")
    )
    return min(deck.checkpoint.buffer, sum(t.values.nbytes // t.holder_position[1] for t in written))


def _saving_bytes(stage: TrainedStage) -> int:
    """Return the host memory that a rank needs to save a checkpoint, beside `_background_save_bytes`."""
    saved = [tensor.values for tensor in stage.state() if tensor.writes_checkpoint]
    return max((saving_bytes(values.numel(), values.dtype.itemsize) for values in saved), default=0)
