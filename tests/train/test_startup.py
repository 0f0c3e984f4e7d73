"""Tests of the checks before a run. The ranks of one machine play the part of several nodes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hpctrain.host.device
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.device import VisibleGpus
from hpctrain.host.doctor import DoctorReport, RankPlacement
from hpctrain.host.launcher import core_warning
from hpctrain.host.topology import Topology
from hpctrain.plan.coordinates import map_deck
from hpctrain.train import startup
from hpctrain.train.startup import (
    bind_ranks,
    check_deck_file,
    check_nodes,
    check_run_folder,
    fp16_on_cpu_warning,
    read_deck_on_all_ranks,
    tensor_group_warning,
)
from tests.engines import DECK, small_deck

MODEL = '[model]\nfamily = "gpt2"\nlayers = 2\nhidden = 32\nheads = 2\nvocabulary = 64\n'
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass
class Elsewhere:
    """World that claims to be on another node."""

    world: World
    node: int
    local_size: int

    @property
    def hostname(self) -> str:
        return f"n{self.node}"

    @property
    def nodes(self) -> int:
        return 2

    @property
    def topology(self) -> Topology:
        return Topology([rank % 2 for rank in range(self.world.size)])

    def nodes_of(self, ranks: Sequence[int]) -> list[int]:
        return [self.topology.nodes[rank] for rank in ranks]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)


def sentence(world: World, check: Callable[[], object]) -> str:
    """Return the error message that a check raises on all ranks."""
    with pytest.raises(HpctrainError) as caught:
        check()
    assert caught.value.exit_code == 2
    assert world.is_agreed(caught.value)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def folders(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that all ranks are in. The last of several ranks is in its subfolder `elsewhere`."""
    if world.rank == 0:
        (mpi_tmp_path / "elsewhere").mkdir()
        for name, text in (("deck.toml", ""), ("other.toml", "[run]"), ("elsewhere/other.toml", "[model]")):
            (mpi_tmp_path / name).write_text(text)
    world.everyone.barrier()
    last = 0 < world.rank == world.size - 1
    monkeypatch.chdir(mpi_tmp_path / "elsewhere" if last else mpi_tmp_path)
    return mpi_tmp_path


@pytest.mark.mpi
def test_deck_that_only_rank_0_can_read(world: World, folders: Path) -> None:
    check_deck_file(world, folders / "deck.toml")
    check_deck_file(world, Path("nowhere.toml"))  # the error is raised when the deck is read
    if world.size > 1:
        message = sentence(world, lambda: check_deck_file(world, Path("deck.toml")))
        assert f"but rank {world.size - 1} on {world.hostname} cannot read it" in message
        message = sentence(world, lambda: check_deck_file(world, Path("other.toml")))
        assert "reads another file of that name" in message


@pytest.mark.mpi
def test_included_files_and_arguments_are_the_same_on_all_ranks(world: World, folders: Path) -> None:
    last = 0 < world.rank == world.size - 1
    if world.rank == 0:
        for folder, rows in (".", 8), ("elsewhere", 16):
            (folders / folder / "whole.toml").write_text('include = "base.toml"\n')
            sizes = f"[batch]\nglobal_size = {rows}\nsequence = 16\n"
            (folders / folder / "base.toml").write_text(
                f'[run]\nsteps = 2\n{MODEL}[data]\ntokens = "x.h5"\n{sizes}'
            )
    world.everyone.barrier()

    def read(path: Path, *overrides: str) -> Deck:
        return read_deck_on_all_ranks(world, path, overrides, None)

    assert read(folders / "whole.toml", "run.seed=3").run.seed == 3
    if world.size > 1:
        rank = f"but rank {world.size - 1} on {world.hostname} reads"
        message = sentence(world, lambda: read(Path("whole.toml")))
        assert f"reads global_size = 8, {rank} global_size = 16, from files" in message
        message = sentence(world, lambda: read(folders / "whole.toml", f"run.seed={4 if last else 3}"))
        assert f"reads seed = 3, {rank} seed = 4, from files" in message


