"""How the ranks of a deck share its work, in numbers: what of a layout seconds follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hpctrain.deck.schema import Deck
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.model.precision import Precision
from hpctrain.model.shape import Recomputed
from hpctrain.plan.time.machine_rates import Home, Sharing
from hpctrain.plan.time.update_seconds import ADAMW, UpdateNumbers


@dataclass(frozen=True)
class LayoutSizes:
    """Ranks along each axis, tensor ranks next to each other, then those of context, data and pipeline; and
    what else of a layout takes time. `itemsize` is that of what is stored and sent, `gradient_itemsize` that
    of gradients' sums; `micro_size` in sequences, `micro_batches` of a data rank in a step. ZeRO cuts over
    `zero_group` ranks, over all with 0, and with `sliced` sums every micro-batch's gradients.
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
    optimizer_home: Home = "device"
    parameters_home: Home = "device"
    activations_home: Home = "device"

    @staticmethod
    def of(deck: Deck, ranks: int, ranks_per_node: int) -> LayoutSizes:
        """That of a deck on so many ranks. HpctrainError where it does not fit them."""
        return LayoutSizes.of_axes(deck, axis_sizes(deck, ranks), ranks_per_node)

    @staticmethod
    def of_axes(deck: Deck, sizes: Mapping[str, int], ranks_per_node: int) -> LayoutSizes:
        """That of a deck with so many ranks along each axis."""
        layout, formats, memory = deck.layout, Precision.of(deck), deck.memory
        stride = sizes["tensor"]
        group = layout.zero_group
        if group == "node":
            group = Sharing.of(sizes["data"] * sizes["context"], stride, ranks_per_node).together
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
            optimizer_home=memory.optimizer,
            parameters_home=memory.parameters,
            activations_home="device" if memory.activations == "keep" else memory.activations,
        )

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank."""
        return self.sequence // self.context * self.micro_size

    @property
    def rows(self) -> float:
        """Of these, those that a rank has between layers that tensor ranks split."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens

    @cached_property
    def tensor_ranks(self) -> Sharing:
        """Those that split layers."""
        return Sharing.of(self.tensor, 1, self.ranks_per_node)

    @cached_property
    def context_ranks(self) -> Sharing:
        """Those that split sequences."""
        return Sharing.of(self.context, self.tensor, self.ranks_per_node)

    @cached_property
    def data_ranks(self) -> Sharing:
        """Those that sum gradients: data x context."""
        return Sharing.of(self.data * self.context, self.tensor, self.ranks_per_node)

    @cached_property
    def expert_ranks(self) -> Sharing:
        """Those over which experts are spread, in their own folding of the ranks."""
        return Sharing.of(self.expert, self.expert_tensor, self.ranks_per_node)

    @cached_property
    def expert_tensor_ranks(self) -> Sharing:
        """Those that split an expert."""
        return Sharing.of(self.expert_tensor, 1, self.ranks_per_node)

    @cached_property
    def expert_data_ranks(self) -> Sharing:
        """Those that hold the same experts."""
        stage = self.tensor * self.context * self.data
        folded = self.expert * self.expert_tensor
        return Sharing.of(max(1, stage // folded), folded, self.ranks_per_node)

    @cached_property
    def data_cut(self) -> tuple[Sharing, Sharing]:
        """The ranks that sum gradients: those over which ZeRO cuts, and those that have the same pieces."""
        return self._cut(self.data_ranks.size, self.tensor)

    @cached_property
    def expert_cut(self) -> tuple[Sharing, Sharing]:
        """As `data_cut`, of those that hold the same experts."""
        return self._cut(self.expert_data_ranks.size, self.expert * self.expert_tensor)

    def _cut(self, size: int, stride: int) -> tuple[Sharing, Sharing]:
        within = min(self.zero_group or size, size) if self.zero else size
        copies = Sharing.of(size // within, stride * within, self.ranks_per_node)
        return Sharing.of(within, stride, self.ranks_per_node), copies

    @property
    def sums(self) -> int:
        """How often gradients are summed in a step."""
        return self.micro_batches if self.sliced else 1

    @property
    def stage_ranks(self) -> int:
        """Of one pipeline stage."""
        return self.tensor * self.context * self.data

    def crosses(self, one: int, other: int) -> bool:
        """Whether a rank of a stage and that of another one to which it sends are on two nodes."""
        first, last = min(one, other) * self.stage_ranks, (max(one, other) + 1) * self.stage_ranks - 1
        return one != other and first // self.ranks_per_node != last // self.ranks_per_node
