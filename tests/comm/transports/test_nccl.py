"""Tests of the NCCL transport with GPUs if there are any, otherwise over a substitute of nccl4py by MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports import nccl
from hpctrain.comm.transports.nccl import NcclTransport
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import SteppedWork, Transport
from hpctrain.comm.world import World

pytestmark = pytest.mark.mpi

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable with which NCCL 2.30 lets several ranks share a GPU."""


class Communicator:
    """Substitute of nccl4py's Communicator in host memory, for some ranks of a transport."""

    def __init__(self, host: Transport, ranks: Sequence[int], pending: list[Any]) -> None:
        self.host, self.rank, self.pending = host, host.rank, pending
        self.ranks, self.connected = ranks, len(ranks) != 2

    def allreduce(self, source: Tensor, target: Tensor, operation: Reduction, stream: int) -> None:
        assert source.data_ptr() == target.data_ptr()
        self.host.run(Call("all_reduce", target, target, reduction=operation))

    def reduce(
        self, source: Tensor, target: Tensor | None, operation: Reduction, root: int, stream: int
    ) -> None:
        assert (target is None) == (self.rank != root)
        self.host.run(Call("reduce", source, target, reduction=operation, root=root))

    def reduce_scatter(self, source: Tensor, target: Tensor, operation: Reduction, stream: int) -> None:
        self.host.run(Call("reduce_scatter", source, target, reduction=operation))

    def broadcast(self, source: Tensor, target: Tensor, root: int, stream: int) -> None:
        self.host.run(Call("broadcast", source, target, root=root))

    def allgather(self, source: Tensor, target: Tensor, stream: int) -> None:
        self.host.run(Call("all_gather", source, target))

    def connect(self, peer: int) -> int:
        """Return the rank of a peer. The first message of two ranks waits until both start it, as in NCCL."""
        peer = self.ranks[peer]
        if not self.connected:
            self.connected, here = True, torch.zeros(1)
            tag = 1000 + self.ranks[0] * 30 + self.ranks[1]
            sent = self.host.run(Call("send", here, peer=peer, tag=tag, blocking=False))
            self.host.run(Call("recv", None, torch.empty(1), peer=peer, tag=tag))
            assert sent is not None
            sent.wait()
        return peer

    def send(self, source: Tensor, peer: int, stream: int) -> None:
        peer = self.connect(peer)
        self.pending.append(self.host.run(Call("send", source, peer=peer, tag=77, blocking=False)))

    def recv(self, target: Tensor, peer: int, stream: int) -> None:
        peer = self.connect(peer)
        self.pending.append(self.host.run(Call("recv", None, target, peer=peer, tag=77, blocking=False)))


class Stream:
    """Substitute of a SideStream, which returns the handles of the MPI messages."""

    def start(self, action: Callable[[], object], _: Sequence[Tensor | None]) -> SteppedWork:
        action()
        started, pending[:] = list(pending), []
        return SteppedWork(iter(started))

    def precede(self) -> None:
        """Return at once, since no operation is in flight."""


pending: list[Any] = []


@pytest.fixture
def group(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Return the group of all ranks over the NCCL transport."""
    whole, ordinary = world.everyone, world.everyone.host
    if world.device.type == "cuda":
        if world.local_size > torch.cuda.device_count() and os.environ.get(SHARED) != "1":
            pytest.skip("the ranks share a GPU")
        yield Mesh(world, {"data": world.size}, "nccl").group("data")
        return

    @contextlib.contextmanager
    def grouped() -> Iterator[None]:
        yield
        for each in pending:
            each.wait()
        pending.clear()

    transport = NcclTransport(world.communicator, ReductionScratch())
    operations = SimpleNamespace(SUM="sum", MAX="max", MIN="min")
    transport._core = SimpleNamespace(NcclRedOp=operations, group=grouped, get_unique_id=uuid4)
    joined: list[Any] = []

    def join(ranks: Sequence[int], identity: UUID) -> Communicator:
        """Return a communicator, whose identity no other communicator has."""
        assert identity not in joined
        joined.append(identity)
        return Communicator(ordinary, ranks, pending)

    monkeypatch.setattr(transport, "_join", join)
    transport._communicator = join(range(whole.size), uuid4())
    monkeypatch.setattr(nccl, "current_stream", lambda: 0)
    monkeypatch.setattr(nccl, "SideStream", Stream)
    transport._side = Stream()  # type: ignore[assignment]
    whole.host = transport
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


@pytest.mark.mpi(min_size=2)
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


@pytest.mark.mpi(min_size=2)
def test_a_ring_may_start_with_its_receives(group: Group) -> None:
    size, rank = group.size, group.rank
    receiving = group.start_recv(torch.empty(5, device=group.device), (rank - 1) % size)
    sending = group.start_send(torch.full((5,), float(rank), device=group.device), (rank + 1) % size)
    assert receiving.wait().eq(float((rank - 1) % size)).all()
    sending.wait()


@pytest.mark.mpi(min_size=2)
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
