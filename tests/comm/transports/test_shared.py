"""Operations through the memory of a node give the same bits as MPI.

Tests of comm/transports/shared.py, comm/transports/node_operation.py, comm/transports/progress_counters.py,
comm/transports/small_messages.py and comm/transports/node_memory.py; tests/comm/test_group.py has every
primitive, type and form.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh, choose_transport
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import SLOTS
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.small_messages import small_operation_bytes
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

pytestmark = pytest.mark.mpi(min_size=2)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
SEQUENCES = {2: 100, 4: 1000}
"""Number of sequences by number of ranks; other numbers of ranks run fewer."""


@pytest.fixture(scope="module")
def groups(world: World) -> tuple[Group, Group]:
    """Return groups of all ranks over shared memory, for tensors of any size, and over MPI."""
    own = Mesh(world, {"data": world.size}, "shared").group("data")
    shared = own.host
    assert isinstance(shared, SharedTransport)
    shared.least_bytes = shared.least_moved_bytes = shared.least_visible_bytes = 1
    shared.small_operations.least_bytes = 0
    return own, Mesh(world, {"data": world.size}, "mpi").group("data")


def memory_of(group: Group) -> NodeMemory:
    assert isinstance(group.host, SharedTransport)
    return group.host.memory


def rough(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return the input of a rank. Sums of three or more of them depend on their order."""
    generator = torch.Generator().manual_seed(31 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 3, shape, generator=generator)).to(dtype)


class Random:
    """Random sequence of operations, the same on all ranks, each over shared memory and over MPI."""

    def __init__(self, seed: int, groups: tuple[Group, Group]) -> None:
        self.draw = random.Random(seed)
        self.seed, self.groups = seed, groups
        self.rank, self.size = groups[0].rank, groups[0].size

    def run(self) -> None:
        """Run the sequence, with several operations in flight and ranks that begin some of them late."""
        waiting: list[tuple[list[Work[Tensor]] | None, list[Tensor]]] = []
        for number in range(self.draw.randint(1, 4)):
            late = self.draw.randrange(10 * self.size)
            if late == self.rank:
                time.sleep(0.002)
            blocking = self.draw.random() < 0.5
            waiting.append(self.operation(100 * self.seed + number, blocking))
            if self.draw.random() < 0.3:
                self.compare(waiting)
        self.draw.shuffle(waiting)
        self.compare(waiting)

    def compare(self, waiting: list[tuple[list[Work[Tensor]] | None, list[Tensor]]]) -> None:
        """Compare the results of both groups, and the inputs, which must not have changed."""
        for works, tensors in waiting:
            results = [work.wait() for work in works or ()]
            for ours, theirs in ((results[:1], results[1:]), (tensors[::2], tensors[1::2])):
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(
                        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
                    )
        waiting.clear()

    def operation(self, seed: int, blocking: bool) -> tuple[list[Work[Tensor]], list[Tensor]]:
        draw, size = self.draw, self.size
        kind = draw.choice(
            ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter", "all_to_all", "uneven")
        )
        dtype = draw.choice(FLOATS if kind in {"all_reduce", "reduce_scatter"} else ALL)
        root, reduced = draw.randrange(size), draw.choice(("sum", "max", "min"))
        width = draw.choice((1, 3, 1000))
        sizes = [draw.randrange(5) for _ in range(size)] if draw.random() < 0.5 else None
        rows = draw.randrange(1, 4)
        table = [[draw.randrange(4) for _ in range(size)] for _ in range(size)]
        whole = rows * size if sizes is None else sum(sizes)
        own = rows if sizes is None else sizes[self.rank]
        seen = [draw.random() < 0.5 for _ in range(2 * size)][self.rank :: size]
        in_place = draw.random() < 0.3
        works, kept = list[Work[Tensor]](), list[Tensor]()
        for group in self.groups:

            def made(count: int, place: int, filled: bool = True, group: Group = group) -> Tensor:
                shape = (count, width)
                empty = group.empty(shape, dtype) if seen[place] else torch.empty(shape, dtype=dtype)
                return empty.copy_(rough(self.rank, shape, dtype, seed)) if filled else empty

            first = sum(sizes[: self.rank]) if sizes is not None else rows * self.rank
            match kind:
                case "all_reduce":
                    work = group.start_all_reduce(made(whole, 0), reduced, blocking)
                case "reduce_scatter":
                    tensor = made(whole, 0)
                    output = tensor[first : first + own] if in_place else made(own, 1, False)
                    kept.append(tensor)
                    work = group.start_reduce_scatter(tensor, output, sizes, reduced, blocking)
                case "all_gather":
                    output = made(whole, 1, False)
                    part = output[first : first + own] if in_place else made(own, 0)
                    part.copy_(rough(self.rank, (own, width), dtype, seed))
                    work = group.start_all_gather(part, output, sizes, blocking)
                case "broadcast":
                    work = group.start_broadcast(made(whole, 0), root, blocking)
                case "scatter":
                    tensor = made(whole, 0) if self.rank == root else None
                    work = group.start_scatter(tensor, made(own, 1, False), root, sizes, blocking)
                case "all_to_all":
                    work = group.start_all_to_all(made(rows * size, 0), None, None, None, blocking)
                case _:
                    sent, received = table[self.rank], [row[self.rank] for row in table]
                    work = group.start_all_to_all(made(sum(sent), 0), None, sent, received, blocking)
            works.append(work)
        return works, kept


