"""What a run would find here: packages, MPI, ranks and nodes, parallel HDF5, GPUs; and what is wrong with it.

Nothing that is missing or broken may end the examine_machine, so whatever is examined is imported on the way.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hpctrain.host.launcher import find_contradictions, launched_rank, launched_size, launcher_name
from hpctrain.host.srun import describe_missing_pmix, loaded_mpi_libraries
from hpctrain.words import ranges

if TYPE_CHECKING:
    from mpi4py import MPI

REINSTALL = "run `make install` in hpctrain's folder, with the same modules loaded as for runs"
SECONDS_UNTIL_HANG = 120.0
PACKAGES = ("click", "matplotlib", "numpy", "pydantic", "rich", "tokenizers")


@dataclass(frozen=True)
class DoctorFinding:
    """One thing examined. A `remedy` says what to do about what is wrong; `fatal`: no run could start."""

    topic: str
    statement: str
    remedy: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank is: its node, by name and by the lowest rank of those that share memory there, as MPI
    tells (Split_type), its number on that node, the cores it may use, the GPUs it sees.
    """

    rank: int
    hostname: str
    node: int
    local_rank: int
    cores: tuple[int, ...]
    gpus: int


@dataclass
class DoctorReport:
    """What all ranks found, the same on all ranks."""

    rank: int = 0
    findings: list[DoctorFinding] = field(default_factory=list)
    ranks: list[RankPlacement] = field(default_factory=list)
    coordinates: list[dict[str, int]] = field(default_factory=list)
    """Of each rank on a deck's mesh, if one was mapped."""
    world: MPI.Intracomm | None = None

    def add(self, findings: list[DoctorFinding]) -> None:
        """Add what each rank has found of its own. Collective."""
        self.findings += _merge(self.world.allgather(findings) if self.world is not None else [findings])

    @property
    def fit(self) -> bool:
        """Whether a run could start."""
        return not any(finding.fatal for finding in self.findings)


@contextmanager
def examine_machine() -> Iterator[DoctorReport]:
    """The DoctorReport, with MPI started on entering (if it can be) and ended on leaving. Collective."""
    python = DoctorFinding("Python", f"{sys.version.split()[0]} ({sys.executable})")
    findings = [python, *_packages()]
    torch, finding = _torch()
    findings.append(finding)
    findings += _gpus(torch)
    mpi, finding = _mpi()
    findings.append(finding)
    if mpi is None:
        findings += [_launcher(None), _hdf5_package()[1], _slurm()]
        yield DoctorReport(launched_rank(os.environ), findings, [_rank_report(0, 0, 0, torch)])
        return
    faulthandler.dump_traceback_later(SECONDS_UNTIL_HANG, exit=True)
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
    ranks = world.allgather(_rank_report(world.rank, node.bcast(world.rank), node.rank, torch))
    node.Free()
    of_nodes = Counter(each.node for each in ranks).values()
    nodes, each = len(of_nodes), ranges(set(of_nodes), ", ")
    layout = f"{world.size} rank{'s' * (world.size != 1)} on {nodes} node{'s' * (nodes != 1)}"
    layout += f", {each} on each" if nodes > 1 else ""
    findings += [_thread_level(mpi), _lost_ranks(), _launcher(world.size)]
    findings.append(DoctorFinding("ranks and nodes", layout))
    findings += _binding(ranks)
    findings += [*_contradictions(ranks[world.rank], nodes), *_hdf5(world, nodes), _slurm()]
    faulthandler.cancel_dump_traceback_later()
    # Under a foreign launcher every process is rank 0 of its own world: then the launcher's number counts.
    rank = world.rank if launched_size(os.environ) == world.size else launched_rank(os.environ)
    yield DoctorReport(rank, _merge(world.allgather(findings)), ranks, world=world)
    sys.stdout.flush()
    world.Barrier()
    mpi.Finalize()


def _merge(ranks: list[list[DoctorFinding]]) -> list[DoctorFinding]:
    """Rank 0's findings, and what is wrong on other ranks only."""
    merged = list(ranks[0])
    known = {(finding.topic, finding.remedy) for finding in merged}
    for rank, findings in enumerate(ranks):
        for finding in findings:
            if finding.remedy and (finding.topic, finding.remedy) not in known:
                known.add((finding.topic, finding.remedy))
                merged.append(replace(finding, statement=f"rank {rank}: {finding.statement}"))
    return merged


