"""Common memory of ranks of a node exists as long as any of them uses it, and is counted once.

Tests of comm/transports/node_memory.py and comm/transports/shared.py.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.transport import TransportWork
from hpctrain.comm.world import World

pytestmark = pytest.mark.mpi(min_size=2)

LENGTH = 100_003


@pytest.fixture
def group(world: World) -> Group:
    return Mesh(world, {"data": world.size}, "shared").group("data")


def memory_of(group: Group) -> NodeMemory:
    assert isinstance(group.host, SharedTransport)
    return group.host.memory


def pages_of_node(group: Group) -> int:
    """Return the bytes that the system has allocated for the files of all ranks. Collective."""
    for _ in range(2):  # users first mark unused memory, then owners free it
        gc.collect()
        memory_of(group)._collect()
        group.barrier()
    local_bytes = os.fstat(memory_of(group)._file).st_blocks * 512
    return sum(group.all_gather_object(local_bytes))


def test_it_is_one_memory_of_pages_that_are_there_once(group: Group) -> None:
    before = pages_of_node(group)
    flats = [group.common_zeros(LENGTH, torch.float32) for _ in range(group.size)]
    owners = []
    for number, flat in enumerate(flats):
        assert flat is not None and not flat.any()
        group.barrier()
        if number == group.rank:
            flat.copy_(torch.arange(LENGTH) + number)
        group.barrier()
        assert torch.equal(flat, torch.arange(LENGTH) + float(number))
        place = memory_of(group).find(flat)
        assert place is not None
        assert group.all_gather_object(place) == [place] * group.size
        owners.append(place.owner)
    assert group.sharers == group.size
    assert sorted(owners) == list(group.ranks)  # each has its part of what is in common
    once = group.size * LENGTH * 4
    assert once <= pages_of_node(group) - before < once + group.size * 3 * 4096


def test_memory_is_freed_after_its_last_user(group: Group) -> None:
    """A user keeps the contents after the owner has deleted its tensor and allocated others."""
    before = pages_of_node(group)
    flat = group.common_zeros(LENGTH, torch.float32)
    assert flat is not None
    place = memory_of(group).find(flat)
    assert place is not None
    last = next(rank for rank in group.ranks if rank != place.owner)
    group.barrier()
    if group.ranks[group.rank] == last:
        flat.fill_(3.0)
        view = flat[1000:]
    del flat
    for _ in range(3):
        assert memory_of(group).empty((5000,), torch.float32) is not None
        group.barrier()
    assert pages_of_node(group) - before >= LENGTH * 4
    if group.ranks[group.rank] == last:
        assert bool((view == 3.0).all())
        del view
    assert pages_of_node(group) == before
    again = group.common_zeros(LENGTH, torch.float32)
    assert again is not None and not again.any()


def test_each_counts_a_part_of_it(group: Group) -> None:
    memory, size = memory_of(group), 1 << 24
    group.barrier()
    before, resident = memory.foreign_bytes(), rss()
    flat = group.common_zeros(size, torch.uint8)
    assert flat is not None
    group.barrier()
    assert not flat.any()
    own = rss() - resident - (memory.foreign_bytes() - before)
    assert own == pytest.approx(size / group.size, abs=1 << 20)
    group.barrier()


def rss() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("bytes_", [7, 900_000])
def test_gathered_pieces_are_visible_to_all_ranks(
    group: Group, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces have any length, ranks may be late, and no rank writes before the others have read."""
    assert isinstance(group.host, SharedTransport)
    sent, mpi = list[str](), group.host.mpi
    run = mpi.run

    def run_recorded(call: Call) -> TransportWork | None:
        sent.append(call.operation)
        return run(call)

    monkeypatch.setattr(mpi, "run", run_recorded)
    draw = random.Random(bytes_)
    sizes = [draw.randrange(bytes_) for _ in range(group.size)]
    sizes[0] += 1
    flat = group.common_zeros(sum(sizes), torch.uint8)
    assert flat is not None
    pieces = list(flat.split(sizes))
    for turn in range(30):
        late, blocking = draw.randrange(2 * group.size), draw.random() < 0.5
        if late == group.rank:
            time.sleep(0.003)
        pieces[group.rank].fill_(turn + group.rank)
        if blocking:
            whole = group.all_gather(pieces[group.rank], flat, sizes)
        else:
            whole = group.start_all_gather(pieces[group.rank], flat, sizes).wait()
        assert whole is flat
        if late == group.size + group.rank:
            time.sleep(0.003)
        for rank, piece in enumerate(pieces):
            assert not len(piece) or piece.unique().tolist() == [turn + rank], (turn, rank)
        group.barrier()
    assert set(sent) == {"barrier"}


def test_without_memory_there_is_no_common_tensor(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without free memory is enough."""
    monkeypatch.setattr(memory_of(group), "take", lambda _: None)
    assert group.common_zeros(LENGTH, torch.float32) is None


def test_messages_have_none(world: World) -> None:
    group = Mesh(world, {"data": world.size}, "mpi").group("data")
    assert group.sharers == 1
    assert group.common_zeros(LENGTH, torch.float32) is None


@pytest.mark.mpi(min_size=4)
def test_other_groups_move_what_they_gather_there(world: World) -> None:
    mesh = Mesh(world, {"data": world.size // 2, "tensor": 2}, "shared")
    data, tensor = mesh.group("data"), mesh.group("tensor")
    common = data.common_zeros(2 * LENGTH, torch.float32)
    assert common is not None
    tensor.all_gather(torch.full((LENGTH,), tensor.rank + 1.0), common)
    data.barrier()
    assert torch.equal(common, torch.arange(1.0, 3.0).repeat_interleave(LENGTH))
