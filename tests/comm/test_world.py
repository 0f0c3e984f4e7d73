"""The World's place, its device, and agreement on errors.

Tests of comm/world.py and host/launcher.py.
"""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace

import pytest
import torch

import hpctrain.comm.world as world_module
from hpctrain.comm.error_messages import combine_errors
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.host import device
from hpctrain.host import mpi_library as library
from hpctrain.host.launcher import check_launched_size, find_contradictions


def fail(here: bool, error: Exception) -> None:
    if here:
        raise error


@pytest.mark.mpi
def test_place(world: World) -> None:
    size = world.communicator.size
    assert (world.rank, world.size) == (world.communicator.rank, size)
    assert world.everyone.ranks == tuple(range(size))
    assert world.everyone.axes == ("world",)
    names = world.everyone.all_gather_object((world.hostname, world.node, world.local_rank, world.local_size))
    assert names[world.rank][0] == socket.gethostname()
    assert world.nodes == len({node for _, node, _, _ in names})
    assert names[0][1:3] == (0, 0)
    for _, node, local_rank, local_size in names:
        neighbours = [other for other in names if other[1] == node]
        assert local_size == len(neighbours)
        assert sorted(other[2] for other in neighbours) == list(range(local_size))
        assert 0 <= local_rank < local_size


@pytest.mark.mpi
def test_agreement_without_an_error(world: World) -> None:
    with world.agreement():
        value = world.rank
    assert value == world.rank


@pytest.mark.mpi
def test_agreement_gives_all_ranks_the_lowest_failing_ranks_error(world: World) -> None:
    with pytest.raises(HpctrainError) as caught, world.agreement():
        fail(world.rank == world.size - 1, HpctrainError(["first", "second"]))
    assert caught.value.problems == ("first", "second")
    assert caught.value.exit_code == 2
    assert world.is_agreed(caught.value)
    assert not world.is_agreed(HpctrainError("first"))

    with pytest.raises(HpctrainError) as caught, world.agreement():
        raise (InputOutputError if world.rank == 0 else HpctrainError)(["same", f"rank {min(world.rank, 1)}"])
    assert caught.value.exit_code == 3
    assert isinstance(caught.value, InputOutputError)
    assert caught.value.problems == ("same", "rank 0", "rank 1")[: 2 + (world.size > 1)]


@pytest.mark.mpi
def test_agreement_makes_sentences_of_system_errors(world: World) -> None:
    with pytest.raises(InputOutputError) as caught, world.agreement():
        fail(world.rank == 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there/step.h5"))
    assert caught.value.problems == ("there/step.h5: No space left on device",)
    assert caught.value.exit_code == 3


def test_other_errors_pass_through_agreement(world: World) -> None:
    if world.size == 1:
        with pytest.raises(ZeroDivisionError), world.agreement():
            raise ZeroDivisionError


def test_too_many_problems_are_cut() -> None:
    error = combine_errors([(2, [f"problem {number}" for number in range(80)])])
    assert len(error.problems) == 51
    assert error.problems[-1] == "and 30 more problems"


@pytest.mark.parametrize(
    ("environment", "size", "good"),
    [
        ({}, 1, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, False),
        ({"PMI_SIZE": "2"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1, False),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8, True),
        # mpirun inside a Slurm job: its daemons are the step's tasks, one a node.
        ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8, True),
    ],
)
def test_silent_singletons_are_refused(environment: dict[str, str], size: int, good: bool) -> None:
    if good:
        check_launched_size(environment, size, "Open MPI")
    else:
        count = next(iter(environment.values()))
        with pytest.raises(HpctrainError, match=f"started {count} processes"):
            check_launched_size(environment, size, "Open MPI")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, []),
        ({"SLURM_PROCID": "0"}, []),  # of the job's own script, which no launcher started
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, []),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "1"},
            ["SLURM_PROCID = 0, but MPI's rank is 3"],
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4"},
            [
                "SLURM_LOCALID = 0, but MPI's rank on the node is 1",
                "SLURM_STEP_NUM_NODES = 4, but MPI's number of nodes is 2",
            ],
        ),
        # mpirun inside a Slurm job: Slurm's variables are those of its daemon.
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "1"}, []),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
            ["OMPI_COMM_WORLD_LOCAL_RANK = 3, but MPI's rank on the node is 1"],
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, ["PMI_RANK = 2, but MPI's rank is 3"]),
    ],
)
def test_launchers_variables_are_compared_with_mpi(environment: dict[str, str], told: list[str]) -> None:
    assert find_contradictions(environment, rank=3, local_rank=1, nodes=2) == told


@pytest.mark.mpi(min_size=1, max_size=1)
def test_auto_does_not_pass_over_gpus(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "unusable_gpus", lambda: "this node has GPUs")
    with pytest.raises(HpctrainError, match='this node has GPUs, or use "cpu"'):
        world.use_device("auto")
    world.use_device("cpu")


@pytest.mark.mpi(min_size=1, max_size=1)
def test_the_deck_decides_on_deterministic_kernels(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(world_module, "prepare_device", lambda *arguments: prepared.append(arguments))
    world.use_device("cpu")
    world.use_device("cpu", deterministic=False)
    assert prepared == [(torch.device("cpu"), True), (torch.device("cpu"), False)]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_ranks_of_a_job_compute_on_one_type_of_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_: str, rank: int, setting: str) -> torch.device:
        assert setting == "run.device"
        return torch.device("cuda" if rank else "cpu")

    monkeypatch.setattr(world_module, "device_of_run", find)
    with pytest.raises(HpctrainError) as refused:
        world.use_device("auto")
    assert refused.value.exit_code == 2
    (problem,) = refused.value.problems
    assert f'"cpu" on rank 0 ({world.hostname}), "cuda" on rank 1 ({world.hostname})' in problem
    assert world.is_agreed(refused.value)
    assert world.device.type == "cpu"


@pytest.mark.parametrize(
    ("vendor", "device", "good"),
    [
        (("MPICH", (4, 0, 2)), "MPICH Device: ch4:ucx", False),
        (("MPICH", (4, 0, 2)), "MPICH Device: ch4:ofi", True),
        (("MPICH", (4, 2, 0)), "MPICH Device: ch4:ucx", True),
        (("Open MPI", (4, 1, 4)), "", True),
    ],
)
def test_which_mpi_does_not_finalize_between_nodes(
    vendor: tuple[str, tuple[int, int, int]], device: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = SimpleNamespace(get_vendor=lambda: vendor, Get_library_version=lambda: device)
    monkeypatch.setattr(library, "MPI", mpi)
    assert library.finalizes_between_nodes() == good


@pytest.mark.mpi(min_size=1, max_size=2)
def test_the_end_of_a_part_of_the_world_leaves_mpi_running(world: World) -> None:
    for part in (world.subworld([world.rank]), world.subworld(range(world.size)), world.single_rank_world()):
        assert part.finish(3) == 3
        assert not library.MPI.Is_finalized()
    values = torch.ones(4)
    world.everyone.all_reduce(values)
    assert values.tolist() == [world.size] * 4
