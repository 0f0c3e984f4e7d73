"""Statistics of a training step that layers record and all ranks reduce.

A router records how many tokens each expert received, an 8-bit product the largest magnitude of its weights.
Each layer calls `StepStatistics.record_max` or `record_sum` in its forward or backward pass. After the step
every rank calls `reduce` once, and layers that use the result receive it (`UsesStatistics`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpctrain.comm.group import Group

Reduction = Literal["max", "sum"]


class StepStatistics:
    """Maxima and sums that the layers of one rank record during a training step, by name.

    The pipeline executor calls `begin_action` before each action. What an action records while it recomputes
    activations replaces what its forward pass recorded, so it counts once. Nothing is recorded outside of
    training steps.

    Attributes:
        detailed_step: True in steps in which layers also record statistics that are only reported.
        micro_batch: Number of the current action's micro-batch; None outside of training steps.
        padding: Positions of the action's micro-batch that are padding, bool [s, b] of this rank's piece of
            the sequence, in training or not. None if there are none.
    """

    def __init__(self) -> None:
        self.detailed_step = False
        self.padding: Tensor | None = None
        self.micro_batch: int | None = None
        self._calls: Counter[str] = Counter()
        self._recorded: dict[Reduction, dict[tuple[str, int, int], Tensor]] = {"max": {}, "sum": {}}
        self._agreed_sizes: dict[Reduction, dict[str, int]] | None = None

    def begin_action(self, micro_batch: int | None, padding: Tensor | None = None) -> None:
        """Start an action of the pipeline. All that layers record until the next call belongs to it.

        Args:
            micro_batch: Number of the micro-batch in a training step. None outside of training steps, as in
                evaluation, where nothing is recorded.
            padding: Positions of the micro-batch that are padding, as for the attribute.
        """
        self.micro_batch, self.padding = micro_batch, padding
        self._calls.clear()

    @property
    def is_detailed(self) -> bool:
        """True if statistics that are only reported are to be recorded now."""
        return self.detailed_step and self.micro_batch is not None

    def record_max(self, name: str, values: Tensor) -> None:
        """Record candidates for maxima over all micro-batches and ranks.

        Args:
            name: Name of the statistic, the same on all ranks that record it.
            values: Non-negative numbers [k], one of each maximum.
        """
        if self.micro_batch is not None:
            maxima, values = self._recorded["max"], values.detach().clone()
            key = (name, 0, 0)
            maxima[key] = torch.maximum(maxima[key], values) if key in maxima else values

    def record_sum(self, name: str, values: Tensor) -> None:
        """Record terms of sums over all calls, micro-batches and ranks.

        The n-th call of an action replaces the n-th call of the same action before recomputation. A name must
        therefore belong to one layer and one kind of pass.

        Args:
            name: Name of the statistic, the same on all ranks that record it.
            values: Terms [k], one of each sum.
        """
        if self.micro_batch is not None:
            key = (name, self.micro_batch, self._calls[name])
            self._recorded["sum"][key] = values.detach().clone()
            self._calls[name] += 1

    def count(self, reduction: Reduction) -> int:
        """Return how many numbers this rank has recorded for a reduction in this step."""
        return sum({name: len(values) for (name, *_), values in self._recorded[reduction].items()}.values())

    def reduce(self, everyone: Group) -> dict[str, Tensor]:
        """Reduce the statistics of the step over all ranks and discard them. Collective.

        It makes one all-reduce for maxima and one for sums, and none if nothing was recorded.

        Args:
            everyone: Group of all ranks.

        Returns:
            Statistics by name, each fp64 [k], the same on all ranks.
        """
        reduced: dict[str, Tensor] = {}
        for reduction, sizes in self._exchange_sizes(everyone).items():
            if not sizes:
                continue
            buffer = everyone.empty((sum(sizes.values()),), torch.float64).zero_()
            views = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
            for (name, *_), values in self._recorded[reduction].items():
                view = views[name]
                view.copy_(torch.maximum(view, values) if reduction == "max" else view + values)
            everyone.all_reduce(buffer, reduction)
            assert not reduced.keys() & views.keys(), "a statistic is either a maximum or a sum"
            reduced |= views
            self._recorded[reduction].clear()
        return reduced

    def _exchange_sizes(self, everyone: Group) -> dict[Reduction, dict[str, int]]:
        """Return the names and sizes that any rank has recorded.

        Ranks exchange them in the first step and in detailed steps. All other steps record the names of the
        first one.
        """
        if self._agreed_sizes is not None and not self.detailed_step:
            return self._agreed_sizes
        local = {
            reduction: {name: len(values) for (name, *_), values in recorded.items()}
            for reduction, recorded in self._recorded.items()
        }
        ranks = everyone.all_gather_object(local)
        sizes = {which: {k: v for rank in ranks for k, v in rank[which].items()} for which in local}
        if not self.detailed_step:
            self._agreed_sizes = sizes
        return sizes


@runtime_checkable
class UsesStatistics(Protocol):
    """Module or product that uses statistics of the step, which it has recorded."""

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        """Use the reduced statistics (fp64) of a completed step. Not called for steps that are skipped."""
