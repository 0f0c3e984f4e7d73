"""AdamW whose state lies in host memory or in files, updated on the CPU a piece at a time.

ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857): while one piece is updated, the next is
read and the last one is written, so that a step takes as long as the slowest of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat, ScratchTensor, Transfer, to_read
from hpctrain.optim.adamw import Moments, decay_ranges, fused_update
from hpctrain.sharding.bucket import ALIGNMENT, Bucket, Store

SLOTS = 3
"""Pieces in memory at a time: being read, being updated, being written."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one bucket's own that are updated at a time, all decayed or none."""

    bucket: Bucket
    moments: Moments[Flat]
    part: slice
    decayed: bool

    @property
    def elements(self) -> int:
        """Elements of the piece."""
        return int(self.part.stop - self.part.start)


class OffloadedAdamW:
    """As AdamW, whose results are the same bits where gradients and parameters are on the CPU.

    `store` makes the memory of the state. Where it is files, at most `buffer_bytes` of it are in memory, and
    `agreement` surrounds what may fail on one rank alone (`World.agreement`).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        store: Store,
        buffer_bytes: int,
        agreement: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.buckets: Sequence[Bucket] = buckets
        self.updates = 0
        self._betas, self._epsilon, self._weight_decay = betas, epsilon, weight_decay
        self._agreement = agreement
        self._moments = [_moments(bucket, store) for bucket in buckets]
        self._pieces = list(_pieces(buckets, self._moments, buffer_bytes))
        self._slots = [_Slot(longest) for longest in _slot_elements(buckets, buffer_bytes)]

    @property
    def moments(self) -> Sequence[Moments[Flat]]:
        """The state, by bucket."""
        return self._moments

    @property
    def working_bytes(self) -> int:
        """Memory of the pieces on their way."""
        return sum(slot.bytes for slot in self._slots)

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """Update with gradients divided by `gradient_divisor` (loss scale over clip coefficient).

        The gradient buffers hold the divided gradients afterwards, where they are fp32 and on the CPU.
        InputOutputError on all ranks where a file of one of them fails; the state is then lost.
        """
        with self._agreement():
            try:
                self._update_all(learning_rate, gradient_divisor)
            except HpctrainError:
                for slot in self._slots:
                    with suppress(HpctrainError):
                        slot.settle()  # nothing goes on behind the error
                raise
        self.updates += 1
        self._refresh()

    def publish(self) -> None:
        """Copy the master weights into the parameters, where these are whole on all ranks. Collective."""
        with self._agreement():
            for bucket, moments in zip(self.buckets, self._moments, strict=True):
                if moments.master is not bucket.own_values:
                    for first, master in to_read(moments.master):
                        _put(bucket.own_values[first : first + master.numel()], master)
        self._refresh()

    def _refresh(self) -> None:
        works = [bucket.start_refresh() for bucket in self.buckets]
        for work in works:
            if work is not None:
                work.wait()

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

    def _update(self, piece: Piece, slot: _Slot, learning_rate: float, divisor: float) -> None:
        gradient = piece.bucket.own_gradients[piece.part].to(device="cpu", dtype=torch.float32)
        fused_update(
            [slot.master],
            [gradient],
            [slot.exp_avg],
            [slot.exp_avg_sq],
            [torch.tensor(float(self.updates))],
            learning_rate,
            self._weight_decay if piece.decayed else 0.0,
            self._betas,
            self._epsilon,
            divisor,
        )


class _Slot:
    """One piece in memory: views of the state that is there, copies of what lies in files."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._memory: dict[str, Tensor] = {}
        self._transfers: list[Transfer] = []
        self.master = self.exp_avg = self.exp_avg_sq = torch.empty(0)

    @property
    def bytes(self) -> int:
        """What it takes beside memory that the state has anyway."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def read(self, piece: Piece) -> None:
        """Start to have the piece's state here; `settle` completes it."""
        self.master = self._bring("master", piece.moments.master[piece.part])
        self.exp_avg = self._bring("exp_avg", piece.moments.exp_avg[piece.part])
        self.exp_avg_sq = self._bring("exp_avg_sq", piece.moments.exp_avg_sq[piece.part])

    def write(self, piece: Piece) -> None:
        """Start to bring the piece's state back, and its parameters to where they belong."""
        for home, here in (
            (piece.moments.master, self.master),
            (piece.moments.exp_avg, self.exp_avg),
            (piece.moments.exp_avg_sq, self.exp_avg_sq),
        ):
            if isinstance(home, ScratchTensor):
                self._transfers.append(home[piece.part].start_write(here))
        values = piece.bucket.own_values
        if values is piece.moments.master:
            return
        part = values[piece.part]
        if isinstance(part, Tensor):
            part.copy_(self.master)
        else:
            rounded = self._room("values", part.numel(), part.dtype).copy_(self.master)
            self._transfers.append(part.start_write(rounded))

    def settle(self) -> None:
        """Wait for what is under way. InputOutputError of the first that has failed."""
        failed: HpctrainError | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
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


