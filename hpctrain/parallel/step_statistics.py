"""What layers and their Products note of a training step, for all ranks to agree on after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpctrain.comm.group import Group

How = Literal["max", "sum"]


class StepStatistics:
    """A step's largest values and sums, by name.

    The executor says where an action begins. What it computes again in backward counts once, and nothing that
    is no training step does. In a step with `watching` more may be noted, of what is only looked at.

    Attributes:
        padding: Places of the action's micro-batch that hold no real token, bool [s, b] of the local piece of
            the sequence, in training or not. None if there are none.
    """

    def __init__(self) -> None:
        self.watching = False
        self.padding: Tensor | None = None
        self._micro_batch: int | None = None
        self._times: Counter[str] = Counter()
        self._values: dict[How, dict[tuple[str, int, int], Tensor]] = {"max": {}, "sum": {}}
        self._sizes: dict[How, dict[str, int]] | None = None

    def begin(self, micro_batch: int | None, padding: Tensor | None = None) -> None:
        """Begin an action on a micro-batch of a training step, or, with None, something else."""
        self._micro_batch, self.padding = micro_batch, padding
        self._times.clear()

    @property
    def micro_batch(self) -> int | None:
        """That of the action of a training step which is under way."""
        return self._micro_batch

    @property
    def watched(self) -> bool:
        """Whether what is only looked at would be noted now."""
        return self.watching and self._micro_batch is not None

    def most(self, name: str, values: Tensor) -> None:
        """Of `values` [k], none of them negative, the largest that any rank notes of any micro-batch."""
        self._note("max", name, values)

    def sum(self, name: str, values: Tensor) -> None:
        """The sum of `values` [k] over all times, micro-batches and ranks.

        What is noted in one action for the n-th time is what was in another one, which is done again: a name
        is of one layer and one kind of pass.
        """
        self._note("sum", name, values)

    def _note(self, how: How, name: str, values: Tensor) -> None:
        if self._micro_batch is not None:
            own, values = self._values[how], values.detach().clone()
            key = (name, self._micro_batch, self._times[name]) if how == "sum" else (name, 0, 0)
            own[key] = torch.maximum(own[key], values) if how == "max" and key in own else values
            self._times[name] += 1

    def numbers(self, how: How) -> int:
        """How many numbers of a kind this rank has noted of the step so far."""
        return sum({name: len(values) for (name, *_), values in self._values[how].items()}.values())

    def agree(self, everyone: Group) -> dict[str, Tensor]:
        """By name what all ranks have noted of the step, fp64 [k], which is then forgotten. Collective.

        One reduction for what is largest and one for sums; none where nothing is noted. Every step has the
        names and numbers of the first one, which is where ranks tell each other, and in one that is watched.
        """
        known = None if self.watching else self._sizes
        if known is None:
            here = {how: {name: len(v) for (name, *_), v in own.items()} for how, own in self._values.items()}
            ranks = everyone.all_gather_object(here)
            known = {how: {k: v for rank in ranks for k, v in rank[how].items()} for how in here}
            self._sizes = self._sizes if self.watching else known
        agreed: dict[str, Tensor] = {}
        for how, sizes in known.items():
            if not sizes:
                continue
            values = everyone.empty((sum(sizes.values()),), torch.float64).zero_()
            pieces = dict(zip(sizes, values.split(list(sizes.values())), strict=True))
            for (name, *_), own in self._values[how].items():
                pieces[name].copy_(torch.maximum(pieces[name], own) if how == "max" else pieces[name] + own)
            everyone.all_reduce(values, how)
            assert not agreed.keys() & pieces.keys(), "a name is of a largest value or of a sum"
            agreed |= pieces
            self._values[how].clear()
        return agreed


@runtime_checkable
class UsesStatistics(Protocol):
    """Module or product that uses statistics of the step, which it has recorded."""

    def after_update(self, noted: Mapping[str, Tensor]) -> None:
        """Use the statistics that all ranks have recorded in a step, fp64. Not called for skipped steps."""
