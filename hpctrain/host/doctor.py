"""Examination of the machine for `hpctrain doctor`: packages, MPI, ranks and nodes, parallel HDF5 and GPUs.

A missing or broken package must not end the examination, so this module imports what it examines inside
functions and reports errors as findings.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import socket
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

from hpctrain.host.launcher import (
    describe_missing_pmix,
    find_contradictions,
    find_unsafe_start,
    launched_rank,
    launched_size,
    launcher_name,
    loaded_mpi_libraries,
)
from hpctrain.text import counted, ranges

if TYPE_CHECKING:
    from mpi4py import MPI

REINSTALL = "run `make install` in hpctrain's folder, with the same modules loaded as for runs"
SECONDS_UNTIL_HANG = 120.0
PACKAGES = ("click", "matplotlib", "numpy", "pydantic", "rich", "tokenizers")


@dataclass(frozen=True)
class DoctorFinding:
    """Result of one examination.

    Attributes:
        topic: What was examined.
        statement: What was found.
        remedy: What the user should do; empty if nothing is wrong.
        fatal: True if no run can start because of this.
    """

    topic: str
    statement: str
    remedy: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class RankPlacement:
    """Node, cores and GPUs of one rank.

    Attributes:
        rank: The rank.
        hostname: Name of its node.
        node: Lowest rank on the same node, which identifies the node.
        local_rank: Its number among the ranks of its node.
        cores: Cores that it may use; empty if unknown.
        gpus: UUIDs of the GPUs that it sees, in torch's order.
    """

    rank: int
    hostname: str
    node: int
    local_rank: int
    cores: tuple[int, ...]
    gpus: tuple[str, ...]

    @property
    def gpu(self) -> str | None:
        """UUID of the GPU that a run gives to this rank; None without GPUs."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else None


@dataclass
class DoctorReport:
    """Result of the examination, the same on all ranks.

    Attributes:
        rank: This rank.
        findings: Findings of rank 0, and problems that other ranks have and rank 0 has not.
        ranks: Placement of each rank.
        coordinates: Coordinates of each rank in the mesh of the deck; empty if no deck is examined.
        world: Communicator of all ranks; None if MPI does not start.
    """

    rank: int = 0
    findings: list[DoctorFinding] = field(default_factory=list)
    ranks: list[RankPlacement] = field(default_factory=list)
    coordinates: list[dict[str, int]] = field(default_factory=list)
    world: MPI.Intracomm | None = None

    def add(self, findings: list[DoctorFinding]) -> None:
        """Append to `findings` those of rank 0, and problems that only other ranks have. Collective.

        The texts of other ranks' problems name the rank. All ranks get the same findings.

        Args:
            findings: Findings of this rank.
        """
        self.findings += _merge(self.world.allgather(findings) if self.world is not None else [findings])

    @property
    def can_run(self) -> bool:
        """True if no finding that was added so far is fatal, so that a run can start.

        Warnings do not count.
        """
        return not any(finding.fatal for finding in self.findings)


@contextmanager
def examine_machine() -> Iterator[DoctorReport]:
    """Start MPI if possible, examine the machine, yield the report, and finalize MPI after the block.

    Collective over all ranks that the launcher has started. MPI may be running already. An error of mpi4py or
    of the launcher that prevents the start of MPI is a finding of the report. The block may communicate over
    `world` of the report. If the block raises an error, MPI is not finalized, since other ranks may not reach
    that. A rank whose examination takes longer than SECONDS_UNTIL_HANG, as when it waits for another rank,
    prints its traceback and ends; the block may take any time.

    Yields:
        The report, which is the same on all ranks but for its `rank`. Without MPI its `world` is None.
    """
    python = DoctorFinding("Python", f"{sys.version.split()[0]} ({sys.executable})")
    findings = [python, *_packages()]
    torch, finding = _torch()
    findings.append(finding)
    findings += _gpus(torch)
    findings += _tensor_heap(torch)
    mpi, finding = _mpi()
    findings.append(finding)
    if mpi is None:
        findings += [_launcher(None), _hdf5_package()[1], _slurm()]
        yield DoctorReport(launched_rank(os.environ), findings, [_placement(0, 0, 0, torch)])
        return
    world = mpi.COMM_WORLD
    faulthandler.dump_traceback_later(SECONDS_UNTIL_HANG, exit=True)
    try:
        node = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
        ranks = world.allgather(_placement(world.rank, node.bcast(world.rank), node.rank, torch))
        node.Free()
        ranks_per_node = Counter(each.node for each in ranks).values()
        nodes, each = len(ranks_per_node), ranges(set(ranks_per_node), ", ")
        layout = f"{world.size} rank{'s' * (world.size != 1)} on {nodes} node{'s' * (nodes != 1)}"
        layout += f", {each} on each" if nodes > 1 else ""
        findings += [_thread_level(mpi), _lost_ranks(), _launcher(world.size)]
        findings.append(DoctorFinding("ranks and nodes", layout))
        findings += _binding(ranks)
        findings += [*_launcher_problems(ranks[world.rank], nodes), *_hdf5(world, nodes), _slurm()]
    finally:
        faulthandler.cancel_dump_traceback_later()
    # With the launcher of another MPI, every process is rank 0 of its own world; the launcher's rank is used.
    rank = world.rank if launched_size(os.environ) == world.size else launched_rank(os.environ)
    yield DoctorReport(rank, _merge(world.allgather(findings)), ranks, world=world)
    sys.stdout.flush()
    world.Barrier()
    mpi.Finalize()


