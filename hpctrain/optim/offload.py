"""An optimizer whose state lies in host memory or in files, updated on the CPU a piece at a time.

ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857): while one piece is updated, the next is
read and the last one is written, so that a step takes as long as the slowest of the three.

Where a GPU computes, gradients come from it and parameters go to it through pinned memory, each on a stream
of its own. The host waits for the events of these copies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.host.device import SideStream, StreamWork, empty_host_tensor
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

_VALUES, _GRADIENTS = "values", "gradients"


@dataclass(frozen=True)
class CopyStreams:
    """Streams of a GPU on which gradients come to the host and parameters return, both at the same time."""

    to_host: SideStream = field(default_factory=SideStream)
    to_device: SideStream = field(default_factory=SideStream)


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
    `streams` are those of the GPU that computes the gradients, None where the host does; "gpu" requires them.
    """

    def __init__(
        self,
        rule: UpdateRule,
        buckets: Sequence[Bucket],
        store: Store,
        buffer_bytes: int,
        agreement: Agreement = nullcontext,
        home: Home = "host",
        streams: CopyStreams | None = None,
    ) -> None:
        assert home != "gpu" or streams is not None
        states = [_state(rule, bucket, store, home) for bucket in buckets]
        super().__init__(rule, buckets, states, agreement)
        self.rule, self.updates, self._streams = rule, 0, streams
        state_bytes = max(sum(flat.element_size() for flat in state.values()) for state in states)
        moved = [buckets[0].dtype, *([buckets[0].gradient_dtype] if streams else [])]
        most = piece_elements(state_bytes + sum(dtype.itemsize for dtype in moved), buffer_bytes)
        self._pieces = [
            OffloadSlice(bucket, state, slice(first, min(first + most, part.stop)), treated.treatment)
            for bucket, state in zip(buckets, states, strict=True)
            for treated in bucket.layout.own_treated
            for part in [treated.part]
            for first in range(part.start, part.stop, most)
        ]
        self._slots = [_Slot(self._pieces[first::SLOTS], home, streams) for first in range(SLOTS)]

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
        if self._streams is not None:
            self._streams.to_device.precede()
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
        updates = torch.tensor(float(self.updates))
        elements = ElementBatch(slot.state, slot.gradients(), updates, piece.treatment)
        self.rule.update([elements], learning_rate, divisor)


class _Slot:
    """Room for one of `pieces` after the other: views of state in memory, copies of what lies elsewhere.

    The parameters' own values lie in `memory`.
    """

    def __init__(self, pieces: Sequence[OffloadSlice], memory: Home, streams: CopyStreams | None) -> None:
        longest = max((piece.part.stop - piece.part.start for piece in pieces), default=0)
        self._of_values, self._streams = memory, streams
        self._memory: dict[str, Tensor] = {}
        for piece in pieces:
            gradients, values = piece.bucket.own_gradients, piece.bucket.own_values
            flats = dict(piece.state) if values is piece.state[MASTER] else {**piece.state, _VALUES: values}
            copied = {
                name: flat.dtype
                for name, flat in flats.items()
                if (memory != "host" if flat is values else isinstance(flat, ScratchTensor))
            }
            if streams is not None:
                copied[_GRADIENTS] = gradients.dtype
            for name, dtype in copied.items():
                if name not in self._memory:
                    self._memory[name] = empty_host_tensor((longest,), dtype, gradients.device)
        self._transfers: list[Transfer] = []
        self.state: dict[str, Tensor] = {}
        self._gradients = torch.empty(0)
        self._arrival: StreamWork | None = None
        self._return: StreamWork | None = None

    @property
    def bytes(self) -> int:
        """What it takes beside memory that the state has anyway."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def read(self, piece: OffloadSlice) -> None:
        """Start to have the piece here; `settle` completes its state, and `gradients` waits for them."""
        self.state = {name: self._bring(name, flat[piece.part]) for name, flat in piece.state.items()}
        self._gradients = part = piece.bucket.own_gradients[piece.part]
        if self._streams is not None:
            host = self._gradients = self._memory[_GRADIENTS][: part.numel()]
            self._arrival = self._streams.to_host.start(lambda: _copy(host, part), [part])

    def gradients(self) -> Tensor:
        """Return the piece's gradients in fp32, in host memory."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._gradients.float()

    def write(self, piece: OffloadSlice, weights: Tensor) -> None:
        """Start to bring the piece's state back, and these weights to where its parameters belong."""
        for name, home in piece.state.items():
            if isinstance(home, ScratchTensor):
                self._transfers.append(home[piece.part].start_write(self.state[name]))
        values = piece.bucket.own_values
        if values is piece.state[MASTER]:
            return
        part = values[piece.part]
        if self._of_values == "host":
            part.copy_(weights)
            return
        if self._return is not None:
            self._return.synchronize()  # it reads the memory that is written next
        rounded = self._memory[_VALUES][: part.numel()].copy_(weights)
        if isinstance(part, ScratchTensor):
            self._transfers.append(part.start_write(rounded))
        else:
            assert self._streams is not None
            self._return = self._streams.to_device.start(lambda: _copy(part, rounded), [part])

    def settle(self) -> None:
        """Wait for transfers of files. InputOutputError of the first that has failed."""
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


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _state(rule: UpdateRule, bucket: Bucket, store: Store, home: Home) -> BucketState:
    own, values = bucket.own.stop - bucket.own.start, bucket.own_values
    names = [*rule.names, *([] if is_master(bucket.dtype, home != "gpu", rule) else [MASTER])]
    memory = store(len(names) * own, torch.float32)
    state = {name: memory[index * own : (index + 1) * own] for index, name in enumerate(names)}
    return {MASTER: values} | state


def piece_elements(element_bytes: int, buffer_bytes: int) -> int:
    """Elements of a piece, of which SLOTS fit into the buffer; pieces begin where vector instructions do."""
    return max(ALIGNMENT, buffer_bytes // (SLOTS * element_bytes) // ALIGNMENT * ALIGNMENT)
