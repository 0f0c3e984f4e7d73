"""Copies of a rank's state in memory, to go back to without the disk."""

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
    """All state of this rank as it was after `step` steps, and what a checkpoint `stored` beside it."""

    def __init__(self, step: int, stored: Mapping[str, Any]) -> None:
        self.step, self.stored = step, stored
        self._values: list[Tensor] = []
        self._prints: list[int] = []

    def take(self, tensors: Iterable[StateTensor], former: StateSnapshot | None = None) -> None:
        """Copy them, into the memory of a `former` copy that is not needed any more, if there is one."""
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
        self._prints = [int(word_sum(values)) for values in self._values]

    def is_unchanged(self) -> bool:
        """Whether no bit has changed since."""
        return self._prints == [int(word_sum(values)) for values in self._values]

    def restore(self, tensors: Iterable[StateTensor]) -> None:
        """Have them hold again what they held."""
        for tensor, memory in zip(tensors, self._values, strict=True):
            for first, piece in fill_pieces(tensor.values):
                piece.copy_(memory[first : first + piece.numel()])


class SnapshotHistory:
    """The newest copies, one every so many steps: enough for one that is `back` steps old at any time."""

    def __init__(self, every: int, back: int = 0) -> None:
        self.every, self.most = every, snapshot_count(every, back)
        self._held: list[StateSnapshot] = []

    def due(self, step: int) -> bool:
        """Whether a copy is to be made of the state after that step: without any, of any; and again of the
        newest one's, to which the run went back.
        """
        return self.every > 0 and (step % self.every == 0 or not self._held or self._held[-1].step == step)

    def take(self, step: int, tensors: Iterable[StateTensor], stored: Mapping[str, Any]) -> None:
        """Make one; of a step that the run went back to, it is there."""
        if self._held and self._held[-1].step == step:
            self._held[-1].stored = deepcopy(dict(stored))
            return
        former = self._held.pop(0) if len(self._held) == self.most else None
        held = StateSnapshot(step, deepcopy(dict(stored)))
        held.take(tensors, former)
        self._held.append(held)

    @property
    def all(self) -> list[StateSnapshot]:
        """The oldest first."""
        return list(self._held)

    def discard_after(self, step: int) -> None:
        """The run went back to that step: what came after it never was."""
        self._held = [held for held in self._held if held.step <= step]


def snapshot_count(every: int, back: int) -> int:
    """How many copies, one every so many steps, have one among them that is `back` steps old or older."""
    return -(-back // every) + 1 if every else 0
