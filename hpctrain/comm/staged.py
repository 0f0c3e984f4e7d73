"""Tensors of a GPU over MPI: staged through pinned host memory.

For ranks that share a GPU, and where there is no NCCL. MPI itself never sees device memory: a
CUDA-aware MPI beside NCCL can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.device import host_empty, wait_for_copies
from hpctrain.comm.transport import Pending, Transport


class _CopyBack:
    """A staged operation under way, whose results go back to the device when it is complete."""

    def __init__(self, pending: Pending, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Complete the operation and order the copies on the current stream."""
        self._pending.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def test(self) -> bool:
        """Whether the operation is complete."""
        if not self._pending.test():
            return False
        self.wait()
        return True


class StagedTransport(Transport):
    """Another transport's calls, for tensors of a device."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    def run(self, call: Call) -> Pending | None:
        """See Transport. Waits for what is given to be on the host; copies results back in stream order."""
        given, received = call.tensor, call.output
        source = target = None
        if given is not None:
            source = _host(given).copy_(given.detach(), non_blocking=True)
            wait_for_copies(given.device)
        if received is not None:
            target = source if received is given else _host(received)
        pending = self.inner.run(call.over(source, target))

        def finish() -> None:
            if received is not None and target is not None:
                received.detach().copy_(target, non_blocking=True)

        if pending is None:
            finish()
            return None
        return _CopyBack(pending, finish)


def _host(tensor: Tensor) -> Tensor:
    return host_empty(tensor.shape, tensor.dtype, tensor.device)
