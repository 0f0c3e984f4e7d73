"""Groups of several nodes whose ranks share memory give the same bits as groups that use MPI.

Tests of comm/transports/hierarchical.py, comm/transports/internode.py and host/topology.py, on
emulated nodes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.hierarchical import PIECE_BYTES, HierarchicalTransport
from hpctrain.comm.transports.mpi import MpiRequests, MpiTransport
from hpctrain.comm.transports.node_memory import MemoryLocation
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.traffic import traffic_of
from hpctrain.comm.world import World
from hpctrain.host.topology import Topology, ranks_per_node_of
from tests.comm.transports.test_shared import Random, rough

SEQUENCES = {4: 300}
"""Number of sequences by number of ranks; other numbers of ranks run fewer."""


def on_nodes(world: World, per_node: int, transport: str = "shared") -> Group:
    """Return a group of all ranks on emulated nodes of `per_node` ranks."""
    own = World(world.communicator.Dup())
    own.emulate_nodes(per_node)
    return Mesh(own, {"data": own.size}, transport).group("data")


@pytest.fixture(scope="module", params=[2, 4])
def groups(world: World, request: pytest.FixtureRequest) -> tuple[Group, Group]:
    """Return groups of all ranks over HierarchicalTransport, for tensors of any size, and over MPI."""
    if world.size <= request.param:
        pytest.skip("one node")
    nodes = on_nodes(world, request.param)
    assert isinstance(nodes.host, HierarchicalTransport)
    nodes.host.least_bytes = nodes.host.links.local.least_visible_bytes = 1
    return nodes, on_nodes(world, request.param, "mpi")


@pytest.fixture(autouse=True)
def together(world: World) -> Iterator[None]:
    """Let no rank begin another test while others still read its memory."""
    yield
    world.everyone.barrier()


@pytest.mark.mpi(min_size=4)
def test_random_sequences_are_those_of_messages(groups: tuple[Group, Group]) -> None:
    transport = groups[0].host
    assert isinstance(transport, HierarchicalTransport)
    for seed in range(SEQUENCES.get(groups[0].size, 40)):
        transport.piece_bytes = random.Random(seed).choice((1000, 3000, 1 << 20))
        Random(seed, groups).run()


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("waits", ["for counters", "for a small sum", "for a receiver"])
def test_messages_to_other_nodes_proceed_while_a_rank_waits_in_its_node(world: World, waits: str) -> None:
    """A large one, without which a rank of the other node lets that one not come who is waited for.

    Where ranks may read each other's memory, as within one machine, MPI needs no sender for it.
    """
    everyone = on_nodes(world, 2)
    own = World(world.communicator.Dup())
    own.emulate_nodes(2)
    near = Mesh(own, {"data": 2, "tensor": 2}, "shared").group("tensor")
    large, word, came = torch.arange(1 << 20), torch.ones(1), True
    sums = torch.ones(1000 if waits == "for a small sum" else 1 << 18)

    def meet() -> None:
        if waits != "for a receiver":
            near.all_reduce(sums)
        elif near.rank == 0:
            near.send(near.empty(sums.shape, sums.dtype).fill_(1.0), 1)
        else:
            near.recv(sums, 0)

    if world.rank == 1:
        near.send(word, 0)  # one that waits to be received stands in nobody's way
    everyone.barrier()
    if world.rank == 0:
        work = everyone.start_send(large, 2)
        meet()
        work.wait()
        near.recv(word, 1)
    elif world.rank == 1:
        coming = everyone.start_recv(word, 2)
        for _ in range(20_000):
            if came := coming.test():
                break
            time.sleep(1e-3)
        meet()
        coming.wait()
    elif world.rank == 2:
        assert torch.equal(everyone.recv(torch.empty_like(large), 0), large)
        everyone.send(word, 1)
    assert all(world.everyone.all_gather_object(came))


def call_of(operation: str, group: Group, dtype: torch.dtype, elements: int) -> Call:
    """Return a call of this rank on random numbers, with pieces of different sizes if it has pieces."""
    sizes = [elements + 7 * rank for rank in range(group.size)]
    own, whole = sizes[group.rank], sum(sizes)
    if operation == "all_reduce":
        tensor = rough(group.rank, (whole,), dtype, 3)
        return Call(operation, tensor, tensor, reduction="sum")
    if operation == "reduce_scatter":
        tensor, output = rough(group.rank, (whole,), dtype, 3), torch.empty(own, dtype=dtype)
        return Call(operation, tensor, output, reduction="sum", counts=sizes)
    output = torch.empty(whole, dtype=dtype)
    return Call(operation, rough(group.rank, (own,), dtype, 3), output, bytes=output.nbytes, counts=sizes)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_links_carry_what_is_planned(
    groups: tuple[Group, Group], operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node sends each byte once in each direction. Partial sums of half types are sent in fp32."""
    group = groups[0]
    transport = group.host
    assert isinstance(transport, HierarchicalTransport)
    monkeypatch.setattr(transport, "piece_bytes", 4000)
    links, moved = transport.links, [0, 0]
    start_message = MpiTransport.start_message

    def counted(across: MpiTransport, tensor: torch.Tensor, peer: int, tag: int, sends: bool) -> MpiRequests:
        if across is links.across and tensor.numel() > 1:
            moved[0 if sends else 1] += tensor.nbytes
        return start_message(across, tensor, peer, tag, sends)

    monkeypatch.setattr(MpiTransport, "start_message", counted)
    call = call_of(operation, group, dtype, 5000)
    nodes = [rank // links.local_size for rank in range(group.size)]
    if not transport.crosses_links_once(call):
        assert (operation, dtype, links.local_size) == ("reduce_scatter", torch.bfloat16, 2)
        return
    planned = traffic_of(call, group.rank, group.size, nodes, crosses_links_once=True)
    transport.run(call)
    # What a rank carries of an all-reduce is its slice, which may have an element more than another one.
    assert moved == pytest.approx(planned[:2], rel=1e-3)
    group.barrier()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("elements", [4_000, 200_000, 4_000_000])
def test_memory_for_pieces_is_what_is_planned(
    groups: tuple[Group, Group], scattered: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = groups[0].host
    assert isinstance(transport, HierarchicalTransport)
    monkeypatch.setattr(transport, "piece_bytes", PIECE_BYTES)
    taken: list[int] = []
    take = ReductionScratch.take

    def take_recorded(scratch: ReductionScratch, count: int, like: torch.Tensor) -> torch.Tensor:
        taken.append(1 << (count * like.itemsize - 1).bit_length())
        return take(scratch, count, like)

    monkeypatch.setattr(ReductionScratch, "take", take_recorded)
    tensor = torch.ones(elements, dtype=torch.float32 if scattered else torch.bfloat16)
    if scattered:
        groups[0].reduce_scatter(tensor)
    else:
        groups[0].all_reduce(tensor)
    assert taken == [transport.scratch_bytes(elements, tensor.itemsize, scattered)]
    groups[0].barrier()


@pytest.mark.mpi(min_size=4)
def test_memory_is_that_of_the_node(groups: tuple[Group, Group]) -> None:
    transport = groups[0].host
    assert isinstance(transport, HierarchicalTransport)
    local, rank = transport.links.local_size, groups[0].rank
    assert set(transport.links.memory._maps) == set(range(rank // local * local, (rank // local + 1) * local))


@pytest.mark.mpi(min_size=4)
def test_gather_into_shared_memory_copies_nothing(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all ranks are gathered in memory of each node's first rank, without a copy."""
    group = groups[0]
    transport = group.host
    assert isinstance(transport, HierarchicalTransport)
    links, memory = transport.links, transport.links.memory
    made = memory.empty((group.size, 1000), torch.float32) if links.local_rank == 0 else None
    places = group.all_gather_object(None if made is None else memory.find(made))
    place = MemoryLocation(*places[links.node * links.local_size])
    common = memory.tensor_at(place, 1000 * group.size, torch.float32).view(group.size, 1000)
    common[group.rank] = float(group.rank + 1)
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copied.append(other))
    gathered = group.all_gather(common[group.rank : group.rank + 1], common)
    assert not copied
    assert gathered[:, 0].tolist() == [rank + 1.0 for rank in range(group.size)]
    group.barrier()


@pytest.mark.mpi(min_size=4, max_size=4)
def test_groups_go_by_nodes(world: World) -> None:
    """Groups use shared memory in a node, MPI with one rank per node, and both otherwise."""
    own = World(world.communicator.Dup())
    own.emulate_nodes(2)
    mesh = Mesh(own, {"data": 2, "tensor": 2}, "shared")
    everyone = Mesh(own, {"data": 4}, "shared").group("data")
    assert isinstance(mesh.group("tensor").host, SharedTransport)
    assert isinstance(mesh.group("data").host, MpiTransport)
    assert isinstance(everyone.host, HierarchicalTransport)
    assert mesh.nodes(everyone) == [0, 0, 1, 1]
    own.emulate_nodes(3)
    uneven = Mesh(own, {"data": 4}, "shared").group("data")
    assert isinstance(uneven.host, MpiTransport)
    own.emulate_nodes(None)
    assert isinstance(Mesh(own, {"data": 4}, "shared").group("data").host, SharedTransport)


def test_nodes_are_cut_into_blocks() -> None:
    topology = Topology([0, 1, 0, 1, 0, 1])
    assert topology.ranks_per_node == 3
    topology.emulate(2)
    assert topology.nodes == (0, 1, 0, 1, 2, 3)
    assert topology.ranks_per_node == 2
    topology.emulate(None)
    assert topology.nodes == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0, 1, 1], 2),
        ([0, 0, 0, 0], 4),
        ([0, 1, 2], 1),
        ([0, 1, 0, 1], 0),
        ([0, 0, 1, 1, 0, 0], 0),
        ([0, 0, 1, 1, 1, 2], 0),
        ([0, 0, 0, 1], 0),
    ],
)
def test_neighbours_lie_side_by_side(nodes: list[int], expected: int) -> None:
    assert ranks_per_node_of(nodes) == expected