def _packages() -> list[DoctorFinding]:
    """One DoctorFinding a required package that is not there, or one with all their versions."""
    versions = {name: _version(name) for name in PACKAGES}
    there = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    missing = [name for name, number in versions.items() if not number]
    return [
        DoctorFinding("packages", there),
        *(DoctorFinding(name, "not installed", REINSTALL, fatal=True) for name in missing),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _torch() -> tuple[ModuleType | None, DoctorFinding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, DoctorFinding("torch", f"cannot be loaded: {error}", REINSTALL, fatal=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    threads = "threads a rank: run.threads of the deck, 1 where it gives none"
    return torch, DoctorFinding("torch", f"{torch.__version__} ({build}), {threads}")


def _gpus(torch: ModuleType | None) -> list[DoctorFinding]:
    count, by_driver = _gpu_count(torch), _driver_gpus()
    if not count and not by_driver:
        return [
            DoctorFinding("GPUs", "none: ranks compute on the CPU"),
            DoctorFinding("NCCL", "not needed without GPUs"),
        ]
    if torch is None or not count:
        remedy = "torch does not see them: check CUDA_VISIBLE_DEVICES and that the driver fits torch's CUDA"
        if torch is not None and not torch.version.cuda:
            remedy = f"torch's CPU build cannot use them: {REINSTALL}, on a node where nvidia-smi works"
        return [DoctorFinding("GPUs", f"{by_driver}, unused", remedy)]
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    findings = [DoctorFinding("GPUs", f"{count} on this node: {', '.join(names)}")]
    library = ".".join(map(str, torch.cuda.nccl.version()))
    bindings = _version("nccl4py")
    if bindings:
        return [*findings, DoctorFinding("NCCL", f"{library} in torch, nccl4py {bindings}")]
    remedy = "ranks talk through host memory; for NCCL: pip install nccl4py"
    return [*findings, DoctorFinding("NCCL", f"{library} in torch, nccl4py not installed", remedy)]


def _gpu_count(torch: ModuleType | None) -> int:
    if torch is None or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.device_count())


def _driver_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _mpi() -> tuple[ModuleType | None, DoctorFinding]:
    """The started MPI, or None and why not."""
    try:
        mpi = import_module("hpctrain.host.mpi_library").MPI
    except (ImportError, RuntimeError, OSError) as error:
        return None, DoctorFinding("MPI", f"mpi4py cannot be loaded: {error}", REINSTALL, fatal=True)
    if not mpi.Is_initialized():
        lost = describe_missing_pmix(os.environ, mpi.get_vendor()[0], loaded_mpi_libraries())
        if lost:
            what, _, remedy = lost.partition(": ")
            return None, DoctorFinding("MPI", what, remedy, fatal=True)
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    library = mpi.Get_library_version().splitlines()[0].strip().rstrip("\0").split(", package")[0]
    standard = ".".join(map(str, mpi.Get_version()))
    return mpi, DoctorFinding("MPI", f"{library}; MPI {standard}; mpi4py {_version('mpi4py')}")


def _thread_level(mpi: ModuleType) -> DoctorFinding:
    names = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    level = mpi.Query_thread()
    remedy = "this MPI was built without support for threads; use another build of it"
    return DoctorFinding("thread level", names[level], "" if level >= mpi.THREAD_SERIALIZED else remedy)


def _lost_ranks() -> DoctorFinding:
    """Whether this MPI can go on without ranks that are lost (ULFM), which a run does without."""
    known = any(hasattr(ctypes.CDLL(library), "MPIX_Comm_shrink") for library in loaded_mpi_libraries())
    way = "a lost rank ends the job, and `hpctrain resume` goes on with the replicas that are left"
    return DoctorFinding(
        "lost ranks", f"this MPI {'has' if known else 'lacks'} ULFM, which runs do without: {way}"
    )


def _launcher(size: int | None) -> DoctorFinding:
    """`size` is the world's, None without MPI."""
    name = launcher_name(os.environ)
    started = launched_size(os.environ)
    if size is None or size == started:
        return DoctorFinding("launcher", f"{name}, {started} processes" if started > 1 else name)
    remedy = (
        "the launcher and mpi4py belong to different MPIs: use the mpirun of the MPI above, or srun with the "
        "--mpi that it was built for (srun --mpi=list)"
    )
    statement = f"{name} started {started} processes, but MPI sees {size}"
    return DoctorFinding("launcher", statement, remedy, fatal=True)


def _contradictions(here: RankPlacement, nodes: int) -> list[DoctorFinding]:
    """What the launcher's variables say of this rank otherwise than MPI."""
    sentences = find_contradictions(os.environ, here.rank, here.local_rank, nodes)
    remedy = "start all ranks with one launcher, and neither set nor pass on its variables by hand"
    return [DoctorFinding("launcher", sentences[0], remedy, fatal=True)] if sentences else []


def _rank_report(rank: int, node: int, local_rank: int, torch: ModuleType | None) -> RankPlacement:
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return RankPlacement(rank, socket.gethostname(), node, local_rank, cores, _gpu_count(torch))


def _binding(ranks: list[RankPlacement]) -> list[DoctorFinding]:
    """Nodes with more ranks than cores, or than GPUs."""
    findings = []
    sizes = Counter(each.hostname for each in ranks)
    if len(set(sizes.values())) > 1:
        statement = ", ".join(f"{count} on {hostname}" for hostname, count in sorted(sizes.items()))
        remedy = "runs need as many on every node: srun --ntasks-per-node, or mpirun --map-by ppr:N:node"
        findings.append(DoctorFinding("ranks a node", statement, remedy, fatal=True))
    for hostname in sorted(sizes):
        here = [each for each in ranks if each.hostname == hostname]
        cores = len({core for each in here for core in each.cores})
        if 0 < cores < len(here):
            remedy = f"start at most {cores} ranks there; they take turns now"
            if cores == 1:
                remedy = (
                    "all ranks are bound to one core: give mpirun --bind-to none, or srun --cpus-per-task"
                )
            findings.append(
                DoctorFinding("cores", f"{len(here)} ranks on {cores} cores of {hostname}", remedy)
            )
        gpus = max(each.gpus for each in here)
        if 0 < gpus < len(here):
            remedy = "ranks that share a GPU talk through host memory: start one rank a GPU"
            findings.append(DoctorFinding("GPUs", f"{len(here)} ranks on {gpus} GPUs of {hostname}", remedy))
    return findings


def _hdf5_package() -> tuple[ModuleType | None, DoctorFinding]:
    try:
        import h5py
    except (ImportError, OSError) as error:
        return None, DoctorFinding("HDF5", f"h5py cannot be loaded: {error}", REINSTALL, fatal=True)
    library = f"{h5py.version.hdf5_version}, h5py {h5py.__version__}"
    if not h5py.get_config().mpi:
        return None, DoctorFinding(
            "HDF5", f"{library}, not parallel", f"h5py lacks MPI: {REINSTALL}", fatal=True
        )
    return h5py, DoctorFinding("HDF5", f"{library}, parallel")


def _hdf5(world: MPI.Intracomm, nodes: int) -> list[DoctorFinding]:
    """Whether h5py is there, on the same MPI, and a file can be written by all ranks. Collective."""
    h5py, finding = _hdf5_package()
    libraries = loaded_mpi_libraries()
    if len(libraries) > 1:
        statement = f"mpi4py and h5py use different MPIs: {', '.join(libraries)}"
        finding, h5py = DoctorFinding("HDF5", statement, REINSTALL, fatal=True), None
    if not all(world.allgather(h5py is not None)):
        return [finding]
    assert h5py is not None
    # On one node any folder does; on several it must be shared, as the one that runs are started in.
    parent = tempfile.gettempdir() if nodes == 1 else str(Path.cwd())
    try:
        folder = tempfile.mkdtemp(prefix="hpctrain-doctor-", dir=parent) if world.rank == 0 else None
    except OSError as error:
        folder = f"?{error}"
    folder = str(world.bcast(folder))
    remedy = f"ranks cannot write one file in {parent}: start runs in a folder that all nodes share"
    if folder.startswith("?"):
        return [finding, DoctorFinding("parallel file", folder[1:], remedy, fatal=True)]
    try:
        wrong = _write_together(h5py, world, Path(folder) / "try.h5")
    except (OSError, RuntimeError, ValueError) as error:
        wrong = f"{type(error).__name__}: {error}"
    problems = [problem for problem in world.allgather(wrong) if problem]
    if world.rank == 0:
        with suppress(OSError):
            (Path(folder) / "try.h5").unlink(missing_ok=True)
            Path(folder).rmdir()
    if problems:
        return [finding, DoctorFinding("parallel file", f"{parent}: {problems[0]}", remedy, fatal=True)]
    return [finding, DoctorFinding("parallel file", f"written and read back by all ranks in {parent}")]


def _write_together(h5py: ModuleType, world: MPI.Intracomm, path: Path) -> str:
    """Each rank writes its number into one file and reads its neighbour's; what went wrong, or ""."""
    with h5py.File(path, "w", driver="mpio", comm=world) as file:
        file.create_dataset("ranks", (world.size,), dtype="i8")[world.rank] = world.rank + 1
    with h5py.File(path, "r", driver="mpio", comm=world) as file:
        neighbour = (world.rank + 1) % world.size
        read = int(file["ranks"][neighbour])
    return "" if read == neighbour + 1 else f"rank {world.rank} read {read} where {neighbour + 1} was written"


def _slurm() -> DoctorFinding:
    if "SLURM_JOB_ID" in os.environ:
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "?")
        return DoctorFinding("Slurm", f"job {os.environ['SLURM_JOB_ID']} on {nodes} nodes")
    return DoctorFinding("Slurm", "installed, outside of a job" if shutil.which("srun") else "none")