def _merge(ranks: list[list[DoctorFinding]]) -> list[DoctorFinding]:
    """Return the findings of rank 0, and the problems that only other ranks have."""
    merged = list(ranks[0])
    known = {(finding.topic, finding.remedy) for finding in merged}
    for rank, findings in enumerate(ranks):
        for finding in findings:
            if finding.remedy and (finding.topic, finding.remedy) not in known:
                known.add((finding.topic, finding.remedy))
                merged.append(replace(finding, statement=f"rank {rank}: {finding.statement}"))
    return merged


def _packages() -> list[DoctorFinding]:
    """Return the versions of the required packages, and a finding for each missing package."""
    versions = {name: _version(name) for name in PACKAGES}
    installed = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    missing = [name for name, number in versions.items() if not number]
    return [
        DoctorFinding("packages", installed),
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
    builds = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": torch.version.xpu,
    }
    build = next((f"{name} {number}" for name, number in builds.items() if number), "CPU build")
    threads = "threads per rank: run.threads of the deck, default 1"
    return torch, DoctorFinding("torch", f"{torch.__version__} ({build}), {threads}")


def _gpus(torch: ModuleType | None) -> list[DoctorFinding]:
    if torch is None:
        return []
    from hpctrain.host.device import gpu_name, unusable_gpus, visible_gpus

    gpus = visible_gpus()
    if not gpus.number:
        problem, _, remedy = unusable_gpus().partition("; ")
        return [
            DoctorFinding("GPUs", problem or "none: ranks compute on the CPU", remedy, fatal=bool(problem)),
            DoctorFinding("NCCL", "not needed without GPUs"),
        ]
    names = sorted({str(gpu_name(torch.device(gpus.kind, index))) for index in range(gpus.number)})
    findings = [DoctorFinding("GPUs", f"rank 0 sees {gpus.number}: {', '.join(names)}")]
    if gpus.kind == "xpu" and torch.distributed.is_xccl_available():
        return [*findings, DoctorFinding("NCCL", "torch has XCCL for GPUs of Intel")]
    if gpus.kind == "xpu" or not torch.distributed.is_nccl_available():
        remedy = "install a build of torch with NCCL (XCCL for GPUs of Intel), or use MPI, which is slower"
        return [*findings, DoctorFinding("NCCL", "missing in this build of torch", remedy)]
    library = ".".join(map(str, torch.cuda.nccl.version()))
    return [*findings, DoctorFinding("NCCL", f"{library}, in torch")]


def _tensor_heap(torch: ModuleType | None) -> list[DoctorFinding]:
    """Return a finding that says whether CPU tensors get a heap of their own, as in a run without GPUs."""
    if torch is None or _visible_gpus(torch):
        return []
    from hpctrain.host.c_libraries import CompilerError
    from hpctrain.host.tensor_heap.tensor_heap import build_tensor_heap, malloc_variable

    try:
        build_tensor_heap()
    except CompilerError as error:
        remedy = "" if malloc_variable(os.environ) else "install g++ or clang++, or name a compiler in $CXX"
        statement = f"tensors are allocated by malloc, which needs more memory: {error}"
        return [DoctorFinding("tensor heap", statement, remedy)]
    return [DoctorFinding("tensor heap", "compiled")]


def _visible_gpus(torch: ModuleType | None) -> tuple[str, ...]:
    """Return the UUID of each GPU that this process sees, in torch's order."""
    if torch is None:
        return ()
    from hpctrain.host.device import gpu_identity, visible_gpus

    gpus = visible_gpus()
    return tuple(str(gpu_identity(torch.device(gpus.kind, index))) for index in range(gpus.number))


def _mpi() -> tuple[ModuleType | None, DoctorFinding]:
    """Start MPI. Return its module, or None if it does not start, and the finding."""
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
    remedy = "this MPI was built without support for threads: use another build"
    return DoctorFinding("thread level", names[level], "" if level >= mpi.THREAD_SERIALIZED else remedy)


def _lost_ranks() -> DoctorFinding:
    """Return a finding about ULFM, the part of MPI with which programs can go on after the loss of ranks."""
    known = any(hasattr(ctypes.CDLL(library), "MPIX_Comm_shrink") for library in loaded_mpi_libraries())
    way = "runs do not use it: a lost rank ends the job, and `hpctrain resume` continues"
    return DoctorFinding("lost ranks", f"this MPI {'has' if known else 'lacks'} ULFM; {way}")


