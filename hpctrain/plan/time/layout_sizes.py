"""Sizes of a layout from which the seconds of a step follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hpctrain.deck.schema import Deck
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.model.precision import Precision
from hpctrain.model.shape import Recomputed
from hpctrain.plan.time.machine_rates import GroupPlacement, Location
from hpctrain.plan.time.update_seconds import ADAMW, UpdateNumbers


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes of a layout. Tensor ranks are next to each other, then context, data and pipeline ranks follow.

    Attributes:
        tensor: Number of tensor ranks.
        context: Number of context ranks.
        data: Number of data ranks.
        pipeline: Number of pipeline stages.
        expert: Number of expert ranks.
        expert_tensor: Number of ranks that split an expert.
        micro_size: Sequences of a micro-batch.
        micro_batches: Micro-batches of a data rank in a step.
        sequence: Tokens of a sequence.
        zero: Stage of ZeRO.
        recompute: Kind of recomputation.
        sequence_parallel: True with sequence parallelism.
        context_form: Kind of context parallelism, "ring" or "all_to_all".
        form: Format of computation.
        itemsize: Bytes of an element that is stored or sent.
        gradient_itemsize: Bytes of an element of a reduced gradient.
        ranks_per_node: Number of consecutive ranks that share a node.
        zero_group: Number of ranks over which ZeRO splits; 0 for all.
        sliced: True if the gradients of each micro-batch are reduced.
        keep_gathered: Number of blocks whose parameters stay gathered with ZeRO-3.
        bucket_bytes: Bytes of a bucket.
        update: Sizes of the optimizer's state.
        optimizer_location: Where the optimizer state is stored.
        parameters_location: Where the parameters are stored.
        activations_location: Where the activations are stored.
    """

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    micro_size: int
    micro_batches: int
    sequence: int
    zero: int
    recompute: Recomputed
    sequence_parallel: bool
    context_form: str
    form: str
    itemsize: int
    gradient_itemsize: int
    ranks_per_node: int
    zero_group: int = 0
    sliced: bool = False
    keep_gathered: int = 0
    bucket_bytes: int = 25_000_000
    update: UpdateNumbers = ADAMW
    optimizer_location: Location = "device"
    parameters_location: Location = "device"
    activations_location: Location = "device"

    @staticmethod
    def of(deck: Deck, ranks: int, ranks_per_node: int) -> LayoutSizes:
        """Return the sizes of a deck's layout on a number of ranks.

        Raises:
            HpctrainError: The layout does not fit this number of ranks.
        """
        return LayoutSizes.of_axes(deck, axis_sizes(deck, ranks), ranks_per_node)

    @staticmethod
    def of_axes(deck: Deck, sizes: Mapping[str, int], ranks_per_node: int) -> LayoutSizes:
        """Return the sizes of a deck's layout, given the number of ranks along each axis."""
        layout, formats, memory = deck.layout, Precision.of(deck), deck.memory
        stride = sizes["tensor"]
        group = layout.zero_group
        if group == "node":
            group = GroupPlacement.of(sizes["data"] * sizes["context"], stride, ranks_per_node).ranks_per_node
        return LayoutSizes(
            tensor=sizes["tensor"],
            context=sizes["context"],
            data=sizes["data"],
            pipeline=sizes["pipeline"],
            expert=sizes.get("expert", 1),
            expert_tensor=sizes.get("expert_tensor", 1),
            micro_size=deck.batch.micro_size,
            micro_batches=micro_batches(deck, sizes["data"]),
            sequence=deck.batch.sequence,
            zero=layout.zero,
            recompute=deck.memory.recompute,
            sequence_parallel=layout.sequence_parallel,
            context_form=layout.context_form,
            form=deck.precision.compute,
            itemsize=formats.storage.itemsize,
            gradient_itemsize=formats.gradient.itemsize,
            ranks_per_node=ranks_per_node,
            zero_group=group or 0,
            sliced=memory.accumulate == "sliced",
            keep_gathered=memory.keep_gathered,
            bucket_bytes=deck.communication.bucket_bytes,
            update=UpdateNumbers.of(deck),
            optimizer_location=memory.optimizer,
            parameters_location=memory.parameters,
            activations_location="device" if memory.activations == "keep" else memory.activations,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.sequence // self.context * self.micro_size

    @property
    def rows(self) -> float:
        """Tokens of a micro-batch that a rank has between layers that tensor ranks split."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens

    @cached_property
    def tensor_ranks(self) -> GroupPlacement:
        """Ranks that split layers."""
        return GroupPlacement.of(self.tensor, 1, self.ranks_per_node)

    @cached_property
    def context_ranks(self) -> GroupPlacement:
        """Ranks that split sequences."""
        return GroupPlacement.of(self.context, self.tensor, self.ranks_per_node)

    @cached_property
    def data_ranks(self) -> GroupPlacement:
        """Ranks that reduce gradients: data x context."""
        return GroupPlacement.of(self.data * self.context, self.tensor, self.ranks_per_node)

    @cached_property
    def expert_ranks(self) -> GroupPlacement:
        """Ranks over which experts are spread."""
        return GroupPlacement.of(self.expert, self.expert_tensor, self.ranks_per_node)

    @cached_property
    def expert_tensor_ranks(self) -> GroupPlacement:
        """Ranks that split an expert."""
        return GroupPlacement.of(self.expert_tensor, 1, self.ranks_per_node)

    @cached_property
    def expert_data_ranks(self) -> GroupPlacement:
        """Ranks that have the same experts."""
        stage = self.tensor * self.context * self.data
        folded = self.expert * self.expert_tensor
        return GroupPlacement.of(max(1, stage // folded), folded, self.ranks_per_node)

    @cached_property
    def data_cut(self) -> tuple[GroupPlacement, GroupPlacement]:
        """Ranks over which ZeRO splits gradients, and ranks that have the same pieces."""
        return self._cut(self.data_ranks.size, self.tensor)

    @cached_property
    def expert_cut(self) -> tuple[GroupPlacement, GroupPlacement]:
        """Ranks over which ZeRO splits the gradients of experts, and ranks that have the same pieces."""
        return self._cut(self.expert_data_ranks.size, self.expert * self.expert_tensor)

    def _cut(self, size: int, stride: int) -> tuple[GroupPlacement, GroupPlacement]:
        split_ranks = min(self.zero_group or size, size) if self.zero else size
        replicas = GroupPlacement.of(size // split_ranks, stride * split_ranks, self.ranks_per_node)
        return GroupPlacement.of(split_ranks, stride, self.ranks_per_node), replicas

    @property
    def reductions(self) -> int:
        """Number of gradient reductions of a step."""
        return self.micro_batches if self.sliced else 1

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    def crosses(self, one: int, other: int) -> bool:
        """Return True if some rank of a stage sends to another stage on another node."""
        first, last = min(one, other) * self.stage_ranks, (max(one, other) + 1) * self.stage_ranks - 1
        return one != other and first // self.ranks_per_node != last // self.ranks_per_node
