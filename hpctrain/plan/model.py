"""The model of a deck on ranks that are not there: the run's own objects, in memory that is not there either.

Parameters, buckets and what synchronizes and gathers them are those that a run builds; their tensors lie
on torch's device "meta", which keeps shapes alone. A rehearsal of a step then finds what memory buckets take
turns in, and at the same time what each axis sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import META, planned_group
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.memory.recompute import Recompute, segment_size
from hpctrain.model.dtypes import DTYPES
from hpctrain.model.frozen import embedding_trained, freeze_parameters, silent_blocks
from hpctrain.model.part import Part, blocks_of
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.shard import Parameter
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import build_parts
from hpctrain.plan.activations import PlannedPart
from hpctrain.sharding.bucket import Bucket, make_buckets
from hpctrain.sharding.gather import make_residency
from hpctrain.sharding.outer import EveryStep
from hpctrain.sharding.reducer import make_reducer
from hpctrain.sharding.replication import Replications, Sharding
from hpctrain.sharding.synchronize import GradientSynchronizer


class PlannedMesh:
    """What groups are asked of a mesh, without ranks: the place of the first rank of a stage."""

    def __init__(self, sizes: Mapping[str, int], stage: int, ledger: Ledger) -> None:
        self._sizes, self._stage, self._ledger = sizes, stage, ledger
        self._groups: dict[tuple[str, ...], Group] = {}

    def group(self, *axes: str) -> Group:
        """The group along these axes."""
        if axes not in self._groups:
            size = prod(self._sizes[axis] for axis in axes)
            rank = self._stage if axes == ("pipeline",) else 0
            self._groups[axes] = planned_group(axes, rank, size, self._ledger)
        return self._groups[axes]

    def part(self, axis: str, size: int) -> Group:
        """The first `size` ranks along an axis."""
        return planned_group((axis,), 0, size, self._ledger)


@dataclass
class PlannedStage:
    """What one rank of a pipeline stage holds, the first along the other axes.

    The others of the stage hold as much: what does not divide is padded alike.
    """

    models: list[Transformer]
    recompute: Recomputed
    buckets: list[Bucket]
    synchronizer: GradientSynchronizer
    residency: Residency
    ledger: Ledger

    @property
    def parts(self) -> list[PlannedPart]:
        """What activations need to know of the parts."""
        return [
            PlannedPart(model.span, silent_blocks(model), embedding_trained(model)) for model in self.models
        ]


def zero_group_size(deck: Deck, sizes: Mapping[str, int], ranks_per_node: int | None) -> int:
    """Ranks over which layout.zero cuts."""
    everyone, wish = sizes["data"] * sizes["context"], deck.layout.zero_group
    if deck.layout.zero == 0 or wish is None:
        return everyone
    if wish != "node":
        return wish
    if ranks_per_node is None:
        raise HpctrainError(
            deck.problem(
                "layout.zero_group", "the plan needs to know a node's ranks: give --ranks-per-node N"
            )
        )
    size = max(1, min(everyone, ranks_per_node // sizes["tensor"]))
    if everyone % size:
        raise HpctrainError(
            deck.problem("layout.zero_group", "needs as many data x context ranks on every node")
        )
    return size


def plan_stage(
    deck: Deck,
    shape: ModelShape,
    sizes: Mapping[str, int],
    schedule: Schedule,
    split: Sequence[int],
    stage: int,
    zero_group: int,
) -> PlannedStage:
    """A stage of the pipeline as the run builds it, without its memory."""
    ledger = Ledger()
    mesh = PlannedMesh(sizes, stage, ledger)
    layer_groups = LayerGroups(
        mesh.group("tensor"),
        mesh.group("context"),
        deck.layout.sequence_parallel,
        deck.layout.context_form,
        keeping=Recompute(deck.memory.recompute),
    )
    replications = Replications(
        mesh,
        lambda everyone: Sharding(
            deck.layout.zero,
            planned_group(everyone.axes, 0, zero_group, ledger),
            planned_group(("replicas",), 0, everyone.size // zero_group if deck.layout.zero else 1, ledger),
        ),
    )
    compute = deck.precision.compute
    with META:
        models = build_parts(shape, layer_groups, schedule, split, stage)
        freeze_parameters(models, deck.model.frozen)
        buckets = [
            bucket
            for model in models
            for bucket in make_buckets(
                model.units(),
                replications,
                DTYPES[compute],
                deck.communication.bucket_bytes,
                gradient_dtype=DTYPES[compute if deck.precision.gradients == "compute" else "fp32"],
            )
        ]
    units = [block.held[0] for model in models for block in blocks_of(model)]
    residency = make_residency(buckets, units, deck.memory.keep_gathered)
    synchronizer = GradientSynchronizer(
        [make_reducer(bucket) for bucket in buckets], EveryStep(), deck.memory.accumulate == "sliced"
    )
    return PlannedStage(models, deck.memory.recompute, buckets, synchronizer, residency, ledger)


def rehearse(stage: PlannedStage, schedule: Schedule, place: int) -> None:
    """One step of the stage at `place`, as far as buckets are concerned.

    Parameters are gathered and gradients opened, summed and closed in the order in which layers do so.
    """
    stage.synchronizer.start(schedule.micro_batches)
    with META, stage.residency.step("plan"):
        for action in schedule.stages[place]:
            model = stage.models[action.chunk]
            if action.kind == "F":
                _forward(model, stage.residency)
            elif action.kind == "W":
                for layer in reversed(model.layers):
                    late = layer.late
                    _add(p for _, added in layer.backward_order() for p in added if p in late)
            else:
                _backward(model, stage, action.kind == "I")
        stage.synchronizer.finish()


def _forward(part: Part, residency: Residency) -> None:
    for layer in part.layers:
        for parameter in layer.held:
            with residency.held(parameter):
                if parameter in set(layer.added_in_forward):
                    assert not parameter.requires_grad or parameter.gradient is not None


def _backward(part: Part, stage: PlannedStage, waiting: bool) -> None:
    """The layers, the last one first; with `waiting` the linear layers of blocks wait for their W."""
    residency, blocks = stage.residency, blocks_of(part)
    size = segment_size(stage.recompute, len(blocks))
    silent = silent_blocks(part)
    seen = blocks[silent // (size or 1) * (size or 1) :]
    for layer in reversed(part.layers):
        if layer.is_block:
            if layer not in seen:
                continue
            number = blocks.index(layer)
            last = min(number // size * size + size, len(blocks)) - 1 if size else -1
            if number == last:  # the forward pass of its segment again
                for other in blocks[number // size * size : number + 1]:
                    with residency.held(other.held[0]):
                        pass
        elif layer is part.layers[0] and not embedding_trained(part):
            continue
        late = layer.late if waiting else set()
        for held, added in layer.backward_order():
            with residency.held(held) if held is not None else nullcontext():
                _add(p for p in added if p not in late)


def _add(parameters: Iterable[Parameter]) -> None:
    """One addition to each gradient."""
    for parameter in parameters:
        if parameter.requires_grad:
            assert parameter.lookups is not None or parameter.gradient is not None
            parameter.added()
