"""Ranks that make different calls are named before they hang; others notice nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpctrain.comm.call_check import CallComparer, MismatchError
from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.mpi import MpiTransport, StagedTransport
from hpctrain.comm.world import World
from hpctrain.host.mpi_library import MPI

Act = Callable[[Group], object]


def test_ranks_have_short_names() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


@pytest.fixture
def checked(world: World) -> World:
    """A world of its own, as a mismatch leaves messages behind."""
    own = World(world.communicator.Dup())
    own.compare_calls(True)
    return own


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


WRONG: dict[str, tuple[Act, Act, str, str]] = {
    "operation": (
        lambda group: group.all_reduce(ones(4)),
        lambda group: group.broadcast(ones(4)),
        "all_reduce {n} of world (16 bytes of float32, sum)",
        "broadcast {n} of world (16 bytes of float32, root 0)",
    ),
    "size": (
        lambda group: group.all_reduce(ones(4)),
        lambda group: group.all_reduce(ones(5)),
        "all_reduce {n} of world (16 bytes of float32, sum)",
        "all_reduce {n} of world (20 bytes of float32, sum)",
    ),
    "type": (
        lambda group: group.all_gather(ones(4)),
        lambda group: group.all_gather(ones(4, torch.int32)),
        "all_gather {n} of world ({all} bytes of float32)",
        "all_gather {n} of world ({all} bytes of int32)",
    ),
    "root": (
        lambda group: group.reduce(ones(4), 0),
        lambda group: group.reduce(ones(4), 1),
        "reduce {n} of world (16 bytes of float32, sum, root 0)",
        "reduce {n} of world (16 bytes of float32, sum, root 1)",
    ),
    "started": (
        lambda group: group.start_all_reduce(ones(4)).wait(),
        lambda group: group.start_all_gather(ones(4)).wait(),
        "all_reduce {n} of world (16 bytes of float32, sum)",
        "all_gather {n} of world ({all} bytes of float32)",
    ),
    "object": (
        lambda group: group.barrier(),
        lambda group: group.all_gather_object("here"),
        "barrier {n} of world",
        "all_gather_object {n} of world",
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", WRONG)
def test_a_difference_is_named_on_all_ranks(checked: World, case: str) -> None:
    usual, other, words, others = WRONG[case]
    group, last = checked.everyone, checked.size - 1
    group.barrier()
    with pytest.raises(MismatchError) as caught:
        (other if group.rank == last else usual)(group)
    figures = {"n": 2, "all": 16 * group.size}
    agreeing = name_ranks(range(last)) + (" call" if last > 1 else " calls")
    assert caught.value.problems == (
        f"the ranks make different calls: {agreeing} {words.format(**figures)}; "
        f"rank {last} calls {others.format(**figures)}",
    )
    assert caught.value.exit_code == 70


@pytest.mark.mpi(min_size=2)
def test_a_call_of_another_group_of_the_same_ranks_is_named(checked: World) -> None:
    mesh = Mesh(checked, {"data": checked.size})
    group = mesh.group("data") if checked.rank == 0 else mesh.group("data", "context")
    with pytest.raises(
        MismatchError, match=r"rank 0 calls all_reduce 1 of data \(16 .* of data x context \(16"
    ):
        group.all_reduce(ones(4))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("started", [False, True])
def test_a_message_of_another_size_is_named_by_its_receiver(checked: World, started: bool) -> None:
    group = checked.everyone
    sentence = (
        "the ranks make different calls: rank 0 sends 16 bytes of float32, "
        "but rank 1 receives 40 bytes of float32 (receive 2 from it in world)"
    )
    if group.rank == 0:
        group.send(ones(3), 1)
        group.send(ones(4), 1)
    elif group.rank == 1:
        group.recv(ones(3), 0)
        with pytest.raises(MismatchError) as caught:
            group.start_recv(ones(10), 0).wait() if started else group.recv(ones(10), 0)
        assert caught.value.problems == (sentence,)


@pytest.mark.mpi(min_size=2)
def test_started_operations_are_compared_and_done(checked: World) -> None:
    group = Mesh(checked, {"data": checked.size}).group("data")
    works = [group.start_all_reduce(ones(1 << 20)) for _ in range(3)]
    for work in reversed(works):
        assert torch.equal(work.wait(), group.size * ones(1 << 20))


@pytest.mark.mpi(min_size=2)
def test_nothing_is_between_a_group_and_its_transport_without_the_check(checked: World) -> None:
    assert isinstance(checked.everyone.comparer, CallComparer)
    checked.compare_calls(False)
    fresh = checked.new_group(("fresh",), tuple(range(checked.size)), "mpi")
    for group in (checked.everyone, fresh):
        assert group.comparer is None
        assert isinstance(group.host, MpiTransport)
        assert isinstance(group.accelerator, StagedTransport)
        assert isinstance(group.objects, MPI.Intracomm)
