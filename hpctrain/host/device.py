"""Choice of the device of a rank, the reasons why torch cannot use GPUs, and properties of GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.errors import HpctrainError
from hpctrain.host.memory import keep_freed_memory

GPU_KINDS = "cuda", "xpu"
"""torch's types of GPUs: "cuda" for those of NVIDIA (CUDA) and AMD (ROCm), "xpu" for those of Intel."""

GPU_SELECTORS = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Environment variable by which a process selects among the GPUs of each type."""

CUBLAS_WORKSPACE, CUBLAS_BYTES = ":4096:8", 8 * 4096 << 10
"""Workspace of cuBLAS: value of its environment variable, which torch requires for determinism, and bytes."""


def on_host(device: torch.device) -> bool:
    """Return True for a CPU; False for a GPU or torch's meta device."""
    return device.type == "cpu"


def device_kind(name: str) -> torch.device:
    """Return the type of device of a value of `run.device`: a CPU, or a GPU without a number.

    Nothing is examined.

    Args:
        name: Value of the deck. "auto" gives a CPU; a run that uses GPUs has already replaced it.
    """
    return torch.device("cpu" if name == "auto" else name.partition(":")[0])


class VisibleGpus(NamedTuple):
    """GPUs that torch can use in this process.

    Attributes:
        kind: torch's type of them, one of GPU_KINDS; "" without GPUs.
        number: Number of them.
    """

    kind: str
    number: int


def visible_gpus() -> VisibleGpus:
    """Return the GPUs that torch can use in this process. Local."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in GPU_KINDS:
        return VisibleGpus("", 0)
    return VisibleGpus(accelerator.type, torch.accelerator.device_count())


def describe_setting(setting: str, name: str) -> str:
    """Return a setting with its value, for messages: `run.device = "cpu"`, or `--device cpu` of an option."""
    return f"{setting} {name}" if setting.startswith("--") else f'{setting} = "{name}"'


def choose_device(name: str, local_rank: int, gpus: VisibleGpus, setting: str = "run.device") -> torch.device:
    """Return the device of a rank, without selecting it. Local.

    Args:
        name: "cpu"; one of GPU_KINDS, which gives the GPUs of the node to its ranks in turn, so that ranks
            share GPUs if there are fewer of them; "auto", which uses GPUs if there are any, otherwise the
            CPU; or "cuda:N" or "xpu:N", the same GPU for all ranks, which decks cannot name.
        local_rank: Number of the rank among the ranks of its node.
        gpus: GPUs that this process sees.
        setting: Key of the deck, or option, by which the user gave the name.

    Raises:
        HpctrainError: The name is none of these, or there is no such GPU.
    """
    if name == "cpu" or (name == "auto" and not gpus.number):
        return torch.device("cpu")
    kind, colon, index = (gpus.kind if name == "auto" else name).partition(":")
    wrong = f"{describe_setting(setting, name)}: "
    if kind not in GPU_KINDS or (colon and not index.isdecimal()):
        raise HpctrainError(f'{wrong}must be "auto", "cpu", "cuda", "xpu", "cuda:N" or "xpu:N"')
    if not gpus.number:
        raise HpctrainError(f'{wrong}torch finds no GPU here; use "cpu" or "auto"')
    if kind != gpus.kind:
        raise HpctrainError(f'{wrong}the GPUs that torch finds here are "{gpus.kind}"; use that, or "auto"')
    if colon and int(index) >= gpus.number:
        raise HpctrainError(f"{wrong}there are {gpus.number} GPUs, numbered from 0")
    return torch.device(kind, int(index) if colon else local_rank % gpus.number)


def device_of_run(name: str, local_rank: int, setting: str = "run.device") -> torch.device:
    """Return the device on which a rank of a run computes, without selecting it. Local.

    Args:
        name: Name of the device, as `choose_device` takes it.
        local_rank: Number of the rank among the ranks of its node.
        setting: Key of the deck, or option, by which the user gave the name.

    Raises:
        HpctrainError: The name is wrong, there is no such GPU, or torch cannot use the GPUs of this node.
    """
    reason = "" if name == "cpu" else unusable_gpus()
    if reason:
        problem = f'{describe_setting(setting, name)}: {reason}, or use "cpu" to compute on the CPU'
        raise HpctrainError(problem)
    return choose_device(name, local_rank, visible_gpus(), setting)


_HIDING_VARIABLES = {
    "nvidia[0-9]*": ("CUDA_VISIBLE_DEVICES",),
    "kfd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
"""Device files of NVIDIA's and AMD's GPUs, and the environment variables that select among these GPUs."""

_AMD_DEVICE_HEAPS = {1, 2}
"""Values of `heap_type` for memory of a GPU in the topology of AMD's driver."""

_LEAST_GPU_BYTES = 8 << 30
"""Memory from which a device of AMD counts as a GPU."""

