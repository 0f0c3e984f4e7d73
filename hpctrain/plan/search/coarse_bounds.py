"""Lower bounds of a rank's memory before a search has chosen a schedule or a stage of ZeRO.

The number of micro-batches that a stage keeps, and of its blocks, follows from the schedule and from the
split of the layers by FLOPs. It is the same for all layouts with as many stages, and computed once for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.memory.recompute import segment_size
from hpctrain.plan.search.in_flight import in_flight_peaks
from hpctrain.plan.search.least_bytes import ModelActivations
from hpctrain.plan.search.memory_needs import NodeNeeds, States
from hpctrain.plan.search.model_partition import ModelPartition, ParameterCounts
from hpctrain.plan.search.search_space import SearchSpace, with_values
from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.layout_sizes import LayoutSizes

PartitionOf = Callable[[Deck, str, int], ModelPartition | None]
"""Function that returns the parts of a deck's model by name of the schedule and number of chunks.

It returns None if the deck cannot have this schedule.
"""


class StageLoad(NamedTuple):
    """Numbers from which the memory of a pipeline stage follows.

    Attributes:
        stored: Number of blocks whose activations are stored, summed over micro-batches. Blocks that are
            recomputed together count as one.
        blocks: Number of blocks of the stage.
    """

    stored: float
    blocks: float


class CoarseMemoryBounds:
    """Lower bounds of memory for all layouts of a deck with the same split of layers and number of stages.

    Args:
        choices: Values that the search may choose.
        needs: Memory of the nodes.
        layers: Number of layers of each kind.
        partition_of: Function that returns the partition of the model for a schedule.
    """

    def __init__(
        self,
        choices: SearchSpace,
        needs: NodeNeeds,
        layers: Mapping[LayerSizes, int],
        partition_of: PartitionOf,
    ) -> None:
        self._choices, self._needs, self._partition_of = choices, needs, partition_of
        self._layers = layers
        self._blocks = {layer: count for layer, count in layers.items() if layer.is_block}
        self._loads: dict[object, list[StageLoad]] = {}
        self._state_bytes: dict[object, tuple[float, float]] = {}
        self._stored_micro_batches: dict[tuple[int, int], set[tuple[int, ...]]] = {}

    def least_bytes(
        self,
        deck: Deck,
        layout: LayoutSizes,
        activations: ModelActivations,
        states: Sequence[States],
        *,
        by_flops: bool,
    ) -> float:
        """Return a lower bound of the bytes of a rank, on the node that needs most. Local.

        It holds for every schedule and for every given choice of ZeRO.

        Args:
            deck: Deck with the split of the layers.
            layout: Layout, with the number of stages.
            activations: Bytes of a micro-batch in the layers of the model.
            states: Functions that return the bytes of parameters and their state, one for each choice of
                ZeRO.
            by_flops: True if the blocks are split by FLOPs; False if any split is possible.
        """
        block_state, rank_state = self._least_state_bytes(layout, states)
        stored = activations.stored_bytes(self._layers) / layout.pipeline
        mean = self._needs.of_mean_rank(rank_state + stored)
        nodes_mix_stages = self._needs.nodes_mix_stages(layout)
        if activations.has_frozen_parameters or (not by_flops and nodes_mix_stages):
            return mean
        if not by_flops:
            return max(mean, self._bytes_of_any_split(layout, activations, block_state))
        blocks = [activations.by_kind[layer.kind] for layer in self._blocks]
        is_recomputed = activations.recompute not in {"none", "selective"}
        unit = activations.stored_input if is_recomputed else min(block.stored for block in blocks)
        loads = self._stage_loads(deck, layout, largest=not nodes_mix_stages)
        if nodes_mix_stages:
            sizes = (load.stored * unit + load.blocks * block_state for load in loads)
            return max(mean, min(map(self._needs.of_mean_rank, sizes), default=inf))
        recomputed = min(block.saved - block.saved_input for block in blocks) if is_recomputed else 0
        sizes = (
            load.stored * unit + load.blocks * block_state + (recomputed if load.blocks else 0)
            for load in loads
        )
        return max(mean, min((self._needs.process_bytes + size for size in sizes), default=inf))

    def _bytes_of_any_split(
        self, layout: LayoutSizes, activations: ModelActivations, block_state: float
    ) -> float:
        """Return a lower bound of the bytes of a rank for every split of the blocks over stages.

        In X bytes, a stage that stores n micro-batches has room for X / (n a + s) blocks, with a bytes of
        activations and s bytes of state of a block. All stages together must have room for all blocks.

        Args:
            layout: Layout, with the number of stages.
            activations: Bytes of a micro-batch in the layers of the model.
            block_state: Least bytes of the parameters of a block and of their state.
        """
        blocks = sum(self._blocks.values())
        size = segment_size(activations.recompute, blocks)
        stored = min(activations.by_kind[layer.kind].stored for layer in self._blocks)
        block_bytes = activations.stored_input / size if size else stored
        key = layout.pipeline, _rounded_micro_batches(layout)
        if key not in self._stored_micro_batches:
            self._stored_micro_batches[key] = self._fewest_micro_batches(*key)
        shares = self._needs.shares(layout)
        blocks_per_byte = (
            sum(
                share / max(1.0, count * block_bytes + block_state)
                for count, share in zip(counts, shares, strict=True)
            )
            for counts in self._stored_micro_batches[key]
        )
        return blocks / max(blocks_per_byte, default=inf)

    def _fewest_micro_batches(self, stages: int, micro_batches: int) -> set[tuple[int, ...]]:
        """Return, for each schedule, the number of micro-batches that each stage stores at some time.

        If a stage has several chunks, it is that of the chunk that stores the fewest.
        """
        return {
            tuple(
                min(in_flight_peaks(name, stages, micro_batches, chunks, stage)[0].waiting)
                for stage in range(stages)
            )
            for name, chunks in self._choices.of_schedules(stages, stages)
        }

    def _least_state_bytes(self, layout: LayoutSizes, states: Sequence[States]) -> tuple[float, float]:
        """Return the least bytes of parameters and their state, of a block and of a mean rank."""
        key = layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert, layout.expert_tensor
        if key not in self._state_bytes:
            block_elements = [layer.elements(layout) for layer in self._blocks]
            block = ParameterCounts(
                min(experts for experts, _ in block_elements), min(others for _, others in block_elements)
            )
            elements = [(count, layer.elements(layout)) for layer, count in self._layers.items()]
            experts, others = (sum(count * each[index] for count, each in elements) for index in range(2))
            mean = ParameterCounts(experts / layout.pipeline, others / layout.pipeline)
            self._state_bytes[key] = (
                min(state_bytes(block, "none") for state_bytes in states),
                min(state_bytes(mean, "none") for state_bytes in states),
            )
        return self._state_bytes[key]

    def _stage_loads(self, deck: Deck, layout: LayoutSizes, *, largest: bool) -> list[StageLoad]:
        """Return the loads of each schedule, without those that exceed another one in both numbers.

        Args:
            deck: Deck with the split of the layers.
            layout: Layout, with the number of stages.
            largest: True for the stage with the largest load, False for the mean over all stages.
        """
        micro_batches = _rounded_micro_batches(layout)
        key = layout.pipeline, micro_batches, deck.memory.recompute, largest
        if key not in self._loads:
            best = list[StageLoad]()
            for load in sorted(self._schedule_loads(deck, layout.pipeline, micro_batches, largest)):
                if not best or load.blocks < best[-1].blocks:
                    best.append(load)
            self._loads[key] = best
        return self._loads[key]

    def _schedule_loads(
        self, deck: Deck, stages: int, micro_batches: int, largest: bool
    ) -> Iterator[StageLoad]:
        """Yield the largest or the mean load of the stages of each schedule."""
        deck = with_values(deck, {"layout.pipeline": stages})
        for schedule, chunks in self._choices.of_schedules(stages, stages):
            partition = self._partition_of(deck, schedule, chunks)
            if partition is None:
                continue
            loads = []
            for stage in partition.stages:
                for number in stage.numbers[:1] if largest else stage.numbers:
                    parts = [partition.kinds[kind] for kind in partition.kinds_on(number)]
                    (largest_state, *_) = in_flight_peaks(schedule, stages, micro_batches, chunks, number)
                    stored = sum(
                        count * _stored_units(deck, len(part.blocks))
                        for count, part in zip(largest_state.waiting, parts, strict=True)
                    )
                    loads.append(StageLoad(float(stored), float(sum(len(part.blocks) for part in parts))))
            if largest:
                yield max(loads)
            else:
                stored_blocks, blocks = (sum(numbers) / stages for numbers in zip(*loads, strict=True))
                yield StageLoad(stored_blocks, blocks)


def _rounded_micro_batches(layout: LayoutSizes) -> int:
    """Return a power of two with which a schedule stores no more than with the micro-batches of a step."""
    return 1 << (min(layout.micro_batches, 2 * layout.pipeline).bit_length() - 1)


def _stored_units(deck: Deck, blocks: int) -> int:
    """Return the number of segments of a part, or without recomputation of its blocks."""
    size = segment_size(deck.memory.recompute, blocks)
    return ceil(blocks / size) if size else blocks
