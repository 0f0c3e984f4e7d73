"""Copy-on-write snapshot of the values of a checkpoint, which a thread writes during training.

Most values change only in the update of the optimizer. A thread writes them from their own memory as long as
they are unchanged. Boxes that are not written yet are copied into a host buffer before an update, and those
of some states before each step. If the buffer is full, the step waits for the writer.

Values on a GPU are copied into the buffer, which is pinned, on a stream of its own. This stream waits only
for the work that the GPU had when the snapshot was made. The writer waits for copies on the host. The update
waits for them on the GPU.
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
    """Ring buffer in host memory.

    Args:
        size: Size in bytes.
        device: Device whose values are copied into it.

    Attributes:
        stream: Stream of the copies from a GPU; None if the device is a CPU.
        memory: The buffer.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        assert size >= 2 * _ALIGNMENT, size
        self.stream = None if on_host(device) else SideStream()
        self.memory = empty_host_tensor((size,), torch.uint8, device).numpy()
        self._ranges: deque[tuple[int, int]] = deque()

    @property
    def piece_bytes(self) -> int:
        """Largest number of bytes of a box, so that one is copied while another one is written."""
        return len(self.memory) // 2 // _ALIGNMENT * _ALIGNMENT

    def take(self, size: int) -> Words | None:
        """Return `size` contiguous bytes; None if so many are not free."""
        requested = size
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        first = self._ranges[0][0] if self._ranges else 0
        last = self._ranges[-1][1] if self._ranges else 0
        wraps = bool(self._ranges) and last <= first  # the used memory continues at the beginning
        if last + size <= (first if wraps else len(self.memory)):
            start = last
        elif not wraps and size <= first:
            start = 0
        else:
            return None
        self._ranges.append((start, start + size))
        memory: Words = self.memory[start : start + requested]
        return memory

    def release_oldest(self) -> None:
        """Free the memory that was taken first."""
        self._ranges.popleft()

    def release_all(self) -> None:
        """Free all memory. A copy that still runs is on the stream of later copies, which follow it."""
        self._ranges.clear()


@dataclass(frozen=True)
class _BoxCopy:
    """Copy of a box in the buffer.

    Attributes:
        words: The elements.
        work: Copy on a GPU that writes them; None for values on the host.
    """

    words: Words
    work: StreamWork | None = None


class DraftSnapshot:
    """Elements of boxes when the snapshot was made. One thread takes them in order and writes them.

    Args:
        boxes: Boxes to write. Those that a step changes before the update come first.
        buffer: Buffer for copies.
    """

    def __init__(self, boxes: Sequence[DraftBox], buffer: HostBuffer) -> None:
        assert all(draft_box.bytes <= buffer.piece_bytes for draft_box in boxes)
        self._boxes, self._buffer = boxes, buffer
        buffer.release_all()  # of a writer that failed
        if buffer.stream is not None:
            buffer.stream.follow()
        self._changing_in_step = sum(box.entry.changes_in_step for box in boxes)
        assert all(box.entry.changes_in_step for box in boxes[: self._changing_in_step])
        self._copies: dict[int, _BoxCopy] = {}
        self._written = -1  # number of the box that is being written; earlier ones are done
        self._copying = -1  # number of the box that is being copied
        self._closed = False
        self._changed = Condition()

    def take(self, number: int) -> Words:
        """Return the elements of a box, and release those of the box before. The writer calls this."""
        with self._changed:
            self._release()
            self._changed.wait_for(lambda: self._copying != number)
            self._written = number
            for each in (number, number + 1):  # one is written while the next one is copied from the GPU
                self._start_copy(each)
            self._changed.notify_all()
            copy = self._copies.get(number)
        if copy is None:
            return self._boxes[number].load()
        if copy.work is not None:
            copy.work.synchronize()
        return copy.words

    def close(self) -> None:
        """End the snapshot, since all is written or writing failed. The writer calls this."""
        with self._changed:
            self._release()
            self._closed = True
            self._changed.notify_all()

    def protect(self, update: bool = True) -> None:
        """Copy what is not written yet, so that the values may change. The training thread calls this.

        Args:
            update: True before an update, which changes all values. False before a step, which changes only
                those with `changes_in_step`.
        """
        last = len(self._boxes) if update else self._changing_in_step
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
            # The writer may still read one box from its own memory.
            self._changed.wait_for(
                lambda: self._closed or not 0 <= self._written < last or self._written in self._copies
            )
        if self._buffer.stream is not None:
            self._buffer.stream.precede()

    def _start_copy(self, number: int) -> None:
        """Start to copy a box from a GPU unless it is copied or the buffer is full. The writer calls this."""
        if number in self._copies or number in (self._copying, len(self._boxes)):
            return
        draft_box = self._boxes[number]
        if (
            draft_box.device_values() is not None
            and (memory := self._buffer.take(draft_box.bytes)) is not None
        ):
            self._copies[number] = self._copy(number, memory)

    def _copy(self, number: int, memory: Words) -> _BoxCopy:
        """Copy a box into memory of the buffer. A copy from a GPU is only started."""
        draft_box = self._boxes[number]
        values = draft_box.device_values()
        if values is None:
            words = draft_box.load()
            copy = memory.view(words.dtype)
            np.copyto(copy, words)
            return _BoxCopy(copy)
        assert self._buffer.stream is not None
        host = torch.from_numpy(memory).view(values.dtype)
        work = self._buffer.stream.copy_to_host(values, host.view(values.shape))
        return _BoxCopy(memory.view(f"u{values.element_size()}"), work)

    def _memory(self, number: int) -> Words | None:
        """Wait for memory for a copy of a box; return None if the box is copied or written meanwhile."""
        memory: Words | None = None

        def is_done() -> bool:
            nonlocal memory
            if self._closed or self._written >= number or number in self._copies:
                return True
            memory = self._buffer.take(self._boxes[number].bytes)
            return memory is not None

        self._changed.wait_for(is_done)
        return memory

    def _release(self) -> None:
        """Free the copy of the box that was written, if there is one."""
        if self._copies.pop(self._written, None) is not None:
            self._buffer.release_oldest()
            self._changed.notify_all()