_FIRST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""First NVIDIA driver for each major version of CUDA."""


def unusable_gpus(
    devices: Path = Path("/dev"),
    driver: Path = Path("/proc/driver/nvidia/version"),
    topology: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> str:
    """Return why torch cannot use the GPUs that this process may open, with a remedy; "" without such GPUs.

    GPUs that a batch system has not given to the job do not count. Graphics that are part of a processor do
    not count either. So unusable GPUs of Intel are not found: they have the same device files.

    Args:
        devices: Folder of device files.
        driver: File in which NVIDIA's driver shows its version.
        topology: Folder in which AMD's driver lists its devices and their memory.
    """
    if visible_gpus().number:
        return ""
    for files, variables in _HIDING_VARIABLES.items():
        values = {name: os.environ.get(name, "0") for name in variables}
        if "NoDevFiles" in values.values() or not any(map(_can_open, devices.glob(files))):
            continue
        hiding = [f'{name}="{value}"' for name, value in values.items() if value in {"", "-1"}]
        if hiding:
            return f"{hiding[0]} hides the GPUs of this node; unset it"
        selecting = [f'{name}="{os.environ[name]}"' for name in variables if name in os.environ]
        doubt = f" (if {selecting[0]} names no GPU of this node, unset it)" if selecting else ""
        if files != "kfd":
            return _nvidia_problem(driver) + doubt
        if _has_amd_gpu(topology):
            return _amd_problem() + doubt
    return ""


def _has_amd_gpu(topology: Path) -> bool:
    """Return True unless AMD's driver lists only graphics that are part of a processor."""
    if not topology.is_dir():
        return True
    for bank in topology.glob("*/mem_banks/*/properties"):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in bank.read_text(encoding="utf-8").splitlines())
            values = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            is_own = values.get("heap_type") in _AMD_DEVICE_HEAPS
            if is_own and values.get("size_in_bytes", 0) >= _LEAST_GPU_BYTES:
                return True
    return False


def _nvidia_problem(driver: Path) -> str:
    cuda = torch.version.cuda
    if cuda is None:
        return (
            "this node has NVIDIA GPUs, but this build of torch has no CUDA; install one that has "
            "(`make install GPU=cuda`)"
        )
    version, first = _driver_version(driver), _FIRST_DRIVERS.get(cuda.partition(".")[0], 0)
    if version and int(version.partition(".")[0]) < first:
        return (
            f"the NVIDIA driver {version} of this node is too old for CUDA {cuda} of this torch, which needs "
            f"driver {first} or newer; update it or install a torch for an older CUDA"
        )
    return (
        f"this node has NVIDIA GPUs, but torch cannot use them by CUDA {cuda}; install a "
        "build of torch that suits the driver, whose newest CUDA nvidia-smi shows"
    )


def _driver_version(driver: Path) -> str:
    """Return the version of NVIDIA's driver, such as "535.129.03"; "" if it is not known."""
    with suppress(OSError):
        match = re.search(r"\s(\d+\.[\d.]+)\s", driver.read_text(encoding="utf-8", errors="replace"))
        return match[1] if match else ""
    return ""


def _amd_problem() -> str:
    return (
        "this node has AMD GPUs, but torch cannot use them; install a build of torch with ROCm "
        "(`make install GPU=rocm`)"
    )


def _can_open(path: Path) -> bool:
    """Return True if a device file exists and this process may use it."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


_ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
_ALLOCATOR_SETTINGS = "expandable_segments:True", "pinned_max_round_threshold_mb:1"


def configure_allocator(environment: Mapping[str, str]) -> bool:
    """Set how torch allocates memory of a GPU and pinned memory, before it allocates any. Local.

    Use expandable segments, which reduce fragmentation.
    Pinned memory of more than 1 MiB is not rounded up to a power of two.

    Args:
        environment: Environment variables. If one of torch's variables for this purpose is set, nothing
            happens.

    Returns:
        True if torch has taken all settings. Old versions of torch do not know all of them, and on AMD GPUs
        none is set.
    """
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None or torch.version.hip or any(map(environment.get, _ALLOCATOR_VARIABLES)):
        return False
    all_supported = True
    for setting in _ALLOCATOR_SETTINGS:
        try:
            configure(setting)
        except (RuntimeError, ValueError):
            all_supported = False
    return all_supported


def prepare_device(device: torch.device, deterministic: bool = True) -> None:
    """Prepare this process for computing on a device, by settings that hold for the whole process. Local.

    A GPU becomes the current one. On a CPU freed memory is kept for later allocations.

    Args:
        device: The device.
        deterministic: True for kernels of GPUs that always add in the same order, so that two runs and
            recomputed activations have the same bits; torch refuses operations that have no such kernel.
    """
    if on_host(device):
        keep_freed_memory()
    else:
        if device.type == "cuda":
            configure_allocator(os.environ)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
            # Streams that share a connection delay each other.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait on the host until all work of all streams of a GPU is complete; do nothing on a CPU."""
    if not on_host(device):
        torch.accelerator.synchronize(device)


def gpu_module(device: torch.device | None = None) -> Any:
    """Return torch's module for a GPU, such as torch.cuda; by default for the GPUs that this process uses."""
    return torch.get_device_module(device)


def gpu_name(device: torch.device) -> str | None:
    """Return the product name of a GPU, such as "NVIDIA H100"; None for a CPU."""
    return None if on_host(device) else gpu_module(device).get_device_name(device)


def gpu_identity(device: torch.device) -> str | None:
    """Return the UUID of a GPU, by which ranks find out whether they share it; None for a CPU."""
    if on_host(device):
        return None
    uuid = gpu_module(device).get_device_properties(device).uuid
    return uuid.hex() if isinstance(uuid, bytes) else str(uuid)
