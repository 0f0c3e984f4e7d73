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
    """Return the bytes that tensors of this process can have on a GPU now, those that they have included.

    The rest belongs to CUDA, to libraries such as NCCL, to other processes, and to their tensors.
    """
    return free_gpu_bytes(device) + int(gpu_module(device).memory_reserved(device))


def runtime_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that no tensors of this process have, for CUDA and libraries; 0 on a CPU.

    What other processes have on the GPU is included.
    """
    if on_host(device):
        return 0
    _, total = gpu_module(device).mem_get_info(device)
    return int(total) - available_bytes_of_gpu(device)


def fragmented_bytes(device: torch.device) -> int:
    """Return the most bytes of a GPU that torch has had beside its tensors' peak; 0 on a CPU."""
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
