"""Optimizer whose state is in host memory or in files, updated by the CPU in pieces.

This is ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857). While one piece is updated, the
next one is read and the last one is written, so a step takes as long as the slowest of the three.

If a GPU computes, gradients come from it and parameters return to it through pinned memory, each on a stream
of its own. The host only waits for the events of these copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.host.streams import SideStream, StreamWork, empty_host_tensor
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer
from hpctrain.optim.optimizer import (
    Agreement,
    BucketState,
    ElementBatch,
    Optimizer,
    UpdateRule,
    are_masters,
    gather_updated,
    training_weights,
)
from hpctrain.parallel.shards import UpdateSettings
from hpctrain.sharding.bucket import Bucket, FlatAllocator
from hpctrain.sharding.bucket_layout import ALIGNMENT
from hpctrain.sharding.state import MASTER

MemoryLocation = Literal["gpu", "host", "disk"]
"""Memory of a GPU or the host, or files."""

PIECE_BUFFERS = 3
"""Number of pieces in memory: one is read, one is updated, one is written."""

_VALUES, _GRADIENTS = "values", "gradients"


@dataclass(frozen=True)
class CopyStreams:
    """GPU streams that copy gradients to the host and parameters to the GPU at the same time."""

    to_host: SideStream = field(default_factory=SideStream)
    to_device: SideStream = field(default_factory=SideStream)


@dataclass(frozen=True)
class OffloadSlice:
    """Neighbouring elements of a bucket that are updated together.

    Attributes:
        bucket: The bucket.
        state: State of all elements of the bucket that this rank updates.
        part: These elements in that state.
        update_settings: Update settings of the elements.
    """

    bucket: Bucket
    state: BucketState
    part: slice
    update_settings: UpdateSettings


class OffloadedOptimizer(Optimizer):
    """Optimizer whose state is in host memory or files.

    If the CPU computes the gradients, its results have the bits of ResidentOptimizer.

    Attributes:
        piece_buffers: Memory of the pieces that are read, updated and written.
    """

    def __init__(
        self,
        rule: UpdateRule,
        buckets: Sequence[Bucket],
        allocate: FlatAllocator,
        buffer_bytes: int,
        agreement: Agreement = nullcontext,
        location: MemoryLocation = "host",
        streams: CopyStreams | None = None,
    ) -> None:
        """Make the state and the memory of the pieces. Local.

        Args:
            rule: Elementwise update rule.
            buckets: Buckets whose parameters are updated.
            allocate: Makes flat memory for the state.
            buffer_bytes: Largest number of bytes of state that is processed at a time.
            agreement: Context of operations that may fail on one rank alone.
            location: Location of the parameters that this rank updates. A plan, which has no memory, passes
                that of the run.
            streams: Copy streams of the GPU that computes the gradients; None if the host computes them.
                "gpu" requires them.
        """
        assert location != "gpu" or streams is not None
        states = [_state(rule, bucket, allocate, location) for bucket in buckets]
        super().__init__(rule, buckets, states, agreement)
        self.rule, self.updates, self._streams = rule, 0, streams
        state_bytes = max(sum(flat.element_size() for flat in state.values()) for state in states)
        copied_dtypes = [buckets[0].dtype, *([buckets[0].gradient_dtype] if streams else [])]
        most = piece_elements(state_bytes + sum(dtype.itemsize for dtype in copied_dtypes), buffer_bytes)
        self._pieces = [
            OffloadSlice(bucket, state, slice(first, min(first + most, part.stop)), update_settings)
            for bucket, state in zip(buckets, states, strict=True)
            for part, update_settings in bucket.layout.owned_update_ranges
            for first in range(part.start, part.stop, most)
        ]
        self.piece_buffers = [
            _PieceBuffer(self._pieces[first::PIECE_BUFFERS], location, streams)
            for first in range(PIECE_BUFFERS)
        ]

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update the parameters. Collective over the ranks that share buckets.

        Raises:
            InputOutputError: On all ranks if a file of one rank fails. The state is lost then.
        """
        if self._averaged_rule is not None:
            self._averaged_rule.begin(learning_rate)
        with self._agreement():
            try:
                self._update_all(learning_rate, gradient_divisor)
            except HpctrainError:
                for buffer in self.piece_buffers:
                    with suppress(HpctrainError):
                        buffer.wait_for_files()  # no transfer may be in progress after the error
                raise
        self.updates += 1
        if self._streams is not None:
            self._streams.to_device.precede()
        gather_updated(self.buckets)

    def _update_all(self, learning_rate: float, divisor: float) -> None:
        buffers = self.piece_buffers
        for index, piece in enumerate(self._pieces):
            buffer = buffers[index % PIECE_BUFFERS]
            if index == 0:
                buffer.read(piece)
            if index + 1 < len(self._pieces):
                following = buffers[(index + 1) % PIECE_BUFFERS]
                following.wait_for_files()
                following.read(self._pieces[index + 1])
            buffer.wait_for_files()
            updates = torch.tensor(float(self.updates))
            batch = ElementBatch(buffer.state, buffer.gradients(), updates, piece.update_settings)
            self.rule.update([batch], learning_rate, divisor)
            buffer.write(piece, training_weights(self._averaged_rule, buffer.state))
        for buffer in buffers:
            buffer.wait_for_files()


