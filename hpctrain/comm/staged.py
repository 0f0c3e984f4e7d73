"""Tensors of a GPU over MPI: staged through pinned host memory.

For ranks that share a GPU, and where there is no NCCL. MPI itself never sees device memory: a
CUDA-aware MPI beside NCCL can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.comm.transport import Operation, Pending, Transport


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
    """Another transport's primitives, for tensors of a device."""

    def __init__(self, inner: Transport, pinned: bool = True) -> None:
        self.inner = inner
        self.pinned = pinned
        self.rank, self.size, self.limit = inner.rank, inner.size, inner.limit

    def _host(self, tensor: Tensor) -> Tensor:
        # torch keeps pinned memory for the next call, and until the copies that use it are done.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)

    def _down(self, tensor: Tensor) -> Tensor:
        return self._host(tensor).copy_(tensor.detach(), non_blocking=True)

    def _run(
        self,
        begin: Callable[[], Pending | None],
        results: Sequence[tuple[Tensor, Tensor]],
        blocking: bool,
    ) -> Pending | None:
        """Wait for the copies down, run, and copy each host tensor of `results` to its device tensor."""
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        pending = begin()

        def finish() -> None:
            for host, device in results:
                device.detach().copy_(host, non_blocking=True)

        if blocking or pending is None:
            finish()
            return None
        return _CopyBack(pending, finish)

    def all_reduce(self, tensor: Tensor, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        host = self._down(tensor)
        return self._run(lambda: self.inner.all_reduce(host, operation, blocking), [(host, tensor)], blocking)

    def reduce(self, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        host = self._down(tensor)
        results = [(host, tensor)] if self.rank == root else []
        return self._run(lambda: self.inner.reduce(host, root, operation, blocking), results, blocking)

    def broadcast(self, tensor: Tensor, root: int, blocking: bool) -> Pending | None:
        """See Transport."""
        host = self._down(tensor) if self.rank == root else self._host(tensor)
        results = [] if self.rank == root else [(host, tensor)]
        return self._run(lambda: self.inner.broadcast(host, root, blocking), results, blocking)

    def all_gather(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int] | None, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        source, target = self._down(tensor), self._host(output)
        return self._run(
            lambda: self.inner.all_gather(source, target, counts, blocking), [(target, output)], blocking
        )

    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor,
        counts: Sequence[int] | None,
        operation: Operation,
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        source, target = self._down(tensor), self._host(output)
        return self._run(
            lambda: self.inner.reduce_scatter(source, target, counts, operation, blocking),
            [(target, output)],
            blocking,
        )

    def gather(
        self, tensor: Tensor, output: Tensor | None, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        source = self._down(tensor)
        target = None if output is None else self._host(output)
        results = [] if target is None or output is None else [(target, output)]
        return self._run(lambda: self.inner.gather(source, target, counts, root, blocking), results, blocking)

    def scatter(
        self, tensor: Tensor | None, output: Tensor, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        source = None if tensor is None else self._down(tensor)
        target = self._host(output)
        return self._run(
            lambda: self.inner.scatter(source, target, counts, root, blocking), [(target, output)], blocking
        )

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        source, target = self._down(tensor), self._host(output)
        return self._run(
            lambda: self.inner.all_to_all(source, target, send_counts, receive_counts, blocking),
            [(target, output)],
            blocking,
        )

    def send(self, tensor: Tensor, destination: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        host = self._down(tensor)
        return self._run(lambda: self.inner.send(host, destination, tag, blocking), [], blocking)

    def recv(self, tensor: Tensor, source: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        host = self._host(tensor)
        return self._run(lambda: self.inner.recv(host, source, tag, blocking), [(host, tensor)], blocking)

    def barrier(self, blocking: bool) -> Pending | None:
        """See Transport."""
        return self.inner.barrier(blocking)
