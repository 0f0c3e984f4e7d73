"""State that layers and products keep of their parameters, in shapes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from hpctrain.parallel.shard import Shard


@dataclass(frozen=True)
class LayerState:
    """One tensor: `values`, flat, are this rank's piece of `shard`, which has the parameter's name; all ranks
    that hold the piece have the same values. `kind` says whose and what it is, such as "product/history".
    """

    kind: str
    shard: Shard
    values: Tensor


@runtime_checkable
class KeepsState(Protocol):
    """A module, or a Product, that remembers something from step to step."""

    def state(self) -> Iterator[LayerState]:
        """All of it, begun as a new run begins; what a checkpoint has of it is read into `values`."""
