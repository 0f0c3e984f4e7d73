"""Even loads of experts, where tensors have no values: what routers would have chosen, and who tells whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hpctrain.comm.planned import META
from hpctrain.deck.schema import Deck
from hpctrain.model.shape import ModelShape
from hpctrain.plan.rehearse.recall import Recall, Recalling, tensors_of


@dataclass(frozen=True)
class BalancedLoads:
    """What ranks send to experts of a micro-batch, whose `rows` are those of each tensor rank; every row goes
    to so many `chosen` ones, and of copies the share `taken` has room.
    """

    experts: int
    chosen: int
    taken: float
    rows: tuple[int, ...]

    @staticmethod
    def of_deck(deck: Deck, shape: ModelShape) -> BalancedLoads:
        """Those of a deck's mixture."""
        tensor, rows = deck.layout.tensor, deck.batch.micro_size * shape.sequence // deck.layout.context
        pieces = (rows * (rank + 1) // tensor - rows * rank // tensor for rank in range(tensor))
        return BalancedLoads(shape.experts, shape.experts_per_token, _taken(shape), tuple(pieces))

    def of(self, rank: int) -> Tensor:
        """Copies that a rank sends to each expert [experts]."""
        return _even(int(self.rows[rank % len(self.rows)] * self.chosen * self.taken), self.experts)


class EvenLoads(Recalling):
    """Within, what is counted of tensors without values is as many of each: of n numbers below k, n // k, and
    one more of the first ones where that leaves some; of copies those are kept that experts have room for.
    Nothing for a model without experts.

    A count is in memory of the host, from where layers read it. What is computed of both kinds of memory has
    none; products by groups are so of any format.
    """

    def __init__(self, shape: ModelShape, recall: Recall) -> None:
        super().__init__(recall)
        self.experts, self.taken = shape.experts, _taken(shape)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, or count."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            return self._counts(args[0], kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        if "grouped_mm" in func.name():
            return _grouped(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        tensors = tensors_of((*args, *kwargs.values()))
        if any(each.is_meta for each in tensors) and any(each.is_cpu for each in tensors):
            args, kwargs = tree_map(_without_values, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _counts(self, numbers: Tensor, length: int) -> Tensor:
        # Copies that no expert takes are counted behind the last one.
        kinds = length - 1 if length == self.experts + 1 else length
        whole = numbers.numel()
        if length == self.experts + 1:
            whole = int(whole * self.taken)
        counts = torch.full((length,), numbers.numel() - whole, dtype=torch.int64, device="cpu")
        counts[:kinds] = _even(whole, kinds)
        return counts


def _taken(shape: ModelShape) -> float:
    return min(1.0, shape.capacity or 1.0)


def _even(many: int, kinds: int) -> Tensor:
    """As many of each kind, one more of the first ones [kinds]."""
    counts = torch.full((kinds,), many // kinds, dtype=torch.int64, device="cpu")
    counts[: many % kinds] += 1
    return counts


def _grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Rows [m, k] by [e, k, n], or [n, m] by [m, k] for each of e groups of m."""
    if right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[2]))
    return left.new_empty((len(ends), left.shape[0], right.shape[1]))


def _without_values(each: Any) -> Any:
    return each.to(META) if isinstance(each, Tensor) and each.is_cpu else each
