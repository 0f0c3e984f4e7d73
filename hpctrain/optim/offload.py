"""An optimizer whose state lies in host memory or in files, updated on the CPU a piece at a time.

ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857): while one piece is updated, the next is
read and the last one is written, so that a step takes as long as the slowest of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer
from hpctrain.optim.optimizer import (
    Agreement,
    BucketState,
    ElementBatch,
    Optimizer,
    UpdateRule,
    computed,
    is_master,
    refresh,
)
from hpctrain.parallel.shard import UpdateSettings
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.sharding.bucket_layout import ALIGNMENT
from hpctrain.sharding.state import MASTER

Home = Literal["gpu", "host", "disk"]
"""Where memory lies."""

SLOTS = 3
"""Pieces in memory at a time: being read, being updated, being written."""

_VALUES = "values"


@dataclass(frozen=True)
class OffloadSlice:
    """Neighbouring elements of one bucket's own that are updated at a time, and alike."""

    bucket: Bucket
    state: BucketState
    part: slice
    treatment: UpdateSettings


class OffloadedOptimizer(Optimizer):
    """As ResidentOptimizer, whose results are the same bits where gradients and parameters are on the CPU.

    `store` makes the memory of the state. Where it is files, at most `buffer_bytes` of it are in memory.
    `home` is that of the parameters' own values, or what it would be of those that a plan does not have.
    """

    def __init__(
        self,
        rule: UpdateRule,
        buckets: Sequence[Bucket],
        store: Store,
        buffer_bytes: int,
        agreement: Agreement = nullcontext,
        home: Home = "host",
    ) -> None:
        states = [_state(rule, bucket, store, home) for bucket in buckets]
        super().__init__(rule, buckets, states, agreement)
        self.rule, self.updates = rule, 0
        state_bytes = max(sum(flat.element_size() for flat in state.values()) for state in states)
        most = piece_elements(state_bytes + buckets[0].dtype.itemsize, buffer_bytes)
        self._pieces = [
            OffloadSlice(bucket, state, slice(first, min(first + most, part.stop)), treated.treatment)
            for bucket, state in zip(buckets, states, strict=True)
            for treated in bucket.layout.own_treated
            for part in [treated.part]
            for first in range(part.start, part.stop, most)
        ]
        self._slots = [_Slot(self._pieces[first::SLOTS], home == "disk") for first in range(SLOTS)]

    @property
    @override
    def working_bytes(self) -> int:
        return sum(slot.bytes for slot in self._slots)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """See Optimizer. InputOutputError on all ranks where a file of one fails; the state is then lost."""
        if self._averaged is not None:
            self._averaged.begin(learning_rate)
        with self._agreement():
            try:
                self._update_all(learning_rate, gradient_divisor)
            except HpctrainError:
                for slot in self._slots:
                    with suppress(HpctrainError):
                        slot.settle()  # nothing goes on behind the error
                raise
        self.updates += 1
        refresh(self.buckets)

    def _update_all(self, learning_rate: float, divisor: float) -> None:
        slots = self._slots
        for index, piece in enumerate(self._pieces):
            slot = slots[index % SLOTS]
            if index == 0:
                slot.read(piece)
            if index + 1 < len(self._pieces):
                following = slots[(index + 1) % SLOTS]
                following.settle()
                following.read(self._pieces[index + 1])
            slot.settle()
            self._update(piece, slot, learning_rate, divisor)
            slot.write(piece, computed(self._averaged, slot.state))
        for slot in slots:
            slot.settle()

    def _update(self, piece: OffloadSlice, slot: _Slot, learning_rate: float, divisor: float) -> None:
        gradient = piece.bucket.own_gradients[piece.part].to(device="cpu", dtype=torch.float32)
        updates = torch.tensor(float(self.updates))
        self.rule.update(
            [ElementBatch(slot.state, gradient, updates, piece.treatment)], learning_rate, divisor
        )


class _Slot:
    """Room for one of `pieces` after the other: views of state in memory, copies of what lies in files."""

    def __init__(self, pieces: Sequence[OffloadSlice], values_in_files: bool) -> None:
        longest = max((piece.part.stop - piece.part.start for piece in pieces), default=0)
        self._memory: dict[str, Tensor] = {}
        for piece in pieces:
            values = piece.bucket.own_values
            flats = {_VALUES: values, **piece.state}
            if values is piece.state[MASTER]:
                del flats[_VALUES]
            for name, flat in flats.items():
                in_files = values_in_files if flat is values else isinstance(flat, ScratchTensor)
                if in_files and name not in self._memory:
                    self._memory[name] = torch.empty(longest, dtype=flat.dtype)
        self._transfers: list[Transfer] = []
        self.state: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """What it takes beside memory that the state has anyway."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def read(self, piece: OffloadSlice) -> None:
        """Start to have the piece's state here; `settle` completes it."""
        self.state = {name: self._bring(name, flat[piece.part]) for name, flat in piece.state.items()}

    def write(self, piece: OffloadSlice, weights: Tensor) -> None:
        """Start to bring the piece's state back, and these weights to where its parameters belong."""
        for name, home in piece.state.items():
            if isinstance(home, ScratchTensor):
                self._transfers.append(home[piece.part].start_write(self.state[name]))
        values = piece.bucket.own_values
        if values is piece.state[MASTER]:
            return
        part = values[piece.part]
        if isinstance(part, Tensor):
            part.copy_(weights)
        else:
            rounded = self._memory[_VALUES][: part.numel()].copy_(weights)
            self._transfers.append(part.start_write(rounded))

    def settle(self) -> None:
        """Wait for what is under way. InputOutputError of the first that has failed."""
        failed: HpctrainError | None = None
        for transfer in self._transfers:
            try:
                transfer.result()
            except HpctrainError as error:
                failed = failed or error
        self._transfers.clear()
        if failed is not None:
            raise failed

    def _bring(self, name: str, part: Flat) -> Tensor:
        if isinstance(part, Tensor):
            return part
        room = self._memory[name][: part.numel()]
        self._transfers.append(part.start_read(room))
        return room


def _state(rule: UpdateRule, bucket: Bucket, store: Store, home: Home) -> BucketState:
    own, values = bucket.own.stop - bucket.own.start, bucket.own_values
    names = [*rule.names, *([] if is_master(bucket.dtype, home != "gpu", rule) else [MASTER])]
    memory = store(len(names) * own, torch.float32)
    state = {name: memory[index * own : (index + 1) * own] for index, name in enumerate(names)}
    return {MASTER: values} | state


def piece_elements(element_bytes: int, buffer_bytes: int) -> int:
    """Elements of a piece, of which SLOTS fit into the buffer; pieces begin where vector instructions do."""
    return max(ALIGNMENT, buffer_bytes // (SLOTS * element_bytes) // ALIGNMENT * ALIGNMENT)
