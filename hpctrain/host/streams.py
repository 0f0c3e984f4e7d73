"""Copies between host and GPU, and GPU streams in addition to the stream that computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.host.device import gpu_module, on_host


def empty_host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in host memory, pinned if it is copied from or to a GPU `device`.

    For the meta device of a plan it is not pinned, and the system gives it no memory before it is written.
    torch keeps pinned memory for later tensors, but not before the copies that use it are complete.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type not in {"cpu", "meta"})


def start_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied by the device's current stream while the host goes on.

    A tensor that is already on the device is returned itself. The host would wait for a copy from memory that
    is not pinned, so a tensor in host memory is first copied to pinned memory. It may be changed at once.
    """
    if tensor.is_cpu and device.type not in {"cpu", "meta"}:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def synchronize_stream(device: torch.device) -> None:
    """Wait on the host until the work of the current stream of a GPU is complete; do nothing on a CPU."""
    if not on_host(device):
        gpu_module(device).current_stream(device).synchronize()


class StreamWork:
    """Work that was started on a SideStream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the stream that is current now wait for the work.

        The host does not wait; `synchronize` makes it do so.
        """
        gpu_module().current_stream().wait_event(self._event)

    def test(self) -> bool:
        """Return True if the GPU has completed the work. It does not wait."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait on the host until the work is complete."""
        self._event.synchronize()

    def deliver(self, memory: Tensor) -> Tensor:
        """Make the current stream wait for the work, and return `memory`, which that stream may then use.

        Args:
            memory: Tensor that `SideStream.copy_to_device` has returned together with this handle.
        """
        self.wait()
        memory.record_stream(gpu_module().current_stream())
        return memory


class SideStream:
    """GPU stream in addition to the stream that computes. It is made when it is first used."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, action: Callable[[], object], tensors: Sequence[Tensor | None]) -> StreamWork:
        """Call `action` at once on this stream, and return a handle of the GPU work that it starts.

        The work begins after all work that the current stream has been given before. The host does not wait
        for it, and the current stream does so only in `wait` of the handle.

        Args:
            action: Function that starts GPU work.
            tensors: GPU tensors that the work uses, whose memory is not reused before; None entries are
                skipped.
        """
        stream = self._make()
        stream.wait_stream(gpu_module().current_stream())
        with gpu_module().stream(stream):
            action()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        return StreamWork(stream.record_event())

    def follow(self) -> None:
        """Make later work of this stream wait for all work that the current stream has now."""
        self._make().wait_stream(gpu_module().current_stream())

    def copy_to_host(self, memory: Tensor, host: Tensor) -> StreamWork:
        """Start to copy a GPU tensor to the host, without waiting for earlier work of the current stream.

        Any thread may call it after `follow`.

        Args:
            memory: GPU tensor of any strides. The caller keeps it alive and unchanged until the copy is
                complete.
            host: Pinned tensor of the same shape and dtype.

        Returns:
            Handle of the copy. On a GPU of NVIDIA or AMD, a thread that waits for it sleeps.
        """
        stream = self._make()
        with gpu_module().stream(stream):
            host.copy_(memory, non_blocking=True)
        # Only events of CUDA let a thread sleep.
        event = torch.cuda.Event(blocking=True) if memory.is_cuda else None  # type: ignore[no-untyped-call, unused-ignore]
        return StreamWork(stream.record_event(event))

    def copy_to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, StreamWork]:
        """Start to copy a host tensor to the GPU, without waiting for earlier work of the current stream.

        Args:
            host: Host tensor, best pinned; it must not change until the copy is complete.
            device: The GPU.

        Returns:
            New GPU tensor of the same shape and dtype, and the handle of the copy. Pass the tensor to
            `deliver` of the handle before use.
        """
        stream = self._make()
        with gpu_module().stream(stream):
            memory = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        return memory, StreamWork(stream.record_event())

    def precede(self) -> None:
        """Make the current stream wait for all work that was started on this stream so far, if any."""
        if self._stream is not None:
            gpu_module().current_stream().wait_stream(self._stream)

    def _make(self) -> Any:
        if self._stream is None:
            self._stream = gpu_module().Stream()
        return self._stream
