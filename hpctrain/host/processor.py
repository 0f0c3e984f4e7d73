"""Name and identity of the processor of this node."""

from __future__ import annotations

import os
import platform
import zlib
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import torch

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
    """Return the fields of the first core in /proc/cpuinfo, by name; empty on other systems."""
    with (
        suppress(OSError),
        Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines,
    ):
        rows = (line.partition(":") for line in takewhile(str.strip, lines))
        return {name.strip(): value.strip() for name, _, value in rows}
    return {}
