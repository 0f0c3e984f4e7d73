"""Tests of containers/bundle.py and bundle-install.sh, without making a bundle."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CONTAINERS = Path(__file__).resolve().parent.parent / "containers"


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    """Return the program as a module."""
    specification = importlib.util.spec_from_file_location("bundle", CONTAINERS / "bundle.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_wheels_are_those_that_hpctrain_needs(bundle: ModuleType) -> None:
    """Without torch they are neither torch nor what torch alone needs."""
    without, everything = (set(bundle.requirements("hpctrain", each)) for each in (False, True))
    assert {"numpy", "h5py", "mpi4py", "pydantic-core", "huggingface-hub", "jinja2"} <= without
    assert {"torch", "sympy"} <= everything - without
    assert not {"pytest", "tensorboard", "torch", "sympy", "networkx"} & without


def test_libraries_of_the_system_stay_out(bundle: ModuleType) -> None:
    loaded = {library.name for library in bundle.libraries([sys.executable, "/bin/ls"])}
    assert not {name for name in loaded if name.startswith(("libc.so", "libm.so", "libstdc++", "ld-linux"))}
    h5py = importlib.util.find_spec("h5py")
    assert h5py is not None and h5py.origin is not None
    names = [library.name for library in bundle.libraries(Path(h5py.origin).parent.glob("*.so"))]
    assert any(name.startswith("libhdf5") for name in names)
    assert all(library.exists() for library in bundle.libraries([sys.executable]))


def test_a_wheel_without_compression_has_the_same_files(bundle: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("a.py", "x = 1\n" * 1000)
    size = wheel.stat().st_size
    bundle.store(wheel)
    with zipfile.ZipFile(wheel) as files:
        assert files.read("a.py") == b"x = 1\n" * 1000
    assert wheel.stat().st_size > 6000 > size
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_the_newest_glibc_that_is_needed(bundle: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.so").write_bytes(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.4\0")
    (tmp_path / "b").write_bytes(b"GLIBC_2.28\0")
    assert bundle.needed_glibc(tmp_path) == "2.34"


def install(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run install.sh of a bundle that has nothing but its settings."""
    settings = {
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "glibc": "2.17",
        "mpi_library": "libmpi.so.40",
        "torch": "machine",
    }
    keys = {key: variables.pop(key, value) for key, value in settings.items()}
    (folder / "settings").write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
    shutil.copy(CONTAINERS / "bundle-install.sh", folder / "install.sh")
    environment = {"PATH": os.defpath, "VENV": str(folder / "venv"), "PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", folder / "install.sh"], env=environment, capture_output=True, text=True, timeout=60
    )


def test_another_machine_is_refused(tmp_path: Path) -> None:
    assert "this bundle is for riscv64, and this machine is " in install(tmp_path, machine="riscv64").stderr
    done = install(tmp_path, glibc="2.99")
    assert "this bundle needs glibc 2.99, and this machine has glibc 2." in done.stderr
    assert not (tmp_path / "venv").exists()


def test_another_python_is_refused(tmp_path: Path) -> None:
    done = install(tmp_path, python_version="3.99")
    assert done.returncode == 1
    assert f"no Python 3.99 with torch by the name of {sys.executable}: name one by PYTHON=" in done.stderr


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert f"with torch by the name of {python}: name one" in install(tmp_path, PYTHON=str(python)).stderr


def test_a_folder_with_other_files_stays(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").touch()
    assert "holds something, and no virtual environment" in install(tmp_path).stderr
    assert (tmp_path / "venv" / "thesis.tex").exists()
