"""Differences between CPUs and GPUs other than kernels: choice of a device, memory, streams, and names."""

from __future__ import annotations

import os
import platform
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.host.memory import keep_freed_memory, peak_rss_bytes, resident_bytes

GPU_KINDS = "cuda", "xpu"
"""torch's types of GPUs: "cuda" for those of NVIDIA (CUDA) and AMD (ROCm), "xpu" for those of Intel."""

GPU_SELECTORS = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Environment variable by which a process selects among the GPUs of each type."""

_CUBLAS_WORKSPACE, _CUBLAS_BYTES = ":4096:8", 8 * 4096 << 10
"""Workspace of cuBLAS for its environment variable, which torch requires for determinism; in bytes."""


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


def choose_device(name: str, local_rank: int, gpus: VisibleGpus) -> torch.device:
    """Return the device of a rank, without selecting it. Local.

    Args:
        name: "cpu"; one of GPU_KINDS, which gives the GPUs of the node to its ranks in turn, so that ranks
            share GPUs if there are fewer of them; "auto", which uses GPUs if there are any, otherwise the
            CPU; or "cuda:N" or "xpu:N", the same GPU for all ranks, which decks cannot name.
        local_rank: Number of the rank among the ranks of its node.
        gpus: GPUs that this process sees.

    Raises:
        HpctrainError: The name is none of these, or there is no such GPU.
    """
    if name == "cpu" or (name == "auto" and not gpus.number):
        return torch.device("cpu")
    kind, colon, index = (gpus.kind if name == "auto" else name).partition(":")
    wrong = f'run.device = "{name}": '
    if kind not in GPU_KINDS or (colon and not index.isdecimal()):
        raise HpctrainError(f'{wrong}must be "auto", "cpu", "cuda", "xpu", "cuda:N" or "xpu:N"')
    if not gpus.number:
        raise HpctrainError(f'{wrong}torch finds no GPU here; use "cpu" or "auto"')
    if kind != gpus.kind:
        raise HpctrainError(f'{wrong}the GPUs that torch finds here are "{gpus.kind}"; use that, or "auto"')
    if colon and int(index) >= gpus.number:
        raise HpctrainError(f"{wrong}there are {gpus.number} GPUs, numbered from 0")
    return torch.device(kind, int(index) if colon else local_rank % gpus.number)


def device_of_run(name: str, local_rank: int) -> torch.device:
    """Return the device on which a rank of a run computes, without selecting it. Local.

    Args:
        name: Name of the device, as `choose_device` takes it.
        local_rank: Number of the rank among the ranks of its node.

    Raises:
        HpctrainError: The name is wrong, there is no such GPU, or torch cannot use the GPUs of this node.
    """
    reason = "" if name == "cpu" else unusable_gpus()
    if reason:
        raise HpctrainError(f'run.device = "{name}": {reason}, or use "cpu" to compute on the CPU')
    return choose_device(name, local_rank, visible_gpus())


_HIDING_VARIABLES = {
    "nvidia[0-9]*": ("CUDA_VISIBLE_DEVICES",),
    "kfd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
"""Device files of NVIDIA's and AMD's GPUs, and the environment variables that select among these GPUs."""

_FIRST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""First NVIDIA driver for each major version of CUDA."""


