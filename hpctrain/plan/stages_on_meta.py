"""Pipeline stages on torch's meta device, for plans of memory.

The ranks of a stage may need different amounts of memory. A stage is built as its rank that needs most.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpctrain.comm.mesh import rank_count
from hpctrain.comm.planned import PlannedCalls, PlannedMesh, ReductionBytes
from hpctrain.costs.update_bytes import cell_state_elements, state_per_element
from hpctrain.deck.schema import Deck
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.engine.stages.stage import StageBuilder, TrainedStage
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.model.architecture import Architecture
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.pipeline.action import accumulation
from hpctrain.plan.step_on_meta import rehearse
from hpctrain.sharding.bucket import Bucket

REHEARSED_MICRO_BATCHES = 3
"""Largest number of micro-batches of a rehearsed step without a pipeline: the first, one more, and the last.

More of them need no more memory.
"""


def build_stage_on_meta(
    deck: Deck,
    architecture: Architecture,
    sizes: Mapping[str, int],
    ranks_per_node: int,
    position: PipelinePosition,
    device: torch.device,
    build: StageBuilder,
) -> tuple[TrainedStage, PlannedMesh]:
    """Return a pipeline stage without memory, as its rank that needs most memory, and the mesh of that rank.

    With ZeRO-2 and ZeRO-3, steps are rehearsed, so that the pools of buckets have the size of a run. Local.

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        sizes: Number of ranks along each axis.
        ranks_per_node: Number of consecutive ranks that share a node.
        position: Stage of the pipeline.
        device: Device of the run.
        build: Function that builds the stage.
    """
    transport, calls = (
        deck.communication.requested_transport,
        PlannedCalls(reduction_bytes=_audited_reduction_bytes(deck)),
    )

    def build_at(place: int) -> tuple[TrainedStage, PlannedMesh]:
        mesh = PlannedMesh(sizes, position.number, ranks_per_node, device, place, transport, calls)
        return plan_stage(deck, architecture, mesh, position, device, build), mesh

    stage, mesh = build_at(0)
    place = _place_with_fewest_sharers(stage, sizes, position.number, ranks_per_node)
    place = place or _place_with_largest_shares(deck, stage, sizes, position.number)
    if place:
        stage, mesh = build_at(place)
    if deck.layout.zero > 1:
        _rehearse_steps(deck, stage, position, sizes["data"])
    return stage, mesh


def _audited_reduction_bytes(deck: Deck) -> ReductionBytes | None:
    """Return the function for the memory of audited reductions; None if the deck has no audit of messages."""
    if deck.stability.corruption != "full":
        return None
    from hpctrain.audit.audited_reduction import audited_scratch_bytes

    return audited_scratch_bytes


def _rehearse_steps(deck: Deck, stage: TrainedStage, position: PipelinePosition, data: int) -> None:
    """Rehearse two steps of a stage. The second one gathers buckets ahead, in the order of the first one.

    Args:
        deck: The deck.
        stage: Stage without memory.
        position: Its position in the pipeline.
        data: Number of data ranks.
    """
    schedule = position.schedule
    if schedule.stage_count == 1:
        schedule = accumulation(min(micro_batches(deck, data), REHEARSED_MICRO_BATCHES))
    for _ in range(2):
        rehearse(stage, deck.memory.recompute, schedule, position.number)


def _place_with_fewest_sharers(
    stage: TrainedStage, sizes: Mapping[str, int], number: int, ranks_per_node: int
) -> int:
    """Return the place of a rank that shares its parameters with the fewest other ranks.

    Nodes may cut the groups of some ranks into smaller parts than those of the first rank. Then these ranks
    share the memory of parameters with fewer others, and need more of it.

    Args:
        stage: Stage as its first rank builds it.
        sizes: Number of ranks along each axis.
        number: Number of the pipeline stage.
        ranks_per_node: Number of consecutive ranks that share a node.

    Returns:
        Number of the rank among the ranks of its stage; 0 if no ranks share parameters.
    """
    sharing = [bucket.sharding.group for bucket in stage.buckets if bucket.sharers > 1]
    groups = {(group.axes, group.size) for group in sharing}

    def fewest_sharers(place: int) -> int:
        mesh, fewest = PlannedMesh(sizes, number, ranks_per_node, rank_in_stage=place), rank_count(sizes)
        for axes, size in groups:
            complete = mesh.group(*axes)
            first = complete.rank // size * size
            fewest = min(fewest, ranks_per_node_of(mesh.nodes(complete)[first : first + size]))
        return fewest

    # Ranks at the same position of different nodes have groups that are cut in the same way.
    ranks = rank_count(sizes) // sizes["pipeline"]
    return min(range(min(ranks, ranks_per_node)), key=fewest_sharers) if groups else 0


def _place_with_largest_shares(deck: Deck, stage: TrainedStage, sizes: Mapping[str, int], number: int) -> int:
    """Return the place of the rank whose shares of buckets need most memory.

    Shares differ if update rules need complete matrices, which are not split (`sharding/ownership.py`).

    Args:
        deck: The deck.
        stage: Stage as its first rank builds it.
        sizes: Number of ranks along each axis.
        number: Number of the pipeline stage.

    Returns:
        Number of the rank among the ranks of its stage; 0 if all shares are equal.
    """
    rules = RULES[deck.optimizer.name](deck)
    uneven = [bucket for bucket in stage.buckets if bucket.layout.sizes is not None and bucket.sharding.zero]
    if not uneven or not isinstance(rules, MatrixRules):
        return 0

    def share_bytes(place: int) -> int:
        mesh = PlannedMesh(sizes, number, 1, rank_in_stage=place)
        ranks = (
            mesh.group(*bucket.sharding.group.axes).rank % bucket.sharding.group.size for bucket in uneven
        )
        return sum(_share_bytes(bucket, rank, rules) for bucket, rank in zip(uneven, ranks, strict=True))

    ranks = rank_count(sizes) // sizes["pipeline"]
    return max(range(0, ranks, sizes["tensor"]), key=share_bytes)


def _share_bytes(bucket: Bucket, rank: int, rules: MatrixRules) -> int:
    """Return the bytes of parameters, gradients and optimizer state of a rank's share of a bucket.

    Args:
        bucket: The bucket.
        rank: Number of the rank in the group of the bucket.
        rules: Update rules of matrices and of other elements.
    """
    first, last = bucket.layout.borders[rank : rank + 2]
    zero = bucket.sharding.zero
    itemsize = 4 * (bucket.dtype != torch.float32) + bucket.gradient_dtype.itemsize * (zero > 1)
    itemsize += bucket.dtype.itemsize * (zero == 3 and bucket.sharers == 1)
    size = 0
    for each in bucket.layout.update_ranges:
        elements = max(0, min(last, each.part.stop) - max(first, each.part.start))
        size += elements * (itemsize + 4 * state_per_element(rules, each.update_settings))
    for segment in bucket.segments:
        elements = min(last, segment.start + segment.length) - max(first, segment.start)
        size += 4 * cell_state_elements(rules, segment.parameter, max(0, elements))
    return size
