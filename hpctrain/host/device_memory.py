"""Memory of a device: size, use and peak, on CPUs and GPUs."""

from __future__ import annotations

import torch

from hpctrain.host.device import CUBLAS_BYTES, gpu_module, on_host, visible_gpus
from hpctrain.host.memory import peak_rss_bytes, resident_bytes


def matmul_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps on a GPU for matrix products; 0 on other devices.

    It counts the thread of the forward pass and that of the backward pass.
    """
    return 2 * CUBLAS_BYTES if device.type == "cuda" else 0


def used_bytes(device: torch.device) -> int:
    """Return the memory that this process uses, in bytes.

    On a CPU this is its resident memory, on a GPU the memory of its tensors, without what torch keeps unused.
    """
    return resident_bytes() if on_host(device) else int(gpu_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the peak of `used_bytes` since the process started, or on a GPU since the last `reset_peak`."""
    return peak_rss_bytes() if on_host(device) else int(gpu_module(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Reset `peak_bytes` of a GPU, and release its unused memory to other processes; do nothing on a CPU."""
    if not on_host(device):
        gpu_module(device).empty_cache()
        gpu_module(device).reset_peak_memory_stats(device)


def available_bytes_of_gpu(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors of this process use or could allocate now.

    All other memory of the GPU is used by CUDA, by libraries such as NCCL, or by other processes.
    """
    return free_gpu_bytes(device) + int(gpu_module(device).memory_reserved(device))


def runtime_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors of this process cannot use; 0 on a CPU.

    They are used by CUDA, by libraries such as NCCL, or by other processes.
    """
    if on_host(device):
        return 0
    _, total = gpu_module(device).mem_get_info(device)
    return int(total) - available_bytes_of_gpu(device)


def fragmented_bytes(device: torch.device) -> int:
    """Return the peak of torch's reserved memory on a GPU minus the peak of its tensors; 0 on a CPU."""
    return 0 if on_host(device) else int(gpu_module(device).max_memory_reserved(device)) - peak_bytes(device)


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the size of a GPU's whole memory in bytes, used or not.

    Returns:
        The size; None if this process sees no GPU of this type.
    """
    if visible_gpus().kind != device.type:
        return None
    return int(gpu_module(device).get_device_properties(device).total_memory)


def free_gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that no process uses, in bytes."""
    return int(gpu_module(device).mem_get_info(device)[0])
