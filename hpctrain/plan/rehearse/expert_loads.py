"""Balanced loads of experts, for rehearsals in which routers compute no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hpctrain.comm.planned import META
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.plan.rehearse.meta_op_cache import CachedMetaOps, MetaOpCache, tensors_of


@dataclass(frozen=True)
class BalancedLoads:
    """Rows that each rank sends to each expert if a router balances perfectly.

    Attributes:
        experts: Number of experts.
        chosen: Number of experts per row.
        capacity_fraction: Share of the copies of rows for which experts have capacity.
        rows: Rows of each tensor rank in a micro-batch.
    """

    experts: int
    chosen: int
    capacity_fraction: float
    rows: tuple[int, ...]

    @staticmethod
    def of_deck(deck: Deck, table: ExpertsTable) -> BalancedLoads:
        """Return the loads of a deck with these mixtures of experts."""
        tensor, rows = deck.layout.tensor, deck.batch.micro_size * deck.batch.sequence // deck.layout.context
        pieces = (rows * (rank + 1) // tensor - rows * rank // tensor for rank in range(tensor))
        return BalancedLoads(table.count, table.per_token, _capacity_fraction(table), tuple(pieces))

    def of(self, rank: int) -> Tensor:
        """Return the number of rows that a rank sends to each expert, [experts]."""
        return _even_counts(
            int(self.rows[rank % len(self.rows)] * self.chosen * self.capacity_fraction), self.experts
        )


class EvenLoads(CachedMetaOps):
    """Context in which counts of values of meta tensors are balanced.

    The count of n numbers below k is n // k for each, and one more for the first n % k. Copies beyond the
    capacity of experts count as dropped. A count is a tensor in host memory, since layers read it. The result
    of an operation on meta tensors and host tensors is a meta tensor. So is a grouped matrix product.

    Args:
        table: Mixtures of experts of the model.
        cache: Results of operations, as for `CachedMetaOps`.
    """

    def __init__(self, table: ExpertsTable, cache: MetaOpCache) -> None:
        super().__init__(cache)
        self.experts, self.capacity_fraction = table.count, _capacity_fraction(table)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            return self._counts(args[0], kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        if "grouped_mm" in func.name():
            return _grouped_result(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        tensors = tensors_of((*args, *kwargs.values()))
        if any(each.is_meta for each in tensors) and any(each.is_cpu for each in tensors):
            args, kwargs = tree_map(_without_values, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _counts(self, numbers: Tensor, length: int) -> Tensor:
        # Dropped copies are counted after the last expert.
        kinds = length - 1 if length == self.experts + 1 else length
        rows = numbers.numel()
        if length == self.experts + 1:
            rows = int(rows * self.capacity_fraction)
        counts = torch.full((length,), numbers.numel() - rows, dtype=torch.int64, device="cpu")
        counts[:kinds] = _even_counts(rows, kinds)
        return counts


def _capacity_fraction(table: ExpertsTable) -> float:
    return min(1.0, table.capacity or 1.0)


def _even_counts(many: int, kinds: int) -> Tensor:
    """Return balanced counts of `many` values of some kinds, [kinds]."""
    counts = torch.full((kinds,), many // kinds, dtype=torch.int64, device="cpu")
    counts[: many % kinds] += 1
    return counts


def _grouped_result(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return an empty result of a grouped product: [m, k] by [e, k, n], or [n, m] by [m, k] in e groups."""
    if right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[2]))
    return left.new_empty((len(ends), left.shape[0], right.shape[1]))


def _without_values(each: Any) -> Any:
    return each.to(META) if isinstance(each, Tensor) and each.is_cpu else each
