"""`make bundle`: pack hpctrain and all that it needs into one archive, for a machine without network.

Run it with the Python of an environment that `make install` has made. The archive has the wheels, Open MPI
and HDF5 as far as the wheels need them, a token file, a deck, the program of `make gpu-test` and `install.sh`
(bundle-install.sh). Libraries find each other by paths relative to themselves, which patchelf writes, so that
the environment on the other machine may lie anywhere. Open MPI's parts for fast networks stay out: they need
the drivers of the machine.
"""

# ruff: noqa: INP001

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "containers" / "constraints.txt"
NAME = "hpctrain-bundle"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

OF_THE_SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|util|pthread|resolv|stdc\+\+|gcc_s|nsl))\.so")
"""Libraries that every machine has, and that must be its own."""
OF_MPI = re.compile(r"lib(mpi|open-|mca_|pmix|hwloc|event|udev|munge)")
"""Libraries of Open MPI and of its parts."""
OF_NETWORKS = re.compile(r"lib(ucp|uct|fabric|psm|psm2|infinipath|ibverbs|rdmacm|oshmem)\.so")
"""Libraries that need drivers of a network, and a further interface of Open MPI."""


def requirements(name: str, with_torch: bool, extras: Iterable[str] = ()) -> dict[str, str]:
    """Return the installed versions of a distribution and of all that it needs, by name.

    Args:
        name: Name of the distribution.
        with_torch: False to leave out torch, and what only torch needs.
        extras: Extras of the distribution.
    """
    versions, queue = dict[str, str](), [(name, frozenset(extras))]
    seen = {*queue}
    for each, wanted in queue:
        found = distribution(each)
        versions[each] = found.version
        for line in found.requires or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in wanted or {""}]
            if requirement.marker and not any(map(requirement.marker.evaluate, environments)):
                continue
            entry = (re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras))
            if entry not in seen and (with_torch or entry[0] != "torch"):
                seen.add(entry)
                queue.append(entry)
    return versions


def libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the libraries that programs and libraries load, by the names that they are loaded by."""
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    for name, path in sorted(set(re.findall(r"^\s+(\S+) => (/\S+) ", output, re.MULTILINE))):
        if not OF_THE_SYSTEM.match(name):
            yield Path(path).parent / name


def copy_libraries(files: Iterable[Path], folder: Path, rpath: str) -> None:
    """Copy files into a folder, each as one file and not as a link, with a path on which they find others."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        target = folder / file.name
        shutil.copyfile(file, target)
        target.chmod(0o755)
        set_rpath([target], rpath)


def set_rpath(files: Iterable[Path], rpath: str) -> None:
    """Set the path, before all others, on which programs and libraries look for libraries."""
    subprocess.run(["patchelf", "--force-rpath", "--set-rpath", rpath, *map(str, files)], check=True)


def copy_open_mpi(modules: Iterable[Path], launcher: Path, folder: Path) -> None:
    """Copy Open MPI: programs, libraries, plug-ins and texts.

    Args:
        modules: Modules of mpi4py.
        launcher: Its mpirun.
        folder: Folder that becomes its prefix.
    """
    info = launcher.with_name(launcher.name.replace("mpirun", "ompi_info"))
    output = subprocess.run(
        [info if info.exists() else "ompi_info", "--parsable", "--path", "all"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = {name: Path(path) for _, name, path in (line.split(":", 2) for line in output.splitlines())}
    programs = [paths["bindir"] / name for name in ("orterun", "orted")]
    plugins = [
        plugin
        for plugin in paths["pkglibdir"].glob("*.so")
        if not any(OF_NETWORKS.match(library.name) for library in libraries([plugin]))
    ]
    copy_libraries(programs, folder / "bin", "$ORIGIN/../lib")
    copy_libraries(plugins, folder / "lib" / "openmpi", "$ORIGIN/..")
    copy_libraries(libraries([*modules, *programs, *plugins]), folder / "lib", "$ORIGIN")
    for name, target in (("pkgdatadir", "share"), ("sysconfdir", "etc")):
        shutil.copytree(paths[name], folder / target)


def add_rpath(wheel: Path, folder: Path) -> list[Path]:
    """Unpack a wheel, let its modules find HDF5 and MPI in an environment, and pack it again.

    Returns:
        The modules.
    """
    unpacked = folder / wheel.name.split("-")[0]
    wheel_tool = sys.executable, "-m", "wheel"
    subprocess.run([*wheel_tool, "unpack", "-d", unpacked, wheel], check=True, stdout=subprocess.DEVNULL)
    (tree,) = unpacked.iterdir()
    modules = list(tree.rglob("*.so"))
    for module in modules:
        up = "/".join([".."] * (len(module.relative_to(tree).parts) + 2))
        set_rpath([module], f"$ORIGIN/{up}/runtime/hdf5:$ORIGIN/{up}/runtime/mpi/lib")
    wheel.unlink()
    subprocess.run([*wheel_tool, "pack", "-d", wheel.parent, tree], check=True, stdout=subprocess.DEVNULL)
    return modules


def needed_glibc(folder: Path) -> str:
    """Return the newest version of glibc that the binaries in a folder may ask for."""
    versions = {
        int(minor)
        for path in folder.rglob("*")
        if path.is_file()
        for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())
    }
    return f"2.{max(versions, default=17)}"


def store(wheel: Path) -> None:
    """Write a wheel again without compression, so that the archive compresses all of them together."""
    plain = wheel.with_suffix(".plain")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            entry.compress_type, data = zipfile.ZIP_STORED, old.read(entry)
            new.writestr(entry, data)
    plain.replace(wheel)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; SystemExit with its last lines if it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        lines = "\n".join(done.stdout.splitlines()[-25:])
        sys.exit(f"bundle: {' '.join(map(str, command))}: exit code {done.returncode}\n{lines}")


def collect_wheels(folder: Path, with_torch: bool) -> None:
    """Put the wheels of hpctrain and of all that it needs into a folder."""
    versions = requirements("hpctrain", with_torch) | {"pip": distribution("pip").version}
    del versions["hpctrain"]
    built_with = Path(sys.prefix, "hpctrain.wheels").read_text(encoding="utf-8").strip()
    for name in ("h5py", "mpi4py"):
        found = list(Path(built_with).glob(f"{name}-{versions.pop(name)}-*.whl"))
        if not found:
            sys.exit(f"bundle: {built_with} has no {name}: remove {sys.prefix} and run make install")
        shutil.copy(found[0], folder)
    local = versions.get("torch", "").partition("+")[2]
    index = ["--extra-index-url", f"https://download.pytorch.org/whl/{local}"] if local else []
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    run(*PIP, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, *index, *pinned)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # modules of earlier versions
    run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)


