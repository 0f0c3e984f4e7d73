"""Text about this machine that a maintainer needs to reproduce a problem, for `hpctrain doctor --report`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from hpctrain.host.launcher import loaded_mpi_libraries
from hpctrain.text import escaped

_PREFIXES = (
    "CUDA_",
    "FI_",
    "HDF5_",
    "HPCTRAIN_",
    "HYDRA_",
    "I_MPI_",
    "KMP_",
    "MKL_",
    "MPICH_",
    "NCCL_",
    "OMP_",
    "OMPI_MCA_",
    "PMIX_MCA_",
    "PYTORCH_",
    "ROMIO_",
    "SLURM_",
    "TORCH_",
    "UCX_",
)
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN", "COOKIE")
_SYSTEM_FILES = ("/etc/os-release", "/proc/meminfo", "/proc/self/cgroup")
_LINES = 12
"""Largest number of lines of each system file in the report."""


def problem_report(findings: str, variables: Mapping[str, str]) -> str:
    """Return the findings of the doctor with packages, libraries, processor and environment variables.

    Variables of MPI, Slurm, OpenMP, NCCL and torch are included, except those whose names suggest a secret.

    Args:
        findings: Text that `hpctrain doctor` prints.
        variables: The environment variables of this process.
    """
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    selected = {
        name: value
        for name, value in variables.items()
        if name.startswith(_PREFIXES) and not any(word in name.upper() for word in _SECRET)
    }
    parts = {
        "Findings": findings.rstrip().splitlines(),
        "System": [platform.platform(), f"Python {platform.python_version()}", *_processor()],
        "MPI libraries": loaded_mpi_libraries() or ["none is loaded"],
        "Packages": sorted(f"{name} {version}" for name, version in packages.items()),
        "Environment variables": sorted(f"{name}={escaped(value)}" for name, value in selected.items()),
        **{path: _head(Path(path)) for path in _SYSTEM_FILES},
    }
    return "\n".join(f"== {title}\n" + "\n".join(lines) + "\n" for title, lines in parts.items())


def _processor() -> list[str]:
    """Return number and name of the processor's cores, and the instructions that it has."""
    lines = [line for line in _head(Path("/proc/cpuinfo"), 40) if line.startswith(("model name", "flags"))]
    return [f"{os.cpu_count()} cores", *dict.fromkeys(lines)]


def _head(path: Path, lines: int = _LINES) -> list[str]:
    """Return the first lines of a file, or one line that says why it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [escaped(line.rstrip("\n"), "\t") for line, _ in zip(file, range(lines), strict=False)]
    except OSError as error:
        return [f"{path}: {error.strerror}"]