def test_random_sequences_are_those_of_messages(groups: tuple[Group, Group]) -> None:
    shared = groups[0].host
    assert isinstance(shared, SharedTransport)
    for seed in range(SEQUENCES.get(groups[0].size, 30)):
        draw = random.Random(seed)
        shared.round_bytes = draw.choice((1000, 30000, 1 << 22))
        shared.small_operations.most_bytes = draw.choice((0, small_operation_bytes(shared.size)))
        Random(seed, groups).run()


def test_more_operations_than_slots_may_be_in_flight(groups: tuple[Group, Group]) -> None:
    group = groups[0]
    tensors = [torch.full((100,), float(group.rank + number)) for number in range(2 * SLOTS + 3)]
    works = [group.start_all_reduce(tensor) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    total = sum(range(group.size))
    assert [float(tensor[0]) for tensor in tensors] == [
        total + group.size * number for number in range(len(tensors))
    ]


def test_gather_within_one_memory_copies_nothing(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces of all ranks are rows of one tensor in the memory of rank 0."""
    group = groups[0]
    memory = memory_of(group)
    rows = 1 << 20  # too large for SmallOperations
    made = memory.empty((group.size, rows), torch.float32) if group.rank == 0 else None
    place = group.broadcast_object(None if made is None else memory.find(made))
    common = memory.tensor_at(MemoryLocation(*place), rows * group.size, torch.float32).view(group.size, rows)
    common[group.rank] = float(group.rank + 1)
    copied: list[Tensor] = []
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: copied.append(other))
    gathered = group.all_gather(common[group.rank : group.rank + 1], common)
    assert not copied
    assert gathered[:, 0].tolist() == [rank + 1.0 for rank in range(group.size)]
    group.barrier()


@pytest.mark.parametrize("waits", ["for counters", "for a small sum", "for a receiver", "for one of two"])
def test_waiting_ranks_let_their_messages_proceed(
    world: World, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """The other ranks join only after rank 0 has let MPI make progress."""
    group = Mesh(World(world.communicator.Dup()), {"data": world.size}, "shared").group("data")
    memory, tensor, seen = (
        memory_of(group),
        torch.ones(100 if waits == "for a small sum" else 1 << 18),
        True,
    )
    assert isinstance(group.host, SharedTransport)
    group.host.small_operations.least_bytes = 0
    own = memory.take(8) if world.rank == 0 else None
    word, progress = memory.words(MemoryLocation(0, world.everyone.broadcast_object(own)), 1), memory.progress

    def helps() -> None:
        word[0] = 1
        progress()

    if world.rank == 0:
        monkeypatch.setattr(memory, "progress", helps)
    group.all_reduce(tensor)  # where they meet is made now
    world.everyone.barrier()
    if world.rank == 0:
        word[0] = 0
    world.everyone.barrier()
    if world.rank:
        for _ in range(20_000):
            if seen := bool(word[0]):
                break
            time.sleep(1e-3)
    if waits == "for one of two":
        works = [group.start_all_reduce(each) for each in (tensor, tensor.clone())]
        works[1].wait()
        works[0].wait()
    elif waits != "for a receiver":
        group.all_reduce(tensor)
    elif world.rank == 0:
        group.send(group.empty(tensor.shape, tensor.dtype).fill_(1.0), 1)
    elif world.rank == 1:
        group.recv(tensor, 0)
    assert all(world.everyone.all_gather_object(seen))


@pytest.mark.parametrize("small", [False, True])
def test_later_groups_reuse_counters(world: World, small: bool) -> None:
    """Counts of operations continue, so that no rank mistakes those of an earlier group for its own."""
    gc.collect()
    kept = set()
    for number in range(5):
        group = Mesh(world, {"data": world.size}, "shared").group("data")
        assert isinstance(group.host, SharedTransport)
        memory = memory_of(group)
        group.host.least_bytes, group.host.small_operations.least_bytes = 1, 0
        if not small:
            group.host.small_operations.most_bytes = -1
        for again in range(number + 1):
            tensor = torch.full((10,), float(group.rank * number + again))
            group.all_reduce(tensor)
            assert float(tensor[3]) == number * sum(range(group.size)) + group.size * again
        del group
        gc.collect()
        kept.add(len(memory.reusable.get(("small operations", *range(world.size)), ())))
    assert len(kept) == 1 and (kept != {0} or not small)


def test_memory_is_freed_and_reused(world: World) -> None:
    memory = NodeMemory(world.rank, 1 << 20)
    first, second = (memory.empty((3, 5000), torch.float32) for _ in range(2))
    assert first is not None and second is not None
    places = memory.find(first), memory.find(second)
    assert places[0] is not None and places[1] is not None and places[0] != places[1]
    assert memory.find(second[1:]) == MemoryLocation(world.rank, places[1].offset + 5000 * 4)
    assert memory.find(torch.empty(5000)) is None
    first.fill_(3.0)
    view = first[2]
    del first
    assert float(view[-1]) == 3.0
    del view
    both = memory.empty((5000,), torch.float32)
    assert both is not None and memory.find(both) == places[0]
    assert not both.any()  # the system has had it meanwhile
    del both, second
    third = memory.empty((6, 5000), torch.float32)
    assert third is not None and memory.find(third) == places[0]
    assert memory.empty((1 << 20,), torch.uint8) is None
    memory.close()


def test_memory_of_other_ranks_is_foreign(groups: tuple[Group, Group]) -> None:
    group, size = groups[0], 1 << 24
    memory = memory_of(group)
    own = memory.empty((size,), torch.uint8)
    assert own is not None
    own.fill_(1)
    for _ in range(2):  # first all ranks free what other tests have left
        gc.collect()
        before = memory.foreign_bytes()
        group.barrier()
    places = group.all_gather_object(memory.find(own))
    other = memory.tensor_at(MemoryLocation(*places[1 - min(1, group.rank)]), size, torch.uint8)
    assert int(other.max()) == 1
    assert size <= memory.foreign_bytes() - before < size + (1 << 20)
    group.barrier()


@pytest.fixture
def fresh(world: World) -> World:
    """Return a world that has not opened shared memory."""
    return World(world.communicator.Dup())


def refuse(function: Callable[..., object], when: bool) -> Callable[..., object]:
    def refused(*arguments: object, **options: object) -> object:
        if when:
            raise OSError("not here")
        return function(*arguments, **options)

    return refused


@pytest.mark.parametrize("what", ["memfd_create", "open"])
def test_without_shared_memory_mpi_is_used(
    fresh: World, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If one rank cannot share memory, all ranks use MPI and get the reason."""
    with monkeypatch.context() as patched:
        patched.setattr(os, what, refuse(getattr(os, what), fresh.rank == 1))
        with caplog.at_level(logging.WARNING):
            assert choose_transport(fresh, "auto") == "mpi"
    assert ("not here" in caplog.text) == (fresh.rank == 0)
    with pytest.raises(HpctrainError, match=r'communication\.transport = "shared": rank 1 .* not here'):
        choose_transport(fresh, "shared")


def test_memory_of_another_process_is_recognized(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in different containers may have the same process ids."""
    map_file = NodeMemory._map
    monkeypatch.setattr(NodeMemory, "_map", lambda memory, rank, _: map_file(memory, rank, memory._file))
    assert "cannot open the memory of rank 1: it is the memory of another process" in fresh.share_memory()


def test_small_operations_use_mpi_if_one_rank_has_no_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Mesh(world, {"data": world.size}, "shared").group("data")
    assert isinstance(group.host, SharedTransport)
    group.host.small_operations.least_bytes = 0
    memory = memory_of(group)
    key = ("small operations", *range(world.size))
    kept = memory.reusable.pop(key, [])
    if group.rank == 1:
        monkeypatch.setattr(memory, "take", lambda _: None)
    for _ in range(2):
        tensor = torch.full((100,), float(group.rank))
        group.all_reduce(tensor)
        assert float(tensor[-1]) == sum(range(group.size))
    assert group.host.small_operations.most_bytes < 0
    memory.reusable[key] += kept


def test_small_operations_wait_for_late_ranks(groups: tuple[Group, Group]) -> None:
    """Another rank is late each time, and all ranks wait for its values."""
    group = groups[0]
    assert isinstance(group.host, SharedTransport)
    group.host.small_operations.most_bytes = small_operation_bytes(group.size)
    for number in range(3 * group.size):
        if number % group.size == group.rank:
            time.sleep(0.02)
        tensor = torch.full((500,), float(group.rank + number))
        group.all_reduce(tensor)
        assert float(tensor[-1]) == sum(range(group.size)) + number * group.size
        parts = group.all_gather(torch.full((1 + number,), group.rank + number))
        assert parts.view(group.size, -1)[:, -1].tolist() == [number + rank for rank in range(group.size)]


def test_without_memory_tensors_are_private(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups[0]
    memory = memory_of(group)
    group.all_reduce(torch.ones(1000))  # from here on there is memory to copy through
    monkeypatch.setattr(memory, "take", lambda _: None)
    tensor = group.empty((1000,), torch.float32).fill_(1.0)
    assert memory.find(tensor) is None
    group.all_reduce(tensor)
    assert float(tensor[-1]) == group.size


@pytest.fixture(autouse=True)
def together(world: World) -> Iterator[None]:
    """Let no rank begin another test while others still read its memory."""
    yield
    world.everyone.barrier()
