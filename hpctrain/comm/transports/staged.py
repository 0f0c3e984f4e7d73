"""Tensors of a GPU over MPI: staged through pinned host memory.

For ranks that share a GPU, and where there is no NCCL. MPI itself never sees device memory: a
CUDA-aware MPI beside NCCL can deadlock.
"""

from __future__ import annotations

from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.device import empty_host_tensor, synchronize_stream
from hpctrain.comm.transports.transport import Steps, Transport, TransportWork, run_steps


class StagedTransport(Transport):
    """Another transport's calls, for tensors of a device."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    def run(self, call: Call) -> TransportWork | None:
        """See Transport. Waits for what is given to be on the host; copies results back in stream order."""
        return run_steps(self._steps(call), call.blocking)

    def _steps(self, call: Call) -> Steps:
        given, received = call.tensor, call.output
        source = target = None
        if given is not None:
            source = _host(given).copy_(given.detach(), non_blocking=True)
            synchronize_stream(given.device)
        if received is not None:
            target = source if received is given else _host(received)
        yield self.inner.run(call.over(source, target))
        if received is not None and target is not None:
            received.detach().copy_(target, non_blocking=True)


def _host(tensor: Tensor) -> Tensor:
    return empty_host_tensor(tensor.shape, tensor.dtype, tensor.device)