def state_elements(bucket_dtype: torch.dtype, device: torch.device, own: int) -> int:
    """Elements of fp32 state that a store is asked for, of a bucket with `own` elements on this rank."""
    return (2 if _is_master(bucket_dtype, device) else 3) * own


def _is_master(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether parameters of this type that lie there are the master weights themselves."""
    return dtype == torch.float32 and device.type == "cpu"


def _moments(bucket: Bucket, store: Store) -> Moments[Flat]:
    own, values = bucket.own.stop - bucket.own.start, bucket.own_values
    kept = store(state_elements(bucket.dtype, values.device, own), torch.float32)
    exp_avg, exp_avg_sq = kept[:own], kept[own : 2 * own]
    if _is_master(bucket.dtype, values.device):
        return Moments(values, exp_avg, exp_avg_sq)
    return Moments(kept[2 * own :], exp_avg, exp_avg_sq)


def piece_elements(buckets: Sequence[Bucket], buffer_bytes: int) -> int:
    """Elements of a piece, of which SLOTS fit into the buffer; pieces begin where vector instructions do."""
    largest = max(bucket.dtype.itemsize for bucket in buckets)
    return max(ALIGNMENT, buffer_bytes // (SLOTS * (12 + largest)) // ALIGNMENT * ALIGNMENT)


def working_bytes(buckets: Sequence[Bucket], buffer_bytes: int, values_in_files: bool) -> int:
    """Memory of the pieces on their way, of state that lies in files."""
    half = any(bucket.dtype != torch.float32 for bucket in buckets)
    size = 4 * (3 if half or values_in_files else 2)
    if half and values_in_files:
        size += max(bucket.dtype.itemsize for bucket in buckets)
    return sum(_slot_elements(buckets, buffer_bytes)) * size


def _slot_elements(buckets: Sequence[Bucket], buffer_bytes: int) -> list[int]:
    """Elements of the longest piece that every slot takes in turn; 0 where there are fewer pieces."""
    lengths = [
        part.stop - part.start for bucket in buckets for part, _ in _parts(bucket, buckets, buffer_bytes)
    ]
    return [max(lengths[slot::SLOTS], default=0) for slot in range(SLOTS)]


def _parts(bucket: Bucket, buckets: Sequence[Bucket], buffer_bytes: int) -> Iterator[tuple[slice, bool]]:
    """What of a bucket's own is updated at a time, and whether it is decayed."""
    most = piece_elements(buckets, buffer_bytes)
    for part, decayed in zip(decay_ranges(bucket), (True, False), strict=True):
        for first in range(part.start, part.stop, most):
            yield slice(first, min(first + most, part.stop)), decayed


def _pieces(buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], buffer_bytes: int) -> list[Piece]:
    return [
        Piece(bucket, moment, part, decayed)
        for bucket, moment in zip(buckets, moments, strict=True)
        for part, decayed in _parts(bucket, buckets, buffer_bytes)
    ]


def _put(target: Flat, values: Tensor) -> None:
    if isinstance(target, Tensor):
        target.copy_(values)
    else:
        target.store(values.to(target.dtype))
