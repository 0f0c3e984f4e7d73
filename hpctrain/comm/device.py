"""What a rank computes on, and how a CPU and a GPU differ besides kernels: waiting, memory, streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.host.memory import keep_freed_memory, peak_rss_bytes, resident_bytes

_CUBLAS_WORKSPACE, _CUBLAS_BYTES = ":4096:8", 8 * 4096 << 10
"""As its environment names it, without which torch refuses to be deterministic; and in bytes."""


def on_host(device: torch.device) -> bool:
    """Whether the device computes in the host's memory, so that nothing lies elsewhere."""
    return device.type == "cpu"


def device_kind(name: str) -> torch.device:
    """The kind of device that run.device names; a choice that a run makes is the host until then."""
    return torch.device("cuda" if name.startswith("cuda") else "cpu")


def gpu_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(name: str, local_rank: int, count: int) -> torch.device:
    """The device of a local rank on a node of `count` GPUs; HpctrainError if it is not there."""
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if name in {"auto", "cuda"} and count > 0:
        return torch.device("cuda", local_rank % count)
    prefix, _, index = name.partition(":")
    if prefix != "cuda" or (index and not index.isdigit()):
        raise HpctrainError(f'run.device = "{name}": must be "auto", "cpu", "cuda" or "cuda:N"')
    if count == 0:
        raise HpctrainError(f'run.device = "{name}": torch finds no GPU here; use "cpu" or "auto"')
    if int(index) >= count:
        raise HpctrainError(f'run.device = "{name}": there are {count} GPUs, numbered from 0')
    return torch.device("cuda", int(index))


def prepare_device(device: torch.device) -> None:
    """Make a GPU the one that this process uses where none is named, by kernels that always add in one order.

    Others would make two runs of one deck differ, and what is computed again differ from what it was. Of a
    CPU, keep the memory that is freed.
    """
    if on_host(device):
        keep_freed_memory()
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a shared one holds others back
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Return when all that was started on the device is done."""
    if not on_host(device):
        torch.cuda.synchronize(device)


def gpu_name(device: torch.device) -> str | None:
    """What kind of GPU it is; None for a CPU."""
    return None if on_host(device) else torch.cuda.get_device_name(device)


def gpu_identity(device: torch.device) -> str | None:
    """What tells this GPU from all others; None for a CPU."""
    return None if on_host(device) else str(torch.cuda.get_device_properties(device).uuid)


def matmul_workspace_bytes(device: torch.device) -> int:
    """What matrix products keep on a GPU: a workspace for each of the threads of forward and of backward."""
    return 0 if on_host(device) else 2 * _CUBLAS_BYTES


def used_bytes(device: torch.device) -> int:
    """What this process holds in the device's memory."""
    return resident_bytes() if on_host(device) else torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held there: resident, or on a GPU of torch's allocator."""
    return peak_rss_bytes() if on_host(device) else torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Let the peak of a GPU begin anew, and give others what this process no longer uses there."""
    if not on_host(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def gpu_memory_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None where this process sees none."""
    return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None


def empty_host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized host memory, pinned where it is to be copied from or to a GPU.

    Torch keeps pinned memory for whoever asks next, and until the copies that use it are done.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=not on_host(device))


def synchronize_stream(device: torch.device) -> None:
    """Return when what the present stream was given, such as copies to the host, is done."""
    if not on_host(device):
        torch.cuda.current_stream(device).synchronize()


def current_stream() -> int:
    """The present stream as libraries of the GPU take it."""
    return torch.cuda.current_stream().cuda_stream


class StreamWork:
    """Work under way on a SideStream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the present stream wait for it."""
        torch.cuda.current_stream().wait_event(self._event)

    def test(self) -> bool:
        """Whether it is complete."""
        return bool(self._event.query())

    def settle(self) -> None:
        """Wait for it on the host."""
        self._event.synchronize()

    def deliver(self, memory: Tensor) -> Tensor:
        """Memory of `SideStream.bring`, for use by what is computed from now on."""
        self.wait()
        memory.record_stream(torch.cuda.current_stream())
        return memory


class SideStream:
    """A stream of the GPU in use beside the one that computes, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, action: Callable[[], object], tensors: Sequence[Tensor | None]) -> StreamWork:
        """Launch there what uses these tensors of the GPU, after all that the present stream was given."""
        stream = self._made()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            action()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        return StreamWork(stream.record_event())

    def bring(self, host: Tensor, device: torch.device) -> tuple[Tensor, StreamWork]:
        """Start to copy host memory to the GPU, without waiting for what the present stream does."""
        stream = self._made()
        with torch.cuda.stream(stream):
            memory = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        return memory, StreamWork(stream.record_event())

    def precede(self) -> None:
        """Make the present stream wait for all that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _made(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        return self._stream
