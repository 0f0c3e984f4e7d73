"""An optimizer whose state lies in host memory or in files, updated on the CPU a piece at a time.

ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857): while one piece is updated, the next is
read and the last one is written, so that a step takes as long as the slowest of the three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.device import on_host
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer
from hpctrain.optim.optimizer import (
    MASTER,
    STATE_BYTES,
    Agreement,
    Elements,
    Optimizer,
    State,
    UpdateRule,
    decay_ranges,
    refresh,
)
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.sharding.bucket_layout import ALIGNMENT

SLOTS = 3
"""Pieces in memory at a time: being read, being updated, being written."""


@dataclass(frozen=True)
class OffloadSlice:
    """Neighbouring elements of one bucket's own that are updated at a time, all decayed or none."""

    bucket: Bucket
    state: State
    part: slice
    decayed: bool


class OffloadedOptimizer(Optimizer):
    """As ResidentOptimizer, whose results are the same bits where gradients and parameters are on the CPU.

    `store` makes the memory of the state. Where it is files, at most `buffer_bytes` of it are in memory.
    """

    def __init__(
        self,
        rule: UpdateRule,
        buckets: Sequence[Bucket],
        store: Store,
        buffer_bytes: int,
        agreement: Agreement = nullcontext,
    ) -> None:
        super().__init__(rule, buckets, [_state(rule, bucket, store) for bucket in buckets], agreement)
        self.updates = 0
        self._pieces = [
            OffloadSlice(bucket, state, part, decayed)
            for bucket, state in zip(buckets, self.states, strict=True)
            for part, decayed in _parts(rule, bucket, buckets, buffer_bytes)
        ]
        self._slots = [_Slot(longest) for longest in _slot_elements(rule, buckets, buffer_bytes)]

    @property
    def working_bytes(self) -> int:
        """See Optimizer."""
        return sum(slot.bytes for slot in self._slots)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """See Optimizer. InputOutputError on all ranks where a file of one fails; the state is then lost."""
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
            slot.write(piece)
        for slot in slots:
            slot.settle()

    def _update(self, piece: OffloadSlice, slot: _Slot, learning_rate: float, divisor: float) -> None:
        gradient = piece.bucket.own_gradients[piece.part].to(device="cpu", dtype=torch.float32)
        updates = torch.tensor(float(self.updates))
        self.rule.update([Elements(slot.state, gradient, updates, piece.decayed)], learning_rate, divisor)


class _Slot:
    """One piece in memory: views of the state that is there, copies of what lies in files."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._memory: dict[str, Tensor] = {}
        self._transfers: list[Transfer] = []
        self.state: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """What it takes beside memory that the state has anyway."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def read(self, piece: OffloadSlice) -> None:
        """Start to have the piece's state here; `settle` completes it."""
        self.state = {name: self._bring(name, flat[piece.part]) for name, flat in piece.state.items()}

    def write(self, piece: OffloadSlice) -> None:
        """Start to bring the piece's state back, and its parameters to where they belong."""
        for name, home in piece.state.items():
            if isinstance(home, ScratchTensor):
                self._transfers.append(home[piece.part].start_write(self.state[name]))
        values, master = piece.bucket.own_values, self.state[MASTER]
        if values is piece.state[MASTER]:
            return
        part = values[piece.part]
        if isinstance(part, Tensor):
            part.copy_(master)
        else:
            rounded = self._room("values", part.numel(), part.dtype).copy_(master)
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
        room = self._room(name, part.numel(), part.dtype)
        self._transfers.append(part.start_read(room))
        return room

    def _room(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        if name not in self._memory:
            self._memory[name] = torch.empty(self._longest, dtype=dtype)
        return self._memory[name][:elements]


def state_elements(rule: UpdateRule, bucket_dtype: torch.dtype, device: torch.device, own: int) -> int:
    """Elements of state that a store is asked for, of a bucket with `own` elements on this rank."""
    return (len(rule.names) + (not _is_master(bucket_dtype, device))) * own


def _is_master(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether parameters of this type that lie there are the master weights themselves."""
    return dtype == torch.float32 and on_host(device)


def _state(rule: UpdateRule, bucket: Bucket, store: Store) -> State:
    own, values = bucket.own.stop - bucket.own.start, bucket.own_values
    memory = store(state_elements(rule, bucket.dtype, values.device, own), torch.float32)
    state = {name: memory[index * own : (index + 1) * own] for index, name in enumerate(rule.names)}
    same = _is_master(bucket.dtype, values.device)
    return {MASTER: values if same else memory[len(rule.names) * own :], **state}


def piece_elements(rule: UpdateRule, buckets: Sequence[Bucket], buffer_bytes: int) -> int:
    """Elements of a piece, of which SLOTS fit into the buffer; pieces begin where vector instructions do."""
    size = STATE_BYTES * (1 + len(rule.names)) + max(bucket.dtype.itemsize for bucket in buckets)
    return max(ALIGNMENT, buffer_bytes // (SLOTS * size) // ALIGNMENT * ALIGNMENT)


def working_bytes(
    rule: UpdateRule, buckets: Sequence[Bucket], buffer_bytes: int, values_in_files: bool
) -> int:
    """Memory of the pieces on their way, of state that lies in files."""
    half = any(bucket.dtype != torch.float32 for bucket in buckets)
    size = STATE_BYTES * (len(rule.names) + (half or values_in_files))
    if half and values_in_files:
        size += max(bucket.dtype.itemsize for bucket in buckets)
    return sum(_slot_elements(rule, buckets, buffer_bytes)) * size


def _slot_elements(rule: UpdateRule, buckets: Sequence[Bucket], buffer_bytes: int) -> list[int]:
    """Elements of the longest piece that every slot takes in turn; 0 where there are fewer pieces."""
    lengths = [
        part.stop - part.start
        for bucket in buckets
        for part, _ in _parts(rule, bucket, buckets, buffer_bytes)
    ]
    return [max(lengths[slot::SLOTS], default=0) for slot in range(SLOTS)]


def _parts(
    rule: UpdateRule, bucket: Bucket, buckets: Sequence[Bucket], buffer_bytes: int
) -> Iterator[tuple[slice, bool]]:
    """What of a bucket's own is updated at a time, and whether it is decayed."""
    most = piece_elements(rule, buckets, buffer_bytes)
    for part, decayed in zip(decay_ranges(bucket), (True, False), strict=True):
        for first in range(part.start, part.stop, most):
            yield slice(first, min(first + most, part.stop)), decayed
