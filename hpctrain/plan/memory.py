"""The memory that every rank of a deck will hold, told from the deck alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from hpctrain.comm.planned import PlannedMesh, PlannedTransport
from hpctrain.deck.schema import Deck
from hpctrain.engine.offload import make_rule
from hpctrain.engine.sizes import axis_sizes
from hpctrain.engine.stage import zero_group_size
from hpctrain.errors import HpctrainError
from hpctrain.memory.accounts import Account, storage_bytes
from hpctrain.memory.saved import ActivationBytes
from hpctrain.model.count import count
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.optim.offload import working_bytes
from hpctrain.optim.optimizer import STATE_BYTES, UpdateRule
from hpctrain.parallel.product import PRODUCT_ELEMENTS
from hpctrain.parallel.vocabulary import chunk_rows
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.pipeline.execute import AHEAD
from hpctrain.pipeline.split import even_split, spans_of
from hpctrain.pipeline.wanted import make_schedule
from hpctrain.plan.activations import PlannedPart, activation_peak, packing_bytes, saved_bytes
from hpctrain.plan.model import PlannedStage, plan_stage, rehearse
from hpctrain.sharding.bucket import Bucket, pool_bytes

HOLES = {"gpt2": 2.4, "llama": 3.5}
"""Activations of so many blocks: freed memory between what is in use, which the C library keeps.

