"""A GPU in CPU memory, whose side streams do their work as late as they may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import NoReturn

import torch
from torch import Tensor

GPU = torch.device("cuda", 0)


class OnGpu(Tensor):
    """Tensor in CPU memory that names a GPU as its device, and cannot be read by the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """A GPU."""
        return GPU

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the host waits for the stream that computes, and copies to pageable memory")

    cpu = numpy = to = item = tolist = _refuse


def on_gpu(tensor: Tensor) -> OnGpu:
    """Return a view of a tensor of a CPU that stands for one of a GPU."""
    return tensor.as_subclass(OnGpu)


class LateWork:
    """Handle of work on a LateStream, as a StreamWork."""

    def __init__(self, stream: LateStream, action: Callable[[], object]) -> None:
        self.stream, self.action = stream, action
        self.is_complete = False

    def synchronize(self) -> None:
        """Do all work of the stream up to this."""
        self.stream.run(self)

    wait = synchronize

    def test(self) -> bool:
        """Return True if it is done."""
        return self.is_complete

    def deliver(self, memory: Tensor) -> Tensor:
        """Return `memory`; what computes with it is late, too, and so is not waited for."""
        return memory


class LateStream:
    """Substitute of a SideStream that works in order, and only when somebody has to wait for it.

    `started` are the handles of all work; `events` names in order what was started, and what waited.
    """

    def __init__(self, name: str = "", events: list[str] | None = None) -> None:
        self.name, self.events = name, [] if events is None else events
        self.started: list[LateWork] = []
        self._queue: deque[LateWork] = deque()
        self._lock = RLock()

    def start(self, action: Callable[[], object], _: Sequence[Tensor | None] = ()) -> LateWork:
        """Queue an action."""
        with self._lock:
            self.events.append(f"start {self.name}")
            work = LateWork(self, action)
            self.started.append(work)
            self._queue.append(work)
            return work

    def copy_to_host(self, memory: Tensor, host: Tensor) -> LateWork:
        """Queue a copy to the host."""
        return self.start(lambda: host.copy_(memory.as_subclass(Tensor)))

    def copy_to_device(self, host: Tensor, _: torch.device) -> tuple[Tensor, LateWork]:
        """Queue a copy from the host into new memory."""
        memory = torch.empty_like(host)
        return memory, self.start(lambda: memory.copy_(host))

    def follow(self) -> None:
        """Do nothing: work of the current stream is done at once."""

    def precede(self) -> None:
        """Do all work."""
        self.run(None)

    def run(self, last: LateWork | None) -> None:
        """Do all work up to `last`, or all."""
        with self._lock:
            if last is not None and last.is_complete:
                return
            self.events.append(f"wait {self.name}")
            while self._queue:
                work = self._queue.popleft()
                work.action()
                work.is_complete = True
                if work is last:
                    break
