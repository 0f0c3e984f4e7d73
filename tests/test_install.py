"""The install script says what is missing, and stops, where it may not install it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "containers" / "install.sh"
TOOLS = (
    "bash basename cat cc cksum cut dirname env gcc grep head id ldd mkdir mktemp mv nproc realpath rm sed "
    "seq sleep sort tail touch uname wc"
)
# The environment's Python for scripts that install nothing: it notes what pip is told, and pretends to do it.
# Building h5py takes until torch is being installed, and torch until h5py is being built. The torch that is
# installed is built for the GPUs $BUILD.
STAND_IN = """#!/bin/bash
notes={notes}
echo "$*" >>"$notes/told"
meet() {{
    touch "$notes/$1"
    for _ in $(seq 200); do [ ! -e "$notes/$2" ] || return 0; sleep 0.1; done
    exit 9
}}
case "$*" in
    "-m pip --version" | "-m pip download "*) [ "$3" = --version ] ;;
    "-m pip wheel "*)
        case "$*" in *h5py==*) meet h5py torch ;; esac
        {build}
        while [ "$1" != --wheel-dir ]; do shift; done
        mkdir -p "$2" && touch "$2/${{3/==/-}}-py3-none-any.whl" ;;
    "-m pip install --dry-run "*) ;;
    "-m pip install "*" torch") meet torch h5py; echo "$BUILD" >"$notes/build" ;;
    "-m pip install "*) ;;
    "-m pip uninstall "*) rm "$notes/build" ;;
    "-c from torch import version"*) cat "$notes/build" ;;
    *) exec {python} "$@" ;;
esac
"""


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


def install(tools: Path, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(tools), "HOME": os.environ.get("HOME", "/"), "FETCH": "no"}
    environment |= {"VENV": str(tools.parent / "venv"), "PYTHON": sys.executable}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
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
    write_program(tools / "python2", "#!/bin/bash\n[ $1 = --version ]\n")
    done = install(tools, PYTHON="python2")
    assert done.returncode == 1
    assert "PYTHON=python2: must be Python 3.10 or newer" in done.stderr


def test_a_python_that_does_not_start_is_refused(tools: Path) -> None:
    """Such as a program of pyenv whose version is not installed."""
    write_program(tools / "python2", "#!/bin/bash\nexit 127\n")
    done = install(tools, PYTHON="python2")
    assert done.returncode == 1
    assert "PYTHON=python2: the program does not start" in done.stderr


def test_a_version_names_a_python(tools: Path) -> None:
    done = install(tools, PYTHON="3.99")
    assert done.returncode == 1
    assert done.stderr == "install: PYTHON=python3.99: there is no such program in the PATH\n"


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


@pytest.fixture
def environment(tools: Path) -> Callable[[str], Path]:
    """`environment(build)`: a folder for notes, and an environment that runs `build` to build a wheel."""
    give_compiler(tools)
    if not list(Path("/usr/lib").glob("*-linux-gnu/hdf5/openmpi")):
        pytest.skip("no parallel HDF5 where Debian has it")

    def make(build: str) -> Path:
        notes = tools.parent / "notes"
        for folder in (notes, tools.parent / "venv" / "bin"):
            folder.mkdir(parents=True)
        text = STAND_IN.format(notes=notes, build=build, python=sys.executable)
        write_program(tools.parent / "venv" / "bin" / "python", text)
        return notes

    return make


def test_h5py_is_built_while_torch_is_installed(
    tools: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    notes = environment(":")
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"), EXTRAS="test")
    assert done.returncode == 0, done.stderr
    told = (notes / "told").read_text().splitlines()
    assert sum("pip wheel" in line and "h5py==" in line for line in told) == 1
    everything = next(line for line in told if "pip install" in line and "hypothesis" in line)
    assert "h5py" not in everything
    assert "mpi4py" not in everything
    assert "numpy" in everything
    # An extra within an extra is what it wants: no index knows hpctrain.
    assert "pyarrow" in everything
    assert "hpctrain[" not in everything
    assert sum("--force-reinstall" in line for line in told) == 2
    assert told[-2].endswith("-e .[test]")
    kept = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert [name.partition("-")[0] for name in kept] == ["h5py", "mpi4py"]
    # Once more, there is nothing to do.
    (notes / "told").write_text("")
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"), EXTRAS="test")
    assert "is up to date" in done.stdout
    assert "pip" not in (notes / "told").read_text()


def test_a_build_that_fails_ends_it_with_the_last_lines_of_its_log(
    tools: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    environment('case "$*" in *h5py==*) seq 100; echo "hdf5.h is broken" >&2; exit 1 ;; esac')
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "h5py 3." in done.stderr
    assert "did not build; the last lines of" in done.stderr
    assert done.stderr.endswith("99\n100\nhdf5.h is broken\n")
    assert not (tools.parent / "venv" / "hpctrain.stamp").exists()
    assert [path.name for path in (tmp_path / "cache").rglob("h5py.txt")] == ["h5py.txt"]


def test_what_is_built_ends_with_the_script(
    tools: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    """Installing torch fails while h5py is being built, for minutes."""
    notes = environment(f'echo $$ >"{tmp_path}/builder"; sleep 300')
    program = tools.parent / "venv" / "bin" / "python"
    refusing = f'while [ ! -e "{tmp_path}/builder" ]; do sleep 0.1; done; exit 1'
    write_program(program, program.read_text().replace("meet torch h5py", refusing))
    (notes / "torch").touch()
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    builder = int((tmp_path / "builder").read_text())
    until = time.monotonic() + 20
    while Path(f"/proc/{builder}").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not list((tmp_path / "cache").rglob("build.*"))


def test_an_unknown_type_of_gpu_is_refused(tools: Path) -> None:
    done = install(tools, GPU="amd")
    assert done.returncode == 1
    assert done.stderr == "install: GPU=amd: must be cuda, rocm, xpu, no or empty\n"


@pytest.mark.parametrize(
    ("gpu", "index"),
    [
        ("cuda", ""),
        ("rocm", "--extra-index-url https://download.pytorch.org/whl/rocm7.2 "),
        ("xpu", "--extra-index-url https://download.pytorch.org/whl/xpu "),
        ("no", "--extra-index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15 "),
    ],
)
def test_torch_is_built_for_the_gpus_that_are_asked_for(
    gpu: str, index: str, tools: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    """The environment has another build of the same version, which pip would keep."""
    notes = environment(":")
    (notes / "build").write_text("no" if gpu != "no" else "cuda")
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"), EXTRAS="", GPU=gpu, BUILD=gpu)
    assert done.returncode == 0, done.stderr
    told = (notes / "told").read_text().splitlines()
    (torch,) = (line for line in told if line.endswith(" torch") and "--progress-bar" in line)
    assert torch.endswith(f" -c containers/constraints.txt {index}torch")
    assert told.index("-m pip uninstall -qq -y torch") < told.index(torch)


def test_a_torch_for_other_gpus_than_asked_for_is_refused(
    tools: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    environment(":")
    done = install(tools, XDG_CACHE_HOME=str(tmp_path / "cache"), EXTRAS="", GPU="rocm", BUILD="cuda")
    assert done.returncode == 1
    assert "GPU=rocm: pip installed a torch for GPU=cuda; name an index that has one for rocm" in done.stderr