Measured, not derived: with glibc 2.36, on models of 2M to 124M parameters, the peak of a process beside that
of one whose tensors are mapped apart (MALLOC_MMAP_THRESHOLD_: it leaves no holes and costs half of the
speed). gpt2: 0.3 to 3.9 blocks. llama, whose norms, rotation and gate free what they need in passing between
what they keep: 2.6 blocks after five steps, 3.8 after 250.
"""

REHEARSED_MICRO_BATCHES = 3
"""Without pipeline stages: a first, one between and a last one; more take no more memory."""


@dataclass(frozen=True)
class StageMemory:
    """What every rank of one pipeline stage holds: blocks, elements of parameters that lie there, bytes."""

    stage: int
    blocks: int
    parameters: int
    memory: Account

    def row(self) -> dict[str, int]:
        """As written into JSON."""
        here = {"stage": self.stage, "blocks": self.blocks, "parameters": self.parameters}
        return here | self.memory.row()


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of all ranks. `sizes` are ranks by axis, `parameters_total` is without padding."""

    parameters_total: int
    sizes: Mapping[str, int]
    zero_group: int
    schedule: str
    micro_batches: int
    stages: tuple[StageMemory, ...]

    @property
    def largest(self) -> StageMemory:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    def node_bytes(self, ranks: int, shared: int = 0) -> int:
        """What the `ranks` ranks of one node hold together, on the node that holds most; what they have in
        common, `shared` bytes, counts once.
        """
        of_ranks = [
            stage.memory.total
            for stage in self.stages
            for _ in range(prod(self.sizes.values()) // len(self.stages))
        ]
        nodes = (of_ranks[first : first + ranks] for first in range(0, len(of_ranks), ranks))
        return max(sum(node) - shared * (len(node) - 1) for node in nodes)

    def row(self) -> dict[str, object]:
        """As written into JSON."""
        return {
            "parameters_total": self.parameters_total,
            "ranks": prod(self.sizes.values()),
            "layout": dict(self.sizes),
            "zero_group": self.zero_group,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "stages": [stage.row() for stage in self.stages],
        }


def plan_memory(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    libraries: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """What `ranks` ranks of a deck will hold. Allocates nothing of the model.

    `libraries` are the bytes that a process holds without a model; `split` the blocks of every part and
    `schedule` that of a whole step, where a run has measured before it chose them. Raises HpctrainError as a
    run would, and where `layout.zero_group = "node"` needs `ranks_per_node`.
    """
    sizes = axis_sizes(deck, ranks)
    shape = ModelShape.of(deck, vocabulary)
    if deck.layout.zero_group == "node" and ranks_per_node is None:
        told = "the plan needs to know a node's ranks: give --ranks-per-node N"
        raise HpctrainError(deck.problem("layout.zero_group", told))
    meshes = [PlannedMesh(sizes, stage, ranks_per_node or ranks) for stage in range(sizes["pipeline"])]
    zero_group = zero_group_size(deck, meshes[0], meshes[0].group("data", "context"))
    micro_batches = -(-deck.batch.global_size // (deck.batch.micro_size * sizes["data"]))
    if schedule is None:
        schedule = make_schedule(deck, sizes["data"])(micro_batches)
    counts = _split(deck, shape, schedule, split)
    rehearsal = accumulation(min(micro_batches, REHEARSED_MICRO_BATCHES))
    found: dict[object, tuple[Account, int, list[PlannedPart]]] = {}
    kept = saved_bytes(deck, shape, sizes)
    stages = []
    for number in range(schedule.stage_count):
        spans = spans_of(schedule, counts, number)
        # Stages in the middle differ, if at all, in the micro-batches whose activations they hold.
        kind: object = tuple((span.blocks, span.embeds, span.predicts) for span in spans)
        if deck.model.frozen:
            kind = number
        if kind not in found:
            planned = plan_stage(deck, shape, meshes[number], schedule, counts, number)
            if deck.layout.zero > 1:
                for _ in range(2):  # the second step gathers ahead, in the order of the first
                    rehearse(planned, rehearsal if schedule.stage_count == 1 else schedule, number)
            used = sum(bucket.layout.used for bucket in planned.buckets)
            held = _without_offloaded(deck, _states(planned, make_rule(deck), Precision.of(deck)), planned)
            found[kind] = held, used, planned.parts
        states, used, planned_parts = found[kind]
        activation = activation_peak(deck, kept, schedule.stages[number], planned_parts)
        other = libraries + _workspace(deck, shape, sizes, planned_parts, kept)
        if deck.run.device != "cuda":
            other += int(HOLES[shape.family] * kept.block) + _snapshot(
                deck, used // (sizes["data"] * sizes["context"])
            )
        memory = replace(
            states,
            activation=activation,
            buffer=states.buffer
            + _messages(deck, shape, sizes, schedule, number)
            + _input_gradients(deck, shape, sizes),
            other=other,
        )
        blocks = sum(span.blocks for span in spans)
        stages.append(StageMemory(number, blocks, used, memory))
    return MemoryPlan(count(shape).parameters, sizes, zero_group, schedule.name, micro_batches, tuple(stages))


def _split(deck: Deck, shape: ModelShape, schedule: Schedule, split: Sequence[int] | None) -> Sequence[int]:
    """Blocks of every part; even where a run would measure first."""
    if split is not None:
        return split
    wanted = deck.layout.split
    return even_split(shape.layers, schedule.parts) if wanted is None or wanted == "balanced" else wanted


def _states(planned: PlannedStage, rule: UpdateRule, precision: Precision) -> Account:
    """Parameters, gradients, optimizer state, and what these take turns in."""
    buckets = planned.buckets
    parameters = [p for bucket in buckets for p in (segment.parameter for segment in bucket.segments)]
    values = storage_bytes(
        bucket.own_values if bucket.sharding.zero == 3 else bucket.values for bucket in buckets
    )
    gradients = storage_bytes(
        [*(bucket.own_gradients for bucket in buckets), *(parameter.lookups for parameter in parameters)]
    )
    owned = sum(bucket.own.stop - bucket.own.start for bucket in buckets)
    copies = len(rule.names) + precision.has_masters  # and master weights
    turns = pool_bytes(buckets) + _reductions(buckets)
    return Account(values, gradients, copies * STATE_BYTES * owned, buffer=turns)


def _reductions(buckets: Sequence[Bucket]) -> int:
    """What reductions in host memory receive, of which two are under way at once; on a GPU torch's allocator
    lends it from one to the next.
    """
    each = [b.sharding.group.host.scratch_bytes(b.length, b.gradient_dtype.itemsize) for b in buckets]
    return sum(sorted(each, reverse=True)[:2])


def _input_gradients(deck: Deck, shape: ModelShape, sizes: Mapping[str, int]) -> int:
    """What the sum of a layer's input gradient over the tensor ranks receives, while its weight gradient is
    computed.
    """
    if deck.run.device == "cuda":
        return 0
    tokens = shape.sequence // sizes["context"] * deck.batch.micro_size
    tensor = PlannedTransport(0, sizes["tensor"])
    return tensor.scratch_bytes(tokens * shape.hidden, Precision.of(deck).storage.itemsize)


def _without_offloaded(deck: Deck, states: Account, planned: PlannedStage) -> Account:
    """What remains where optimizer state and slices of parameters live elsewhere, and what is on its way: in
    host memory, which beside a GPU's does not count.
    """
    memory, buckets, on_host = deck.memory, planned.buckets, deck.run.device != "cuda"
    if memory.parameters != "device":
        states = replace(states, parameter=0)
    if memory.parameters == "disk" and on_host:
        slices = [(bucket.own.stop - bucket.own.start) * bucket.dtype.itemsize for bucket in buckets]
        states = replace(states, buffer=states.buffer + max(slices))
    if memory.optimizer != "device":
        states = replace(states, optimizer=0)
    if memory.optimizer == "disk" and on_host:
        way = working_bytes(make_rule(deck), buckets, memory.offload_buffer, memory.parameters == "disk")
        states = replace(states, buffer=states.buffer + way)
    return states


def _snapshot(deck: Deck, elements: int) -> int:
    """Host memory that a checkpoint takes while training goes on: at most that of all it writes of a rank,
    master weights and other state of so many elements.
    """
    if deck.checkpoint.mode != "background" or not deck.checkpoint.every:
        return 0
    return min(deck.checkpoint.buffer, (1 + len(make_rule(deck).names)) * STATE_BYTES * elements)


def _messages(deck: Deck, shape: ModelShape, sizes: Mapping[str, int], schedule: Schedule, stage: int) -> int:
    """Hidden states and their gradients on their way between stages."""
    if schedule.stage_count == 1:
        return 0
    tokens = shape.sequence // sizes["context"] * deck.batch.micro_size
    if deck.layout.sequence_parallel:
        tokens //= sizes["tensor"]
    one = tokens * shape.hidden * Precision.of(deck).storage.itemsize
    senders = {stage - 1, stage + 1} & set(range(schedule.stage_count))
    return (AHEAD + 1) * len(senders) * one


def _workspace(
    deck: Deck,
    shape: ModelShape,
    sizes: Mapping[str, int],
    parts: Sequence[PlannedPart],
    kept: ActivationBytes,
) -> int:
    """What computing needs in passing beside activations at their peak: the loss of a chunk of tokens, the
    last block's backward, by when the head's activations are gone, or the compression of what waits.
    """
    precision = Precision.of(deck)
    itemsize, half = precision.storage.itemsize, precision.product.itemsize < STATE_BYTES
    tensor = sizes["tensor"]
    tokens = shape.sequence // sizes["context"] * deck.batch.micro_size
    inner = shape.mlp // tensor * (1 if shape.family == "gpt2" else 2)
    # Gradients of the residual stream, before and after, and of the widest hidden layer.
    block = tokens * (inner + 2 * shape.hidden) * itemsize
    if half:  # a 16-bit product is computed apart before it is added to fp32 sums
        block += min(inner * shape.hidden, PRODUCT_ELEMENTS) * itemsize
    loss = 0
    if any(part.span.predicts for part in parts):
        block = max(0, block - kept.head)
        rows = -(-shape.vocabulary // tensor)
        chunk = chunk_rows(tokens, rows)
        loss = 2 * chunk * rows * STATE_BYTES  # of this chunk and of the one before
        if half:
            loss += (2 * chunk * rows + min(rows * shape.hidden, PRODUCT_ELEMENTS)) * itemsize
    return max(block, loss, packing_bytes(deck, kept))
