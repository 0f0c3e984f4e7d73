"""Messages within a node arrive as with MPI, also while the sender computes.

Tests of comm/transports/node_messages.py.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports import node_messages as module
from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.work import Work
from hpctrain.comm.world import World

pytestmark = pytest.mark.mpi(min_size=2)

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.fixture(scope="module", params=["a node", "nodes of two"])
def group(world: World, request: pytest.FixtureRequest) -> Group:
    """Return a group of all ranks in which messages of any size within a node use shared memory."""
    own = World(world.communicator.Dup())
    if request.param == "nodes of two":
        if world.size < 4:
            pytest.skip("one node")
        own.emulate_nodes(2)
    made = Mesh(own, {"data": own.size}, "shared").group("data")
    inside = inside_of(made)
    inside.least_message_bytes = inside.least_visible_bytes = 1
    return made


def inside_of(group: Group) -> SharedTransport:
    """Return the transport among the ranks of this node."""
    host = group.host.links.local if isinstance(group.host, HierarchicalTransport) else group.host
    assert isinstance(host, SharedTransport)
    return host


def memory_of(group: Group) -> NodeMemory:
    return inside_of(group).memory


def sent(number: int, sender: int, receiver: int, dtype: torch.dtype, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + 10 * sender + receiver)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    return values > 0 if dtype == torch.bool else (100 * values).to(dtype)


@pytest.mark.parametrize("seed", range(12))
def test_random_messages_arrive_in_the_order_of_their_tags(group: Group, seed: int) -> None:
    """Many between all pairs, of any type and size, from memory that others see and from other memory; sent
    and received in other orders, blocking or not, some late; none is taken for another one.
    """
    draw = random.Random(seed)
    letters = [
        (
            number,
            draw.randrange(group.size),
            draw.randrange(group.size),
            draw.randrange(3),
            draw.choice(TYPES),
            draw.choice((1, 7, 5000)),
            draw.random() < 0.5,
        )
        for number in range(30)
    ]
    own = random.Random(100 * seed + group.rank)
    order = sorted(letters, key=lambda letter: (letter[3] - seed) % 3)  # as sent: tag by tag
    receiving: list[tuple[Work[Tensor], Tensor]] = []
    for number, sender, receiver, tag, dtype, count, seen in letters:
        if receiver == group.rank:
            made = group.empty((count,), dtype) if seen else torch.empty(count, dtype=dtype)
            expected = sent(number, sender, receiver, dtype, count)
            receiving.append((group.start_recv(made, sender, tag), expected))
    sending: list[tuple[Work[None], Tensor, Tensor]] = []
    for number, sender, receiver, tag, dtype, count, seen in order:
        if sender == group.rank:
            whole = sent(number, sender, receiver, dtype, count)
            given = (group.empty((count,), dtype) if seen else torch.empty(count, dtype=dtype)).copy_(whole)
            sending.append((group.start_send(given, receiver, tag), given, whole))
            if own.random() < 0.1:
                time.sleep(0.002)
    own.shuffle(receiving)
    for work, expected in receiving:
        assert torch.equal(work.wait().view(torch.uint8), expected.view(torch.uint8))
    for done, given, whole in sending:
        done.wait()
        assert torch.equal(given.view(torch.uint8), whole.view(torch.uint8))
    group.barrier()


def test_senders_may_change_copied_tensors_at_once(group: Group) -> None:
    """A tensor in shared memory is not copied, and may change only after it was received."""
    copied, seen = torch.full((1000,), 1.0), memory_of(group).empty((1000,), torch.float32)
    assert seen is not None
    seen.fill_(2.0)
    if group.rank == 0:
        works = [group.start_send(tensor, 1) for tensor in (copied, seen)]
        works[0].wait()
        copied.fill_(-1.0)
        assert not works[1].test()
        group.barrier()
        works[1].wait()
        seen.fill_(-1.0)
    else:
        group.barrier()
    if group.rank == 1:
        assert [float(group.recv(torch.empty(1000), 0).sum()) for _ in range(2)] == [1000.0, 2000.0]


def test_buffers_are_reused(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender has a buffer per message in flight and keeps only some of them afterwards."""
    memory = memory_of(group)
    memory.message_buffers.clear()
    monkeypatch.setattr(module, "_SPARE_BUFFERS", 2)

    def pass_on(elements: int, count: int) -> None:
        tensor = torch.full((elements,), float(elements))
        if group.rank == 0:
            works = [group.start_send(tensor, 1) for _ in range(count)]
            for work in works:
                work.wait()
        group.barrier()
        if group.rank == 1:
            for _ in range(count):
                assert torch.equal(group.recv(torch.empty(elements), 0), tensor)
        group.barrier()

    for _ in range(5):
        pass_on(3000, 1)
    assert len(memory.message_buffers) == (group.rank == 0)
    pass_on(3000, 6)
    assert len(memory.message_buffers) == 6 * (group.rank == 0)
    pass_on(2000, 1)  # fits
    assert len(memory.message_buffers) == 6 * (group.rank == 0)
    pass_on(50_000, 1)
    if group.rank == 0:
        assert [block.capacity for block in memory.message_buffers] == [12_000, 200_000]
        assert all(block.free for block in memory.message_buffers)


def test_missing_memory_is_an_error(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(group)
    memory.message_buffers.clear()
    monkeypatch.setattr(memory, "take", lambda _: None)
    if group.rank == 0:
        with pytest.raises(MemoryError, match="no memory left for messages"):
            group.send(torch.ones(1000), 1)
    group.barrier()


def test_short_and_very_long_messages_use_mpi(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Mesh(world, {"data": world.size}, "shared").group("data")
    assert isinstance(group.host, SharedTransport)
    memory = memory_of(group)
    memory.message_buffers.clear()
    monkeypatch.setattr("hpctrain.comm.transports.shared.MOST_MESSAGE_BYTES", 100_000)
    for size, ours in ((16_000, False), (20_000, True), (100_001, False)):
        tensor = torch.full((size,), 7, dtype=torch.uint8)
        if group.rank == 0:
            group.send(tensor, 1)
        elif group.rank == 1:
            assert torch.equal(group.recv(torch.zeros_like(tensor), 0), tensor)
        assert bool(memory.message_buffers) == (ours and group.rank == 0)
        group.barrier()
        memory.message_buffers.clear()


@pytest.mark.mpi(min_size=4)
def test_between_nodes_mpi_carries_them(group: Group) -> None:
    """Emulated nodes could see each other's memory."""
    memory = memory_of(group)
    for receiver, inside in ((1, True), (2, not isinstance(group.host, HierarchicalTransport))):
        memory.message_buffers.clear()
        tensor = torch.full((1000,), float(receiver))
        if group.rank == 0:
            group.send(tensor, receiver)
        elif group.rank == receiver:
            assert torch.equal(group.recv(torch.empty(1000), 0), tensor)
        assert bool(memory.message_buffers) == (inside and group.rank == 0)
        group.barrier()
