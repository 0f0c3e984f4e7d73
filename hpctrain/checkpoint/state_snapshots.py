"""Copies of a rank's state in host memory, to which a run can return without reading a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum
from hpctrain.host.streams import empty_host_tensor, synchronize_stream
from hpctrain.memory.scratch import fill_pieces, read_pieces
from hpctrain.sharding.state import StateTensor


class StateSnapshot:
    """Copy of this rank's state after a step.

    Args:
        step: Number of steps that were done.
        stored: Training state that a checkpoint of this step has.
    """

    def __init__(self, step: int, stored: Mapping[str, Any]) -> None:
        self.step, self.stored = step, stored
        self._values: list[Tensor] = []
        self._sums: list[int] = []

    def take(self, tensors: Iterable[StateTensor], former: StateSnapshot | None = None) -> None:
        """Copy tensors, into the memory of an older snapshot `former` if there is one that is not needed."""
        free = [] if former is None else former._values
        devices: set[torch.device] = set()
        for number, tensor in enumerate(tensors):
            values = tensor.values
            if number < len(free):
                memory = free[number]
            else:
                memory = empty_host_tensor((values.numel(),), values.dtype, values.device)
            assert (memory.numel(), memory.dtype) == (values.numel(), values.dtype), tensor.shard.name
            for first, piece in read_pieces(values):
                memory[first : first + piece.numel()].copy_(piece, non_blocking=True)
            if isinstance(values, Tensor):
                devices.add(values.device)
            self._values.append(memory)
        for device in devices:
            synchronize_stream(device)
        if former is not None:
            former._values = []
        self._sums = [int(word_sum(values)) for values in self._values]

    def is_unchanged(self) -> bool:
        """Return True if no bit of the copy has changed since it was made."""
        return self._sums == [int(word_sum(values)) for values in self._values]

    def restore(self, tensors: Iterable[StateTensor]) -> None:
        """Copy the values back into the tensors."""
        for tensor, memory in zip(tensors, self._values, strict=True):
            for first, piece in fill_pieces(tensor.values):
                piece.copy_(memory[first : first + piece.numel()])


class SnapshotHistory:
    """Newest snapshots of this rank's state.

    Args:
        every: Number of steps between two snapshots; 0 for none.
        back: Age in steps that the oldest snapshot must reach at any time.

    Attributes:
        most: Largest number of snapshots.
    """

    def __init__(self, every: int, back: int = 0) -> None:
        self.every, self.most = every, snapshot_count(every, back)
        self._snapshots: list[StateSnapshot] = []

    def due(self, step: int) -> bool:
        """Return True if `take` must be called after a step.

        It must be called if there is no snapshot, and again for the step of the newest one, to which the run
        has returned.
        """
        return self.every > 0 and (
            step % self.every == 0 or not self._snapshots or self._snapshots[-1].step == step
        )

    def take(self, step: int, tensors: Iterable[StateTensor], stored: Mapping[str, Any]) -> None:
        """Make a snapshot. That of a step to which the run has returned exists already."""
        if self._snapshots and self._snapshots[-1].step == step:
            self._snapshots[-1].stored = deepcopy(dict(stored))
            return
        former = self._snapshots.pop(0) if len(self._snapshots) == self.most else None
        snapshot = StateSnapshot(step, deepcopy(dict(stored)))
        snapshot.take(tensors, former)
        self._snapshots.append(snapshot)

    @property
    def all(self) -> list[StateSnapshot]:
        """Snapshots, oldest first."""
        return list(self._snapshots)

    def discard_after(self, step: int) -> None:
        """Discard the snapshots of later steps than that to which the run has returned."""
        self._snapshots = [each for each in self._snapshots if each.step <= step]


def snapshot_count(every: int, back: int) -> int:
    """Return how many snapshots, one every `every` steps, include one that is at least `back` steps old."""
    return -(-back // every) + 1 if every else 0