@pytest.mark.mpi
def test_run_folder_that_some_ranks_cannot_see(
    world: World, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_run_folder(world, folders / "run")
    if world.size > 1:
        monkeypatch.setattr(startup, "SECONDS_TO_APPEAR", 0.2)
        message = sentence(world, lambda: check_run_folder(world, Path("run")))
        assert f"rank {world.size - 1} on {world.hostname} does not see what rank 0" in message
    world.everyone.barrier()
    assert not list((folders / "run").iterdir())


@pytest.mark.mpi
def test_nodes_with_different_numbers_of_ranks(world: World) -> None:
    check_nodes(world)
    if world.size > 1:
        even: Any = Elsewhere(world, node=min(world.rank, 1), local_size=2)
        check_nodes(even)
        uneven: Any = Elsewhere(world, node=min(world.rank, 1), local_size=2 if world.rank else 3)
        message = sentence(world, lambda: check_nodes(uneven))
        assert "unevenly over 2 nodes, 3 on n0 and 2 on n1" in message


@pytest.mark.mpi
def test_tensor_group_on_several_nodes_gives_a_warning(world: World) -> None:
    deck = (
        small_deck(f"layout.tensor={world.size}", "batch.global_size=16") if world.size < 8 else small_deck()
    )
    assert tensor_group_warning(world, deck) == ""
    split: Any = Elsewhere(world, node=world.rank % 2, local_size=1)
    assert ("the ranks of a tensor group are on several nodes" in tensor_group_warning(split, deck)) == (
        1 < world.size < 8
    )
    assert tensor_group_warning(split, small_deck()) == ""


@pytest.mark.mpi
def test_unbound_ranks_are_bound_to_different_cores(world: World) -> None:
    before = os.sched_getaffinity(0)
    everyone = world.everyone
    unbound = all(cores == before for cores in everyone.all_gather_object(before))
    try:
        message = bind_ranks(world, 1)
        if unbound and world.nodes == 1 and len(before) >= world.size:
            masks = everyone.all_gather_object(os.sched_getaffinity(0))
            assert "ranks are bound to" in message
            assert len(set().union(*masks)) == sum(map(len, masks))
            assert set().union(*masks) <= before
            # Ranks that are bound already keep their cores.
            assert world.size == 1 or bind_ranks(world, 1) == ""
        else:
            assert message == ""
            assert os.sched_getaffinity(0) == before
        assert bind_ranks(world, 10_000) == ""
    finally:
        os.sched_setaffinity(0, before)
        everyone.barrier()


def test_threads_without_cores_give_a_warning() -> None:
    one, two = (0,), (0, 1)
    assert core_warning(1, [("n", one)] * 4) == ""
    assert core_warning(2, [("n", two)]) == core_warning(2, [("n", two), ("m", two)]) == ""
    assert core_warning(2, [("n", ())]) == ""  # the cores are unknown
    assert "the ranks of a node have 4 threads but 2 cores" in core_warning(2, [("n", two)] * 2)
    assert "rank 1 may use only 1 core: use mpirun --map-by slot:PE=2" in core_warning(
        2, [("n", two), ("m", one)]
    )


def test_fp16_on_a_cpu_gives_a_warning() -> None:
    deck = small_deck("precision.compute=fp16")
    said = fp16_on_cpu_warning(deck, torch.device("cpu"))
    assert said.startswith(
        'precision.compute = "fp16" is slow on a CPU, and small gradients need a loss scale'
    )
    assert fp16_on_cpu_warning(deck, torch.device("cuda")) == ""
    assert fp16_on_cpu_warning(small_deck("precision.compute=bf16"), torch.device("cpu")) == ""


def test_doctor_reports_threads_without_cores(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    report = DoctorReport(ranks=[RankPlacement(rank, "n", 0, rank, (rank,), ()) for rank in range(2)])
    map_deck(report, tmp_path / "deck.toml", ["run.threads=4"])
    assert report.can_run and "rank 0 may use only 1 core" in report.findings[-1].remedy
    map_deck(report, tmp_path / "deck.toml", [])
    assert not report.findings[-1].remedy


def test_doctor_refuses_a_device_that_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpctrain.host.device, "unusable_gpus", lambda: "")
    monkeypatch.setattr(hpctrain.host.device, "visible_gpus", lambda: VisibleGpus("", 0))
    (tmp_path / "deck.toml").write_text(DECK)
    report = DoctorReport(ranks=[RankPlacement(0, "n", 0, 0, (), ())])
    map_deck(report, tmp_path / "deck.toml", ["run.device=cuda"])
    (problem,) = [finding for finding in report.findings if finding.fatal]
    assert problem.statement == 'run.device = "cuda": torch finds no GPU here'
    assert problem.remedy == 'use "cpu" or "auto"' and not report.can_run


ALL_WAYS = "4 nodes, emulated; pipeline over 2 nodes by messages; data over 2 nodes by messages; "
ALL_WAYS += "tensor inside a node"


def test_the_doctor_tells_of_a_tensor_axis_across_nodes(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    report = DoctorReport(
        ranks=[RankPlacement(rank, f"n{rank // 3}", rank // 3, rank % 3, (), ()) for rank in range(6)]
    )
    map_deck(report, tmp_path / "deck.toml", ["layout.tensor=2", "batch.global_size=12"])
    assert report.coordinates[3] == {"pipeline": 0, "data": 1, "context": 0, "tensor": 1}
    assert report.can_run
    assert "over the network in every layer" in report.findings[0].remedy
    report = DoctorReport(
        ranks=[RankPlacement(rank, f"n{rank // 2}", rank // 2, rank % 2, (), ()) for rank in range(6)]
    )
    map_deck(report, tmp_path / "deck.toml", ["layout.tensor=2", "batch.global_size=12"])
    assert not report.findings[0].remedy
    ways = "3 nodes; data over 3 nodes by messages; tensor inside a node"
    assert [finding.statement for finding in report.findings if finding.topic == "topology"] == [ways]


@pytest.mark.parametrize(
    ("per_node", "keys", "expected"),
    [
        (4, (), "2 nodes, emulated; data over 2 nodes, with 4 neighbours on each"),
        (2, ("layout.tensor=2", "layout.pipeline=2"), ALL_WAYS),
        (8, (), None),
    ],
)
def test_the_doctor_tells_how_ranks_reach_each_other(
    tmp_path: Path, per_node: int, keys: tuple[str, ...], expected: str | None
) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    report = DoctorReport(ranks=[RankPlacement(rank, "here", 0, rank, (), ()) for rank in range(8)])
    map_deck(
        report,
        tmp_path / "deck.toml",
        [*keys, f"communication.ranks_per_node={per_node}", "batch.global_size=16"],
    )
    message = [finding.statement for finding in report.findings if finding.topic == "topology"]
    assert message == ([] if expected is None else [expected])


@pytest.fixture
def work(tmp_path: Path, launch: Launch) -> Path:
    """A folder with a token file and a deck that names it in full."""
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    deck = DECK.replace('"none"', f'"{tmp_path / "tokens.h5"}"').replace("vocabulary = 61\n", "")
    (tmp_path / "deck.toml").write_text(deck)
    return tmp_path


def told_once(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a job that ends with exit code 2."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error: ")]
    assert (done.returncode, len(lines)) == (2, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("deck", "message"),
    [
        ("deck.toml", "deck.toml: rank 0 on {} reads this deck, but rank 1 on {} cannot read it"),
        ("{}/deck.toml", "run.dir = runs/deck: rank 1 on {} does not see what rank 0 on {} writes there"),
    ],
)
def test_ranks_in_folders_that_they_do_not_share(
    work: Path, launch: Launch, python: list[str], deck: str, message: str
) -> None:
    """Rank 1 is started in another folder, as on a node where that of rank 0 is not mounted."""
    (work / "elsewhere").mkdir()
    arguments = ("-m", "hpctrain", "run", deck.format(work))
    second = (":", "-n", "1", "-wdir", work / "elsewhere", *python, *arguments)
    problem = told_once(launch(1, *arguments, *second))
    assert message.format(*[os.uname().nodename] * 2) in problem


def test_launchers_variables_that_contradict_mpi(work: Path, launch: Launch) -> None:
    """Both ranks have the number that Slurm gives to the first."""
    program = """\
import os, sys
from hpctrain.host.mpi_library import MPI
MPI.Init_thread(MPI.THREAD_MULTIPLE)
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
    os.environ.pop(name, None)
os.environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
sys.argv = ["hpctrain", *sys.argv[1:]]
from hpctrain.cli.main import main
main()
"""
    problem = told_once(launch(2, "-c", program, "run", "deck.toml"))
    assert "the launcher's variables contradict MPI (SLURM_PROCID = 0, but MPI's rank is 1)" in problem


def test_more_ranks_than_the_layout(work: Path, launch: Launch) -> None:
    problem = told_once(launch(2, "-m", "hpctrain", "run", "deck.toml", "--set", "layout.data=1"))
    assert "layout.data=1: must be 2, the number of data ranks of 2 ranks" in problem
    assert "start 1 rank" in problem


def test_binding_is_told(work: Path, launch: Launch) -> None:
    settings = ("--set", "machine.bind=true", "--set", "run.steps=1")
    done = launch(1, "-m", "hpctrain", "run", "deck.toml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks are bound to" in done.stdout
