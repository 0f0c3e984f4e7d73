"""The install script says what is missing, and stops, where it may not install it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "containers" / "install.sh"
TOOLS = (
    "bash basename cat cc cksum cut dirname gcc grep head id ldd mktemp realpath rm sed sort tail uname wc"
)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the usual programs, but no MPI and no HDF5."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS.split():
        path = shutil.which(name)
        if path is not None:
            (folder / name).symlink_to(path)
    return folder


def install(tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(tools), "HOME": os.environ.get("HOME", "/"), "FETCH": "no"}
    environment |= {"VENV": str(tools.parent / "venv"), "PYTHON": sys.executable}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def give_compiler(tools: Path) -> None:
    """The MPI compiler of this machine, under its plain name."""
    path = shutil.which("mpicc")
    if path is None:
        pytest.skip("no mpicc in the PATH")
    write_program(tools / "mpicc", f'#!/bin/bash\nPATH={os.environ["PATH"]} exec {path} "$@"\n')


def test_without_mpi_it_names_what_to_load(tools: Path) -> None:
    done = install(tools)
    assert done.returncode == 1
    assert "no mpicc in the PATH" in done.stderr
    assert "module load" in done.stderr
    assert "apt-get install openmpi-bin libopenmpi-dev" in done.stderr
    assert not (tools.parent / "venv").exists()


def test_an_unknown_mpi_is_refused(tools: Path) -> None:
    done = install(tools, MPI="lam")
    assert done.returncode == 1
    assert "must be openmpi, mpich or empty" in done.stderr


def test_an_old_python_is_refused(tools: Path) -> None:
    write_program(tools / "python2", "#!/bin/bash\nexit 1\n")
    done = install(tools, PYTHON="python2")
    assert done.returncode == 1
    assert "PYTHON=python2: must be Python 3.10 or newer" in done.stderr


def test_an_hdf5_that_is_not_parallel_is_refused(tools: Path, tmp_path: Path) -> None:
    give_compiler(tools)
    (tmp_path / "hdf5" / "include").mkdir(parents=True)
    (tmp_path / "hdf5" / "include" / "hdf5.h").write_text(
        '#define H5_VERS_INFO "HDF5 library version: 1.14.3"\n'
    )
    (tmp_path / "hdf5" / "lib").mkdir()
    (tmp_path / "hdf5" / "lib" / "libhdf5.so").touch()
    done = install(tools, HDF5_DIR=str(tmp_path / "hdf5"))
    assert done.returncode == 1
    assert "is not parallel" in done.stderr


def test_a_wrong_hdf5_dir_is_told(tools: Path, tmp_path: Path) -> None:
    give_compiler(tools)
    done = install(tools, HDF5_DIR=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert f"HDF5_DIR={tmp_path / 'nowhere'}: no hdf5.h and libhdf5 there" in done.stderr