def unusable_gpus(devices: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return why torch cannot use the GPUs that this process may open, with a remedy; "" without such GPUs.

    GPUs that a batch system has not given to the job do not count. Unusable GPUs of Intel are not found:
    their device files are those of graphics that are part of a processor.

    Args:
        devices: Folder of device files.
        driver: File in which NVIDIA's driver shows its version.
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
        return _amd_problem() if files == "kfd" else _nvidia_problem(driver)
    return ""


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

    Segments grow instead of being allocated beside each other, so that few bytes between tensors are lost.
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
    known = True
    for setting in _ALLOCATOR_SETTINGS:
        try:
            configure(setting)
        except (RuntimeError, ValueError):
            known = False
    return known


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
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
            # Streams that share a connection delay each other.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait on the host until all work of all streams of a GPU is complete; do nothing on a CPU."""
    if not on_host(device):
        torch.accelerator.synchronize(device)


def _module(device: torch.device | None = None) -> Any:
    """Return torch's module for a GPU, such as torch.cuda; by default for the GPUs that this process uses."""
    return torch.get_device_module(device)


def gpu_name(device: torch.device) -> str | None:
    """Return the product name of a GPU, such as "NVIDIA H100"; None for a CPU."""
    return None if on_host(device) else _module(device).get_device_name(device)


def gpu_identity(device: torch.device) -> str | None:
    """Return the UUID of a GPU, by which ranks find out whether they share it; None for a CPU."""
    if on_host(device):
        return None
    uuid = _module(device).get_device_properties(device).uuid
    return uuid.hex() if isinstance(uuid, bytes) else str(uuid)


def matmul_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps on a GPU for matrix products; 0 on other devices.

    It counts the thread of the forward pass and that of the backward pass.
    """
    return 2 * _CUBLAS_BYTES if device.type == "cuda" else 0


def used_bytes(device: torch.device) -> int:
    """Return the memory that this process uses, in bytes.

    On a CPU this is its resident memory, on a GPU the memory of its tensors, without what torch keeps unused.
    """
    return resident_bytes() if on_host(device) else int(_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the peak of `used_bytes` since the process started, or on a GPU since the last `reset_peak`."""
    return peak_rss_bytes() if on_host(device) else int(_module(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Reset `peak_bytes` of a GPU, and release its unused memory to other processes; do nothing on a CPU."""
    if not on_host(device):
        _module(device).empty_cache()
        _module(device).reset_peak_memory_stats(device)


def available_bytes_of_gpu(device: torch.device) -> int:
    """Return the bytes that tensors of this process can have on a GPU now, those that they have included.

    The rest belongs to CUDA, to libraries such as NCCL, to other processes, and to their tensors.
    """
    return free_gpu_bytes(device) + int(_module(device).memory_reserved(device))


def runtime_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that no tensors of this process have, for CUDA and libraries; 0 on a CPU.

    What other processes have on the GPU is included.
    """
    if on_host(device):
        return 0
    _, total = _module(device).mem_get_info(device)
    return int(total) - available_bytes_of_gpu(device)


def fragmented_bytes(device: torch.device) -> int:
    """Return the most bytes of a GPU that torch has had beside its tensors' peak; 0 on a CPU."""
    return 0 if on_host(device) else int(_module(device).max_memory_reserved(device)) - peak_bytes(device)


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the size of a GPU's whole memory in bytes, used or not.

    Returns:
        The size; None if this process sees no GPU of this type.
    """
    if visible_gpus().kind != device.type:
        return None
    return int(_module(device).get_device_properties(device).total_memory)


def free_gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that no process uses, in bytes."""
    return int(_module(device).mem_get_info(device)[0])


def empty_host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in host memory, pinned if it is copied from or to a GPU `device`.

    For the meta device of a plan it is not pinned, and the system gives it no memory before it is written.
    torch keeps pinned memory for later tensors, but not before the copies that use it are complete.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type not in {"cpu", "meta"})


def start_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied by the device's current stream while the host goes on.

    A tensor that is there is returned itself. A copy from the host to a GPU is made from pinned memory, since
    the host would wait for a copy from other memory. Its source may be changed or dropped at once.
    """
    if tensor.is_cpu and device.type not in {"cpu", "meta"}:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def synchronize_stream(device: torch.device) -> None:
    """Wait on the host until the work of the current stream of a GPU is complete; do nothing on a CPU."""
    if not on_host(device):
        _module(device).current_stream(device).synchronize()


class StreamWork:
    """Work that was started on a SideStream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the stream that is current now wait for the work.

        The host does not wait; `synchronize` makes it do so.
        """
        _module().current_stream().wait_event(self._event)

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
        memory.record_stream(_module().current_stream())
        return memory


class SideStream:
    """GPU stream beside the stream that computes. It is made when it is first used."""

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
        stream.wait_stream(_module().current_stream())
        with _module().stream(stream):
            action()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        return StreamWork(stream.record_event())

    def follow(self) -> None:
        """Let work that is started here from now on begin after all work that the current stream has."""
        self._make().wait_stream(_module().current_stream())

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
        with _module().stream(stream):
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
        with _module().stream(stream):
            memory = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
        return memory, StreamWork(stream.record_event())

    def precede(self) -> None:
        """Make the current stream wait for all work that was started on this stream so far, if any."""
        if self._stream is not None:
            _module().current_stream().wait_stream(self._stream)

    def _make(self) -> Any:
        if self._stream is None:
            self._stream = _module().Stream()
        return self._stream


_LIMITS = "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"
"""Environment variables that prevent libraries from using some instructions."""


def processor_name() -> str:
    """Return the product name of the processor, or its architecture if the name is unknown."""
    return _first_core().get("model name") or platform.processor() or platform.machine()


def processor_identity(threads: int | None = None) -> str:
    """Return a text that identifies what determines the speed of matrix products on this processor.

    It names the processor (whose name a hypervisor may hide), its features, limits on instructions set by
    environment variables, threads, and the version of torch.

    Args:
        threads: Number of threads; by default the current number.
    """
    core = _first_core()
    model = f"family {core.get('cpu family', '?')} model {core.get('model', '?')}"
    flags = f"flags {zlib.crc32(core.get('flags', '').encode()):08x}"
    limits = (f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name))
    here = processor_name(), model, flags, *limits, f"threads {threads or torch.get_num_threads()}"
    return ", ".join((*here, f"torch {torch.__version__}"))


def _first_core() -> dict[str, str]:
    """Return what Linux tells about the first core, by name; empty on other systems."""
    with (
        suppress(OSError),
        Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines,
    ):
        rows = (line.partition(":") for line in takewhile(str.strip, lines))
        return {name.strip(): value.strip() for name, _, value in rows}
    return {}
