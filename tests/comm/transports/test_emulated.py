"""Tests of the times and results of calls over an emulated link, with a clock that the test controls."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.group import Group, GroupTransports
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.emulated import EmulatedLink, EmulatedTransport
from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.mpi import MpiTransport
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.traffic import Traffic
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.units import Link
from tests.engines import small_deck, trainer

LINK = Link(1000.0, 0.5)


class Clock:
    """Clock that advances only when a rank sleeps or the test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow_group(world: World, clock: Clock) -> Group:
    """Return a group of all ranks over an emulated link with this clock."""
    inner = MpiTransport(world.communicator.Dup(), ReductionScratch())
    slow = EmulatedTransport(inner, world.communicator.Dup(), EmulatedLink(LINK, clock, clock.sleep))
    ranks = tuple(range(world.size))
    return Group(
        ("world",),
        ranks,
        GroupTransports(world.communicator, slow, slow),
        torch.device("cpu"),
        Ledger(),
        set(),
    )


def test_each_direction_takes_one_after_the_other() -> None:
    link = EmulatedLink(LINK)
    assert link.reserve(Traffic(1000, 0, 1), 10.0) == 11.5
    assert link.reserve(Traffic(0, 2000, 1), 10.0) == 12.5
    assert link.reserve(Traffic(500, 100, 0), 10.0) == 12.1
    assert link.reserve(Traffic(0, 0, 3), 10.0) == 11.5
    assert link.reserve(Traffic(1000, 0, 0), 20.0) == 21.0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_call_moves_once_all_are_there_and_takes_its_time(world: World) -> None:
    """An all-reduce of 2000 bytes sends and receives 1000 bytes in each of two rounds."""
    clock = Clock(3.0 * world.rank)
    group = slow_group(world, clock)
    values = torch.arange(500.0) + world.rank
    assert torch.equal(group.all_reduce(values), 2 * torch.arange(500.0) + 1)
    assert clock.now == 3.0 + 2.0 + 2 * 0.5
    clock.now = 10.0
    assert group.all_gather(torch.full((250,), float(world.rank))).tolist() == [0.0] * 250 + [1.0] * 250
    assert clock.now == 10.0 + 1.0 + 0.5
    group.barrier()
    assert clock.now == 12.0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_is_started_moves_while_the_rank_computes(world: World) -> None:
    clock = Clock()
    group = slow_group(world, clock)
    first, second, third = (torch.ones(500) for _ in range(3))
    works = [group.start_all_reduce(values) for values in (first, second)]
    world.communicator.barrier()
    clock.now = 1.0
    assert not works[0].test() and not works[1].test()
    clock.now = 5.0  # two seconds each, one behind the other, and the last one's two rounds
    for work in works:
        work.wait()
    assert clock.now == 5.0
    work = group.start_all_reduce(third)
    clock.now = 6.0
    work.wait()
    assert clock.now == 5.0 + 2.0 + 2 * 0.5
    assert first[0] == second[0] == third[0] == 2.0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_message_counts_from_when_it_is_sent(world: World) -> None:
    """The receiver may wait earlier. The send is complete when its bytes have left the link."""
    clock = Clock(5.0 * world.rank)
    group = slow_group(world, clock)
    if world.rank == 0:
        received = group.start_recv(torch.empty(250), 1).wait()
        assert received.tolist() == [7.0] * 250
        assert clock.now == 5.0 + 1.0 + 0.5
    else:
        group.send(torch.full((250,), 7.0), 0)
        assert clock.now == 5.0 + 1.0
    world.communicator.barrier()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "layout", ["layout.zero=1", "layout.tensor=2", "layout.pipeline=2", "layout.context=2"]
)
def test_no_bit_of_a_run_changes(world: World, layout: str) -> None:
    deck = small_deck(layout)
    plain = trainer(world, deck)
    own = World(world.communicator.Dup())
    slow = trainer(own, deck.with_keys(communication={"emulate": "1 Gbit/s, 10 us"}))
    assert isinstance(slow.engine.mesh.group("data", "context").host, EmulatedTransport)
    assert isinstance(own.everyone.host, EmulatedTransport)
    assert [step.metrics for step in slow.train(2)] == [step.metrics for step in plain.train(2)]
    values = plain.parameters()
    assert all(torch.equal(each, values[name]) for name, each in slow.parameters().items())
    own.emulate_link(None)
    assert isinstance(own.everyone.host, MpiTransport)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_of_emulated_nodes_each_has_a_link(world: World) -> None:
    """Ranks of a node have equal shares of its link, and transfers inside the node take no time."""
    clock = Clock()
    own = World(world.communicator.Dup())
    own.emulate_nodes(2)
    link = small_deck("communication.emulate=16 kbit/s, 500 ms", "communication.ranks_per_node=2")
    assert link.communication.link == LINK
    own.emulate_link(link.communication.link)
    made = Mesh(own, {"data": 2, "tensor": 2}, link.communication.requested_transport)
    everyone = Mesh(own, {"data": 4}, "shared").group("data")
    groups = {"inside": made.group("tensor"), "across": made.group("data"), "all": everyone}
    took = {}
    for name, group in groups.items():
        assert isinstance(group.host, EmulatedTransport)
        group.host.link = EmulatedLink(LINK, clock, clock.sleep)
        if isinstance(group.host.inner, HierarchicalTransport):
            group.host.inner.least_bytes = 1
        began = clock.now
        group.all_reduce(torch.ones(1000))
        took[name] = clock.now - began
    # Of 4000 bytes two halves each way; a half there and one back, in one hop each for the first node.
    assert took == {"inside": 0.0, "across": 4.0 + 2 * 0.5, "all": 2.0 + (1 + (world.rank < 2)) * 0.5}
    world.everyone.barrier()


@pytest.mark.mpi(min_size=4, max_size=4)
def test_no_bit_changes_on_emulated_nodes(world: World) -> None:
    deck = small_deck("layout.zero=1")
    plain = trainer(world, deck)
    own = World(world.communicator.Dup())
    keys = {"emulate": "1 Gbit/s, 10 us", "ranks_per_node": 2}
    slow = trainer(own, deck.with_keys(communication=keys))
    assert [step.metrics for step in slow.train(2)] == [step.metrics for step in plain.train(2)]


def test_a_link_is_for_one_machine(world: World) -> None:
    own = world.single_rank_world()
    own.nodes = 2
    deck = small_deck("communication.emulate=100 Mbit/s, 20 ms")
    with pytest.raises(HpctrainError, match=r"communication.emulate=.* requires all ranks on one machine"):
        trainer(own, deck)


@pytest.mark.parametrize("text", ["100", "100 Mb/s", "fast", "1 bit/s", "1 Gbit/s, 2 min"])
def test_invalid_links_are_refused(text: str) -> None:
    with pytest.raises(HpctrainError, match=r"communication.emulate=.*must be a link of at least 1 kbit/s"):
        small_deck(f"communication.emulate={text}")


def test_nccl_is_not_delayed() -> None:
    with pytest.raises(HpctrainError, match=r"communication.emulate.*delays messages between hosts"):
        small_deck("communication.emulate=1 Gbit/s", "communication.transport=shared")
    with pytest.raises(
        HpctrainError, match=r"communication.ranks_per_node.*emulation delays messages between hosts only"
    ):
        small_deck("communication.ranks_per_node=2", "communication.transport=nccl")
    with pytest.raises(HpctrainError, match=r"communication.emulate.*delays messages between hosts"):
        small_deck("communication.emulate=1 Gbit/s", "communication.transport=nccl")