def main() -> None:
    """Make build/hpctrain-bundle-*.tar.xz."""
    with_torch = os.environ.get("TORCH", "no") == "yes"
    python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", os.uname().machine
    archive = ROOT / "build" / f"{NAME}-py{python}{'-torch' if with_torch else ''}-{machine}.tar.xz"
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work, bundle = Path(temporary), Path(temporary, NAME)
        wheels = bundle / "wheels"
        wheels.mkdir(parents=True)
        print("bundle: wheels", flush=True)
        collect_wheels(wheels, with_torch)
        tools = work / "tools"
        run(*PIP, "install", "-q", "-c", CONSTRAINTS, "--target", tools, "patchelf")
        os.environ["PATH"] = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
        print("bundle: MPI and HDF5", flush=True)
        mpi = copy_runtime(wheels, bundle / "runtime", work)
        print("bundle: token file and programs", flush=True)
        hpctrain, texts = Path(sys.prefix, "bin", "hpctrain"), work / "texts"
        run(hpctrain, "guide", "--write", texts)
        run(hpctrain, "prepare", bundle / "corpus.h5", texts, "--glob", "*.md", "--train-bpe", "512")
        shutil.copy(ROOT / "inputs" / "quickstart.toml", bundle)
        ignored = shutil.ignore_patterns("test_*", "__pycache__")
        shutil.copytree(ROOT / "tests" / "gpu", bundle / "tests" / "gpu", ignore=ignored)
        shutil.copy(ROOT / "containers" / "bundle-install.sh", bundle / "install.sh")
        settings = {
            "python_version": python,
            "machine": machine,
            "glibc": needed_glibc(work),
            "mpi_library": mpi,
            "torch": "bundle" if with_torch else "machine",
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        (bundle / "settings").write_text(text, encoding="utf-8")
        for wheel in wheels.glob("*.whl"):
            store(wheel)
        print("bundle: compressing", flush=True)
        run("tar", "-C", work, "-I", "xz -T0 -6", "-cf", archive, NAME)
    print(f"bundle: {archive.relative_to(ROOT)}, {archive.stat().st_size / 1e6:.1f} MB")
    print(f"there:  tar xf {archive.name} && ./{NAME}/install.sh")


def copy_runtime(wheels: Path, folder: Path, work: Path) -> str:
    """Copy HDF5 and, if it is Open MPI 4, MPI, and let h5py and mpi4py in a folder of wheels find them.

    Args:
        wheels: Folder of the wheels.
        folder: Folder for the libraries.
        work: Folder for temporary files.

    Returns:
        Name of the MPI library.
    """
    built = sorted((*wheels.glob("h5py-*"), *wheels.glob("mpi4py-*")))
    modules = [module for wheel in built for module in add_rpath(wheel, work)]
    loaded = list(libraries(modules))
    hdf5 = [library for library in loaded if not OF_MPI.match(library.name)]
    copy_libraries(hdf5, folder / "hdf5", "$ORIGIN:$ORIGIN/../mpi/lib")
    mpi = next((library.name for library in loaded if library.name.startswith("libmpi")), "")
    launcher = Path(shutil.which(os.environ["MPIRUN"].split()[0]) or os.environ["MPIRUN"])
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    if re.search(r"\((Open MPI|OpenRTE)\) 4\.", version):
        copy_open_mpi([each for each in modules if each.parent.name == "mpi4py"], launcher, folder / "mpi")
    else:
        print(f"bundle: without MPI, since only Open MPI 4 can be moved; the machine needs {mpi}")
    return mpi


if __name__ == "__main__":
    main()