def _launcher(size: int | None) -> DoctorFinding:
    """Compare the number of processes of the launcher with the size of the MPI world.

    Args:
        size: Size of the world; None without MPI.
    """
    name = launcher_name(os.environ)
    started = launched_size(os.environ)
    if size is None or size == started:
        return DoctorFinding("launcher", f"{name}, {started} processes" if started > 1 else name)
    remedy = (
        "the launcher and mpi4py use different MPI libraries: use the mpirun of the MPI above, or srun with "
        "the --mpi option that it was built for (srun --mpi=list)"
    )
    statement = f"{name} started {started} processes, but MPI sees {size}"
    return DoctorFinding("launcher", statement, remedy, fatal=True)


def _launcher_problems(here: RankPlacement, nodes: int) -> list[DoctorFinding]:
    """Return a finding if the launcher's variables contradict MPI, or if ranks may crash at the start."""
    sentences = find_contradictions(os.environ, here.rank, here.local_rank, nodes)
    if sentences:
        remedy = "start all ranks with one launcher, and do not set or export its variables yourself"
        return [DoctorFinding("launcher", sentences[0], remedy, fatal=True)]
    unsafe = find_unsafe_start(os.environ, nodes)
    remedy = "export SLURM_PMIX_FENCE=ring before srun (or PMIxCollFence=ring in Slurm's mpi.conf)"
    return [DoctorFinding("start of MPI", unsafe, remedy)] if unsafe else []


def _placement(rank: int, node: int, local_rank: int, torch: ModuleType | None) -> RankPlacement:
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return RankPlacement(rank, socket.gethostname(), node, local_rank, cores, _visible_gpus(torch))


def _binding(ranks: list[RankPlacement]) -> list[DoctorFinding]:
    """Return problems with the number of ranks per node, and nodes with more ranks than cores or GPUs."""
    findings = []
    sizes = Counter(each.hostname for each in ranks)
    if len(set(sizes.values())) > 1:
        statement = ", ".join(f"{count} on {hostname}" for hostname, count in sorted(sizes.items()))
        remedy = (
            "runs need the same number of ranks on every node: use srun --ntasks-per-node or mpirun --map-by "
            "ppr:N:node"
        )
        findings.append(DoctorFinding("ranks per node", statement, remedy, fatal=True))
    for hostname in sorted(sizes):
        here = [each for each in ranks if each.hostname == hostname]
        cores = len({core for each in here for core in each.cores})
        if 0 < cores < len(here):
            remedy = f"start at most {cores} ranks there, since ranks share cores now"
            if cores == 1:
                remedy = "all ranks are bound to one core: use mpirun --bind-to none or srun --cpus-per-task"
            findings.append(
                DoctorFinding("cores", f"{len(here)} ranks on {cores} cores of {hostname}", remedy)
            )
        users = [each for each in here if each.gpu is not None]
        gpus = len({each.gpu for each in users})
        if gpus < len(users):
            statement = f"{len(users)} ranks on {counted(gpus, 'GPU')} of {hostname}"
            findings.append(DoctorFinding("GPUs", statement, "start one rank per GPU"))
    without = [each.rank for each in ranks if not each.gpus]
    if 0 < len(without) < len(ranks):
        statement = f"ranks without a GPU: {ranges(without, ',')} of {len(ranks)}"
        remedy = "give a GPU to each rank, since the ranks of a run compute on one type of device"
        findings.append(DoctorFinding("GPUs", statement, remedy))
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
    """Check that h5py uses the same MPI, and that all ranks can write one file together. Collective."""
    h5py, finding = _hdf5_package()
    libraries = loaded_mpi_libraries()
    if len(libraries) > 1:
        statement = f"mpi4py and h5py use different MPI libraries: {', '.join(libraries)}"
        finding, h5py = DoctorFinding("HDF5", statement, REINSTALL, fatal=True), None
    if not all(world.allgather(h5py is not None)):
        return [finding]
    assert h5py is not None
    # With several nodes the folder must be shared, such as the one in which runs are started.
    parent = tempfile.gettempdir() if nodes == 1 else str(Path.cwd())
    try:
        folder = tempfile.mkdtemp(prefix="hpctrain-doctor-", dir=parent) if world.rank == 0 else None
    except OSError as error:
        folder = f"?{error}"
    folder = str(world.bcast(folder))
    remedy = f"ranks cannot write one file together in {parent}: start runs in a folder that all nodes share"
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
    """Write the number of each rank into one file, and read the number of the next rank. Collective.

    Returns:
        "", or a sentence if the number is wrong. Errors of HDF5 are raised.
    """
    with h5py.File(path, "w", driver="mpio", comm=world) as file:
        file.create_dataset("ranks", (world.size,), dtype="i8")[world.rank] = world.rank + 1
    with h5py.File(path, "r", driver="mpio", comm=world) as file:
        neighbor = (world.rank + 1) % world.size
        read = int(file["ranks"][neighbor])
    return "" if read == neighbor + 1 else f"rank {world.rank} read {read} instead of {neighbor + 1}"


def _slurm() -> DoctorFinding:
    if "SLURM_JOB_ID" in os.environ:
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "?")
        return DoctorFinding("Slurm", f"job {os.environ['SLURM_JOB_ID']} on {nodes} nodes")
    return DoctorFinding("Slurm", "installed, outside of a job" if shutil.which("srun") else "none")
