"""What layers and their Products note of a training step, for all ranks to agree on after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpctrain.comm.group import Group

How = Literal["max", "sum"]


class Noted:
    """A step's largest values and sums, by name.

    The executor says whose `micro_batch` an action is. What it computes again in backward counts once, and
    nothing that is no training step does.
    """

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        self._values: dict[How, dict[tuple[str, int], Tensor]] = {"max": {}, "sum": {}}
        self._sizes: dict[How, dict[str, int]] | None = None

    def most(self, name: str, values: Tensor) -> None:
        """Of `values` [k], none of them negative, the largest that any rank notes of any micro-batch."""
        self._note("max", name, values)

    def sum(self, name: str, values: Tensor) -> None:
        """The sum of `values` [k], this rank's of a micro-batch, over all micro-batches and ranks."""
        self._note("sum", name, values)

    def _note(self, how: How, name: str, values: Tensor) -> None:
        if self.micro_batch is not None:
            own, key = self._values[how], (name, self.micro_batch if how == "sum" else 0)
            values = values.detach()
            own[key] = torch.maximum(own[key], values) if how == "max" and key in own else values

    def agree(self, everyone: Group) -> dict[str, Tensor]:
        """By name what all ranks have noted of the step, fp64 [k], which is then forgotten. Collective.

        One reduction for what is largest and one for sums; none where nothing is noted. Every step has the
        names and numbers of the first one, which is where ranks tell each other.
        """
        if self._sizes is None:
            here = {how: {name: len(v) for (name, _), v in own.items()} for how, own in self._values.items()}
            ranks = everyone.all_gather_object(here)
            self._sizes = {how: {k: v for rank in ranks for k, v in rank[how].items()} for how in here}
        agreed: dict[str, Tensor] = {}
        for how, sizes in self._sizes.items():
            if not sizes:
                continue
            values = everyone.empty((sum(sizes.values()),), torch.float64).zero_()
            pieces = dict(zip(sizes, values.split(list(sizes.values())), strict=True))
            for (name, _), own in self._values[how].items():
                pieces[name].copy_(torch.maximum(pieces[name], own) if how == "max" else pieces[name] + own)
            everyone.all_reduce(values, how)
            agreed |= pieces
            self._values[how].clear()
        return agreed


@runtime_checkable
class LearnsOfStep(Protocol):
    """A module, or a Product, that has noted something."""

    def after_update(self, noted: Mapping[str, Tensor]) -> None:
        """A step is done, in which all ranks have `noted` this, fp64; not called where it is skipped."""