class _PieceBuffer:
    """Memory for one piece at a time.

    It has views of state that is in host memory, and copies of all that is in files or on a GPU.

    Attributes:
        memory: Memory of the copies by name.
        state: State of the piece by name, in host memory.
    """

    def __init__(
        self, pieces: Sequence[OffloadSlice], location: MemoryLocation, streams: CopyStreams | None
    ) -> None:
        longest = max((piece.part.stop - piece.part.start for piece in pieces), default=0)
        self._values_location, self._streams = location, streams
        self.memory: dict[str, Tensor] = {}
        for piece in pieces:
            gradients, values = piece.bucket.owned_gradients, piece.bucket.owned_values
            flats = dict(piece.state) if values is piece.state[MASTER] else {**piece.state, _VALUES: values}
            copied = {
                name: flat.dtype
                for name, flat in flats.items()
                if (location != "host" if flat is values else isinstance(flat, ScratchTensor))
            }
            if streams is not None:
                copied[_GRADIENTS] = gradients.dtype
            for name, dtype in copied.items():
                if name not in self.memory:
                    self.memory[name] = empty_host_tensor((longest,), dtype, gradients.device)
        self._transfers: list[Transfer] = []
        self.state: dict[str, Tensor] = {}
        self._gradients = torch.empty(0)
        self._arrival: StreamWork | None = None
        self._return: StreamWork | None = None

    def read(self, piece: OffloadSlice) -> None:
        """Start to read a piece. `wait_for_files` waits for its state, and `gradients` for its gradients."""
        self.state = {name: self._start_read(name, flat[piece.part]) for name, flat in piece.state.items()}
        self._gradients = part = piece.bucket.owned_gradients[piece.part]
        if self._streams is not None:
            host = self._gradients = self.memory[_GRADIENTS][: part.numel()]
            self._arrival = self._streams.to_host.start(lambda: _copy(host, part), [part])

    def gradients(self) -> Tensor:
        """Return the piece's gradients in fp32, in host memory."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._gradients.float()

    def write(self, piece: OffloadSlice, weights: Tensor) -> None:
        """Start to write the state of the piece, and its new weights to its parameters."""
        for name, stored in piece.state.items():
            if isinstance(stored, ScratchTensor):
                self._transfers.append(stored[piece.part].start_write(self.state[name]))
        values = piece.bucket.owned_values
        if values is piece.state[MASTER]:
            return
        part = values[piece.part]
        if self._values_location == "host":
            part.copy_(weights)
            return
        if self._return is not None:
            self._return.synchronize()  # its copy reads the memory that the next line overwrites
        rounded = self.memory[_VALUES][: part.numel()].copy_(weights)
        if isinstance(part, ScratchTensor):
            self._transfers.append(part.start_write(rounded))
        else:
            assert self._streams is not None
            self._return = self._streams.to_device.start(lambda: _copy(part, rounded), [part])

    def wait_for_files(self) -> None:
        """Wait until all files are read or written.

        Raises:
            InputOutputError: If a transfer has failed: the error of the first of them.
        """
        failed: HpctrainError | None = None
        for transfer in self._transfers:
            try:
                transfer.result()
            except HpctrainError as error:
                failed = failed or error
        self._transfers.clear()
        if failed is not None:
            raise failed

    def _start_read(self, name: str, part: Flat) -> Tensor:
        if isinstance(part, Tensor):
            return part
        target = self.memory[name][: part.numel()]
        self._transfers.append(part.start_read(target))
        return target


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _state(
    rule: UpdateRule, bucket: Bucket, allocate: FlatAllocator, location: MemoryLocation
) -> BucketState:
    elements, values = bucket.owned_slice.stop - bucket.owned_slice.start, bucket.owned_values
    names = [*rule.names, *([] if are_masters(bucket.dtype, location != "gpu", rule) else [MASTER])]
    memory = allocate(len(names) * elements, torch.float32)
    state = {name: memory[index * elements : (index + 1) * elements] for index, name in enumerate(names)}
    return {MASTER: values} | state


def piece_elements(element_bytes: int, buffer_bytes: int) -> int:
    """Return the elements of a piece, so that PIECE_BUFFERS of them fit into the buffer.

    They are a multiple of ALIGNMENT, so that vector instructions start at the same elements in any piece.

    Args:
        element_bytes: Bytes of all state and copies of one element.
        buffer_bytes: Bytes of the buffer.
    """
    return max(ALIGNMENT, buffer_bytes // (PIECE_BUFFERS * element_bytes) // ALIGNMENT * ALIGNMENT)
