"""Tests of comm/transports/nccl.py with GPUs if there are any, otherwise over gloo with the rules of NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.nccl import NcclTransport
from hpctrain.comm.transports.reduction import HALVES
from hpctrain.comm.transports.setting import TransportSetting
from hpctrain.comm.world import World
from tests.comm.transports.gloo_as_nccl import NcclRules

pytestmark = pytest.mark.mpi(min_size=2)

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable with which NCCL 2.30 lets several ranks share a GPU."""


@pytest.fixture
def group(world: World) -> Iterator[Group]:
    """Return the group of all ranks over the NCCL transport, with channels."""
    whole, ordinary = world.everyone, world.everyone.host
    if world.device.type == "cuda":
        if world.local_size > torch.cuda.device_count() and os.environ.get(SHARED) != "1":
            pytest.skip("the ranks share a GPU")
        yield Mesh(world, {"pipeline": world.size}, "nccl").group("pipeline")
        return
    world.open_store()
    groups, axes = world.groups, ("pipeline",)
    setting = TransportSetting(
        world.communicator, axes, world.device, groups.topology.nodes, groups.scratch, None, groups.store
    )
    whole.host = NcclRules(setting, True)
    yield whole
    whole.host = ordinary


def parts(group: Group, rows: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    drawn = [torch.randn((rows, 3), generator=generator) * 3 for _ in range(group.size)]
    return [part.to(dtype).to(group.device) for part in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_reductions(group: Group, dtype: torch.dtype) -> None:
    size, rank = group.size, group.rank
    for rows in (0, 4, 7000):
        inputs = parts(group, rows * size, dtype)
        wide = [part.double() for part in inputs]
        for operation in ("sum", "max"):
            stacked = torch.stack(wide)
            expected = stacked.amax(0) if operation == "max" or dtype == torch.bool else stacked.sum(0)
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}.get(dtype, 0.0)

            def close(result: Tensor, reference: Tensor, atol: float = tolerance) -> None:
                torch.testing.assert_close(result.double(), reference, atol=atol, rtol=atol)

            close(group.all_reduce(inputs[rank].clone(), operation), expected)
            reduced = group.reduce(inputs[rank].clone(), size - 1, operation)
            close(reduced, expected if rank == size - 1 else wide[rank])
            mine = expected[rank * rows : (rank + 1) * rows]
            close(group.reduce_scatter(inputs[rank], reduction=operation), mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
def test_movement(group: Group, dtype: torch.dtype) -> None:
    size, rank = group.size, group.rank
    sizes = [(peer + 1) % 3 for peer in range(size)]
    for rows, given in (([4] * size, None), (sizes, sizes)):
        inputs = [parts(group, rows[peer], dtype)[peer] for peer in range(size)]
        whole, mine = torch.cat(inputs), inputs[rank]
        assert torch.equal(group.all_gather(mine, sizes=given), whole)
        gathered = group.gather(mine, 0, sizes=given)
        assert gathered is None if rank else torch.equal(gathered, whole)
        scattered = group.scatter(whole if rank == 0 else None, torch.empty_like(mine), 0, sizes=given)
        assert torch.equal(scattered, mine)
        assert torch.equal(group.broadcast(mine.new_tensor([rank + 1.0]), size - 1), mine.new_tensor([size]))
    table = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    inputs = [parts(group, sum(table[source]), dtype)[source] for source in range(size)]
    received = group.all_to_all(inputs[rank], None, table[rank], [row[rank] for row in table])
    assert torch.equal(received, torch.cat([inputs[peer].split(table[peer])[rank] for peer in range(size)]))


def test_native_sums_of_halves(group: Group) -> None:
    """Halves go to the library itself, and not as messages to the ranks that add them."""
    transport = group.accelerator if group.device.type == "cuda" else group.host
    assert isinstance(transport, NcclTransport)
    transport._sum_types |= HALVES
    summed, adding = list[torch.dtype](), transport.group.allreduce
    transport.group.allreduce = lambda tensors: (summed.append(tensors[0].dtype), adding(tensors))[1]
    inputs = parts(group, 50, torch.bfloat16)
    total = group.all_reduce(inputs[group.rank].clone())
    assert summed == [torch.bfloat16]
    torch.testing.assert_close(total.float(), torch.stack(inputs).float().sum(0), atol=0.05, rtol=0.02)


def test_messages_of_each_direction_are_independent(group: Group) -> None:
    """Ranks receive after all messages were sent, and those from the next rank first."""
    size, rank = group.size, group.rank

    def targets(sender: int) -> list[int]:
        return [(sender + step) % size for step in (1, 1, -1, -1)]

    sent = [
        group.start_send(torch.full((5,), 10.0 * rank + number, device=group.device), peer)
        for number, peer in enumerate(targets(rank))
    ]
    for source in dict.fromkeys(((rank + 1) % size, (rank - 1) % size)):
        for number in (number for number, peer in enumerate(targets(source)) if peer == rank):
            received = group.start_recv(torch.empty(5, device=group.device), source).wait()
            assert received.eq(10.0 * source + number).all()
    for each in sent:
        each.wait()


def test_a_ring_may_start_with_its_receives(group: Group) -> None:
    size, rank = group.size, group.rank
    receiving = group.start_recv(torch.empty(5, device=group.device), (rank - 1) % size)
    sending = group.start_send(torch.full((5,), float(rank), device=group.device), (rank + 1) % size)
    assert receiving.wait().eq(float((rank - 1) % size)).all()
    sending.wait()


def test_a_blocking_receive_meets_a_started_send(group: Group) -> None:
    size, rank = group.size, group.rank
    sending = group.start_send(torch.full((5,), float(rank), device=group.device), (rank + 1) % size)
    received = group.recv(torch.empty(5, device=group.device), (rank - 1) % size)
    assert received.eq(float((rank - 1) % size)).all()
    sending.wait()


def test_the_host_does_not_poll_what_streams_order(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for one of two started operations is a wait on the stream, and polls neither of them."""

    def poll(_: object) -> None:
        raise AssertionError("the host polls")

    monkeypatch.setattr("hpctrain.comm.work.wait_until", poll)
    works = [group.start_all_reduce(torch.full((3,), float(count), device=group.device)) for count in (1, 2)]
    assert [float(work.wait()[0]) for work in works] == [group.size, 2 * group.size]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
def test_started_operations_and_streams(group: Group) -> None:
    size, rank = group.size, group.rank
    work = group.start_all_reduce(torch.full((1 << 20,), rank + 1.0, device=group.device))
    incoming = torch.empty(1 << 20, device=group.device)
    ring = [
        group.start_recv(incoming, (rank - 1) % size),
        group.start_send(torch.full_like(incoming, rank), (rank + 1) % size),
    ]
    assert work.wait().eq(size * (size + 1) / 2).all()
    for each in ring:
        each.wait()
    assert incoming.eq((rank - 1) % size).all()
