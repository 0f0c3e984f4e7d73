"""Values as they were at one moment, written while training goes on.

Forward and backward passes change little of what a checkpoint holds, the update does. So most pieces are
written from where they are; what is still to be written when the update comes, or of some state when the step
begins, is copied into a host buffer first, and where that is full, the step waits for the writer.

What a GPU holds passes through the buffer, which is pinned, on a stream of its own. This stream waits only
for the work that the GPU had when the values were those to be written. The writer waits for a copy on the
host; the update does so on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition

import numpy as np
import torch

from hpctrain.checkpoint.checksum import Words
from hpctrain.checkpoint.draft import DraftBox
from hpctrain.host.device import on_host
from hpctrain.host.streams import SideStream, StreamWork, empty_host_tensor

_ALIGNMENT = 64


class HostBuffer:
    """Host memory given out and taken back in the same order, for pieces that come from `device`.

    `stream` is that of the copies from a GPU; None if the device is a CPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        assert size >= 2 * _ALIGNMENT, size
        self.stream = None if on_host(device) else SideStream()
        self.memory = empty_host_tensor((size,), torch.uint8, device).numpy()
        self._given: deque[tuple[int, int]] = deque()

    @property
    def piece_bytes(self) -> int:
        """Bytes that one piece should have at most: while one is written, the next can be copied."""
        return len(self.memory) // 2 // _ALIGNMENT * _ALIGNMENT

    def take(self, size: int) -> Words | None:
        """`size` bytes; None while there is no room for them in one place."""
        asked = size
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        first = self._given[0][0] if self._given else 0
        last = self._given[-1][1] if self._given else 0
        around = bool(self._given) and last <= first  # what is given out goes around the end
        if last + size <= (first if around else len(self.memory)):
            start = last
        elif not around and size <= first:
            start = 0
        else:
            return None
        self._given.append((start, start + size))
        memory: Words = self.memory[start : start + asked]
        return memory

    def release_oldest(self) -> None:
        """The oldest of what was taken is free again."""
        self._given.popleft()

    def release_all(self) -> None:
        """Everything is free again. A copy that goes on belongs to the stream of those that follow it."""
        self._given.clear()


@dataclass(frozen=True)
class _PieceCopy:
    """A piece in the buffer, and the handle of the GPU's work that brings it there, if a GPU does."""

    words: Words
    work: StreamWork | None = None


class DraftSnapshot:
    """The elements of pieces at the time this was made, taken in order by one thread that writes them."""

    def __init__(self, pieces: Sequence[DraftBox], buffer: HostBuffer) -> None:
        assert all(piece.bytes <= buffer.piece_bytes for piece in pieces)
        self._pieces, self._buffer = pieces, buffer
        buffer.release_all()  # a writer that failed may have left some
        if buffer.stream is not None:
            buffer.stream.follow()
        self._of_step = sum(piece.entry.changes_in_step for piece in pieces)
        assert all(piece.entry.changes_in_step for piece in pieces[: self._of_step])
        self._copies: dict[int, _PieceCopy] = {}
        self._taken = -1  # the piece that is being written, with all before it done
        self._copying = -1
        self._closed = False
        self._changed = Condition()

    def take(self, number: int) -> Words:
        """The elements of a piece, to be written; those of the piece before are let go. For the writer."""
        with self._changed:
            self._release()
            self._changed.wait_for(lambda: self._copying != number)
            self._taken = number
            for each in (number, number + 1):  # while one is written, the next one comes from the GPU
                self._start_copy(each)
            self._changed.notify_all()
            copy = self._copies.get(number)
        if copy is None:
            return self._pieces[number].load()
        if copy.work is not None:
            copy.work.synchronize()
        return copy.words

    def close(self) -> None:
        """Nothing more will be taken, as all is written or writing failed. For the writer."""
        with self._changed:
            self._release()
            self._closed = True
            self._changed.notify_all()

    def protect(self, update: bool = True) -> None:
        """After this the values may be overwritten, without `update` only those that a step changes before.

        For the thread that trains: before the update, and without `update` before each step.
        """
        last = len(self._pieces) if update else self._of_step
        for number in range(last):
            with self._changed:
                memory = self._memory(number)
                if memory is None:
                    continue
                self._copying = number
            copy = self._copy(number, memory)
            with self._changed:
                self._copies[number] = copy
                self._copying = -1
                self._changed.notify_all()
        with self._changed:
            # At most one is still being written from where it is.
            self._changed.wait_for(
                lambda: self._closed or not 0 <= self._taken < last or self._taken in self._copies
            )
        if self._buffer.stream is not None:
            self._buffer.stream.precede()

    def _start_copy(self, number: int) -> None:
        """Start to copy a piece that a GPU holds, if it is not copied and there is room. For the writer."""
        if number in self._copies or number in (self._copying, len(self._pieces)):
            return
        piece = self._pieces[number]
        if piece.device_values() is not None and (memory := self._buffer.take(piece.bytes)) is not None:
            self._copies[number] = self._copy(number, memory)

    def _copy(self, number: int, memory: Words) -> _PieceCopy:
        """Copy a piece into memory of the buffer; what a GPU holds is on its way afterwards."""
        piece = self._pieces[number]
        values = piece.device_values()
        if values is None:
            words = piece.load()
            copy = memory.view(words.dtype)
            np.copyto(copy, words)
            return _PieceCopy(copy)
        assert self._buffer.stream is not None
        host = torch.from_numpy(memory).view(values.dtype)
        work = self._buffer.stream.copy_to_host(values, host.view(values.shape))
        return _PieceCopy(memory.view(f"u{values.element_size()}"), work)

    def _memory(self, number: int) -> Words | None:
        """Memory for a copy of the piece, waited for; None if it is copied or taken by now."""
        memory: Words | None = None

        def settled() -> bool:
            nonlocal memory
            if self._closed or self._taken >= number or number in self._copies:
                return True
            memory = self._buffer.take(self._pieces[number].bytes)
            return memory is not None

        self._changed.wait_for(settled)
        return memory

    def _release(self) -> None:
        if self._copies.pop(self._taken, None) is not None:
            self._buffer.release_oldest()
            self._changed.notify_all()
