"""Transport of GPU tensors over MPI, by copies in pinned host memory.

It is used if ranks share a GPU, or if there is no NCCL. MPI never sees device memory: a CUDA-aware MPI beside
NCCL can deadlock.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.transport import Steps, Transport, TransportWork, run_steps
from hpctrain.host.device import empty_host_tensor, synchronize_stream


class StagedTransport(Transport):
    """Calls of the host transport `inner` on tensors of a GPU.

    A call waits until its input is on the host. Results are copied back in the order of the current stream.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    @override
    def run(self, call: Call) -> TransportWork | None:
        return run_steps(self._steps(call), call.blocking)

    def _steps(self, call: Call) -> Steps:
        tensor, output = call.tensor, call.output
        source = target = None
        if tensor is not None:
            source = _empty_on_host(tensor).copy_(tensor.detach(), non_blocking=True)
            synchronize_stream(tensor.device)
        if output is not None:
            target = source if output is tensor else _empty_on_host(output)
        yield self.inner.run(call.with_memory(source, target))
        if output is not None and target is not None:
            output.detach().copy_(target, non_blocking=True)


def _empty_on_host(tensor: Tensor) -> Tensor:
    return empty_host_tensor(tensor.shape, tensor.dtype, tensor.device)
