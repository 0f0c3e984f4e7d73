"""Every primitive, dtype and form against a reference that each rank computes by itself.

Tests of comm/group.py, comm/work.py, comm/calls.py, comm/group_factory.py, comm/transports/transport.py,
comm/transports/mpi.py, comm/transports/process_group.py, comm/transports/gloo.py and
comm/transports/reduction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hpctrain.comm.calls import Reduction
from hpctrain.comm.group import Group
from hpctrain.comm.transports.mpi import MpiTransport, StagedTransport
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.transport import Transport
from hpctrain.comm.world import World

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPERATIONS: tuple[Reduction, ...] = ("sum", "max", "min")

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def shared(world: World) -> Transport:
    """Memory of the node for whatever is not empty, in rounds of few elements."""
    assert world.share_memory() == ""
    host = world.everyone.host
    assert isinstance(host, MpiTransport) and isinstance(world.groups.memory, NodeMemory)
    if world.size == 1:
        return host
    made = SharedTransport(host, world.groups.memory)
    made.least_bytes, made.least_moved_bytes, made.round_bytes = 1, 1, 4096
    made.small_operations.most_bytes = -1
    return made


@pytest.fixture(scope="module")
def gloo(world: World) -> Transport:
    """Return a process group of gloo. It adds in rank order only if there are two ranks."""
    world.open_store()
    if world.size != 2:
        return world.everyone.host
    place = world.communicator, world.groups.ranks
    return world.groups.make_transports(("world",), *place, "gloo", torch.device("cpu"))[0]


@pytest.fixture(params=["plain", "split", "staged", "shared", "gloo"])
def group(
    request: pytest.FixtureRequest, world: World, shared: Transport, gloo: Transport
) -> Iterator[Group]:
    """The group of all ranks: as it is, with messages of at most 7 elements, as if on a device, through
    memory of the node, and over gloo.
    """
    whole = world.everyone
    host = whole.host
    assert isinstance(host, MpiTransport)
    if request.param == "gloo":
        if world.size != 2:
            pytest.skip("sums of gloo are in another order")
        whole.host = gloo
    if request.param == "shared":
        whole.host = shared
    if request.param == "split":
        host.limit = 7
    if request.param == "staged":
        whole.host = StagedTransport(host)
    yield whole
    host.limit = 2**31 - 1
    whole.host = host


def has_short_messages(group: Group) -> bool:
    """Return True if messages of the group have at most 7 elements."""
    return isinstance(group.host, MpiTransport) and group.host.limit == 7


def values(rank: int, count: int, dtype: torch.dtype, width: int = 0) -> Tensor:
    """What rank `rank` brings: any rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    shape = (count, width) if width else (count,)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype in UNSIGNED or dtype == torch.uint8:
        return torch.randint(0, 2**63 - 1, shape, generator=generator).to(dtype)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(dtype)


def reduced(parts: list[Tensor], operation: Reduction) -> Tensor:
    """In rank order, half types in fp32 with one rounding."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        wide = [part.to(torch.int64) for part in parts]
        total = torch.stack(wide).amin(0) if operation == "min" else torch.stack(wide).amax(0)
        return total.bool()
    if dtype in UNSIGNED:
        parts = [part.to(torch.int64) for part in parts]
    if operation != "sum":
        stacked = torch.stack(parts)
        return (stacked.amax(0) if operation == "max" else stacked.amin(0)).to(dtype)
    half = dtype in {torch.float16, torch.bfloat16}
    total = parts[0].float() if half else parts[0].clone()
    for part in parts[1:]:
        total = total + (part.float() if half else part)
    return total.to(dtype)


def same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(
        result.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
    )


def uneven(size: int, seed: int = 0) -> list[int]:
    """Rows per rank, some zero."""
    return [(3 * rank + seed) % 5 for rank in range(size)]


@pytest.mark.parametrize("dtype", [*DTYPES, *UNSIGNED], ids=str)
def test_all_reduce_and_reduce(group: Group, dtype: torch.dtype) -> None:
    for started in (False, True):
        for operation in OPERATIONS:
            for count in (0, 1, 30, 9000 if not has_short_messages(group) else 100):
                parts = [values(rank, count, dtype) for rank in range(group.size)]
                expected = reduced(parts, operation)
                mine = parts[group.rank].clone()
                result = (
                    group.start_all_reduce(mine, operation).wait()
                    if started
                    else group.all_reduce(mine, operation)
                )
                assert result is mine
                same(mine, expected)
                root = group.size - 1
                mine = parts[group.rank].clone()
                if started:
                    group.start_reduce(mine, root, operation).wait()
                else:
                    group.reduce(mine, root, operation)
                same(mine, expected if group.rank == root else parts[group.rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(group: Group, dtype: torch.dtype) -> None:
    for started in (False, True):
        size, rank = group.size, group.rank
        run: Callable[..., Tensor] = (
            (lambda *a, **k: group.start_reduce_scatter(*a, **k).wait()) if started else group.reduce_scatter
        )
        for operation in OPERATIONS:
            for rows, width in ((2, 3), (700 if not has_short_messages(group) else 9, 10)):
                parts = [values(peer, rows * size, dtype, width) for peer in range(size)]
                expected = reduced(parts, operation)[rank * rows : (rank + 1) * rows]
                mine = parts[rank].clone()
                same(run(mine, reduction=operation), expected)
                same(mine, parts[rank])
                output = torch.empty_like(expected)
                assert run(mine, output, reduction=operation) is output
                same(output, expected)
                # In place: the output is this rank's own rows of the input.
                own = mine[rank * rows : (rank + 1) * rows]
                run(mine, own, reduction=operation)
                same(own, expected)
            sizes = uneven(size, 1)
            parts = [values(peer, sum(sizes), dtype, 2) for peer in range(size)]
            begin = sum(sizes[:rank])
            expected = reduced(parts, operation)[begin : begin + sizes[rank]]
            same(run(parts[rank].clone(), sizes=sizes, reduction=operation), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, *UNSIGNED, torch.float8_e4m3fn], ids=str)
def test_movement(group: Group, dtype: torch.dtype) -> None:
    for started in (False, True):
        size, rank = group.size, group.rank
        root = size - 1
        for rows, width in ((3, 4), (0, 4), (5, 0)):
            parts = [
                values(peer, rows, dtype, width) if width else values(peer, rows, dtype)
                for peer in range(size)
            ]
            whole = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
            mine = parts[rank].clone()
            same(
                group.start_broadcast(mine, root).wait() if started else group.broadcast(mine, root),
                parts[root],
            )
            mine = parts[rank].clone()
            same(group.start_all_gather(mine).wait() if started else group.all_gather(mine), whole)
            output = torch.empty_like(whole)
            own = output[rank * rows : (rank + 1) * rows]
            own.copy_(mine)
            assert (
                group.start_all_gather(own, output).wait() if started else group.all_gather(own, output)
            ) is output
            same(output, whole)
            gathered = group.start_gather(mine, root).wait() if started else group.gather(mine, root)
            if rank == root:
                assert gathered is not None
                same(gathered, whole)
            else:
                assert gathered is None
            output = torch.empty_like(mine)
            source = whole.clone() if rank == root else None
            same(
                group.start_scatter(source, output, root).wait()
                if started
                else group.scatter(source, output, root),
                mine,
            )
            table = [values(100 + peer, rows * size, dtype, width) for peer in range(size)]
            expected = torch.cat(
                [part[rank * rows : (rank + 1) * rows].view(torch.uint8) for part in table]
            ).view(dtype)
            sent = table[rank]
            same(group.start_all_to_all(sent).wait() if started else group.all_to_all(sent), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_uneven_movement(group: Group, dtype: torch.dtype) -> None:
    for started in (False, True):
        size, rank = group.size, group.rank
        sizes, root = uneven(size), 0
        parts = [values(peer, sizes[peer], dtype, 3) for peer in range(size)]
        whole, mine = torch.cat(parts), parts[rank]
        if started:
            works = (
                group.start_all_gather(mine, sizes=sizes),
                group.start_gather(mine, root, sizes=sizes),
                group.start_scatter(
                    whole if rank == root else None, torch.empty_like(mine), root, sizes=sizes
                ),
            )
            joined, gathered, scattered = works[0].wait(), works[1].wait(), works[2].wait()
        else:
            joined = group.all_gather(mine, sizes=sizes)
            gathered = group.gather(mine, root, sizes=sizes)
            scattered = group.scatter(
                whole if rank == root else None, torch.empty_like(mine), root, sizes=sizes
            )
        same(joined, whole)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            same(gathered, whole)
        same(scattered, mine)
        # Rank s sends s + 2 r mod 4 rows to rank r.
        table = [[(source + 2 * target) % 4 for target in range(size)] for source in range(size)]
        inputs = [values(50 + source, sum(table[source]), dtype, 2) for source in range(size)]
        pieces = [inputs[source].split(table[source])[rank] for source in range(size)]
        arguments = (inputs[rank], None, table[rank], [table[source][rank] for source in range(size)])
        same(
            group.start_all_to_all(*arguments).wait() if started else group.all_to_all(*arguments),
            torch.cat(pieces),
        )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_send_and_recv(group: Group, dtype: torch.dtype) -> None:
    size, rank = group.size, group.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    mine = values(rank, 20, dtype)
    received = torch.empty_like(mine)
    works = [group.start_recv(received, left, tag=5), group.start_send(mine, right, tag=5)]
    for work in works:
        work.wait()
    same(received, values(left, 20, dtype))
    if rank == 0:
        group.send(mine.view(4, 5).t(), 1)  # not contiguous: sent in the order of its elements
    elif rank == 1:
        same(group.recv(torch.empty(20, dtype=dtype), 0), values(0, 20, dtype).view(4, 5).t().reshape(-1))


@pytest.mark.mpi(min_size=2)
def test_started_operations_may_be_completed_in_any_order(group: Group) -> None:
    """Several of many stages under way, tested and waited for in an order that differs from rank to rank."""
    size, rank = group.size, group.rank
    count = 20000 if not has_short_messages(group) else 300
    works, expected = [], []
    for number in range(9):
        dtype = (torch.float16, torch.bfloat16, torch.float64)[number % 3]
        parts = [values(10 * number + peer, count, dtype) for peer in range(size)]
        works.append(group.start_all_reduce(parts[rank].clone()))
        expected.append(reduced(parts, "sum"))
    order = list(range(9)) if rank % 2 else list(reversed(range(9)))
    for number in order:
        if number < 3:
            while not works[number].test():
                for other in order:
                    works[other].test()
    token = torch.tensor([rank])
    assert group.all_reduce(token).item() == size * (size - 1) // 2
    for number in order:
        same(works[number].wait(), expected[number])
        assert works[number].test()
    works[0].wait()


@pytest.mark.mpi(min_size=2)
def test_work_that_is_dropped_keeps_its_tensor(world: World) -> None:
    group = world.everyone
    received = torch.zeros(5000)
    if group.rank == 0:
        group.start_send(torch.ones(5000), 1)
    elif group.rank == 1:
        group.recv(received, 0)
        assert received.eq(1).all()
    group.barrier()
    group._in_flight.clear()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_sums_are_in_rank_order_bit_for_bit(world: World, dtype: torch.dtype) -> None:
    """Beyond the small path, over several rounds of bounded memory, with numbers that tell orders apart."""
    for started in (False, True):
        group = world.everyone
        for count in (5, 70001, 3_000_001):
            base = values(7, 1000, dtype).repeat(count // 1000 + 1)[:count]
            scale = (1.0, 1e-3, 3.7, 1.1e2)
            parts = [(base.roll(peer) * scale[peer % 4]).to(dtype) for peer in range(group.size)]
            mine = parts[group.rank].clone()
            if started:
                group.start_all_reduce(mine).wait()
            else:
                group.all_reduce(mine)
            same(mine, reduced(parts, "sum"))
            if group.size > 2 and count > 1000 and dtype.itemsize > 2:
                assert not torch.equal(mine, reduced(parts[::-1], "sum")), (
                    "the numbers do not tell orders apart"
                )


@pytest.mark.mpi(min_size=2)
def test_nan_wins_every_reduction_of_floats(world: World) -> None:
    group = world.everyone
    for operation in OPERATIONS:
        for poisoned in range(group.size):
            value = torch.tensor([float("nan") if group.rank == poisoned else 1.0, 2.0])
            group.all_reduce(value, operation)
            assert value.isnan().tolist() == [True, False]


@pytest.mark.mpi
def test_inputs_that_are_not_contiguous_and_those_of_autograd(world: World) -> None:
    group = world.everyone
    square = torch.arange(16.0).view(4, 4) + group.rank
    same(
        group.all_gather(square.t()),
        torch.cat([(torch.arange(16.0).view(4, 4) + rank).t() for rank in range(group.size)]),
    )
    parameter = torch.ones(40000, requires_grad=True)
    group.all_reduce(parameter)
    assert parameter.eq(group.size).all()
    assert parameter.is_leaf
    gathered = group.all_gather(torch.ones(4, requires_grad=True) * 2)
    assert gathered.requires_grad == (group.size == 1)
    with pytest.raises(AssertionError):
        group.all_reduce(square.t())


def test_objects(world: World) -> None:
    group = world.everyone
    assert group.all_gather_object({"rank": group.rank}) == [{"rank": rank} for rank in range(group.size)]
    assert group.broadcast_object([group.rank, "x"], group.size - 1) == [group.size - 1, "x"]


def test_ledger_counts_what_the_closed_forms_count(world: World) -> None:
    group, ledger = world.everyone, world.ledger
    size, rank = group.size, group.rank
    ledger.reset()
    ledger.phase = "backward"
    group.all_reduce(torch.ones(100))
    group.start_all_reduce(torch.ones(50)).wait()
    group.reduce(torch.ones(10))
    group.broadcast(torch.ones(10, dtype=torch.bfloat16))
    ledger.phase = "step"
    group.all_gather(torch.ones(rank + 1, 2), sizes=[peer + 1 for peer in range(size)])
    group.gather(torch.ones(3))
    group.scatter(torch.ones(3 * size) if rank == 0 else None, torch.ones(3))
    group.reduce_scatter(torch.ones(4 * size))
    group.all_to_all(torch.ones(5 * size, dtype=torch.int64))
    ledger.phase = "forward"
    sent, received = [2 + peer for peer in range(size)], [2 + rank] * size
    group.all_to_all(torch.ones(sum(sent), 3), None, sent, received)
    ledger.phase = "step"
    if rank == 0 and size > 1:
        group.send(torch.ones(6), 1)
    if rank == 1:
        group.recv(torch.ones(6), 0)
    group.barrier()
    rows = {(row.operation, row.phase): (row.calls, row.bytes) for row in ledger.rows()}
    assert all(row.axis == "world" and row.seconds >= 0 for row in ledger.rows())
    expected = {
        ("all_reduce", "backward"): (2, 2 * 150 * 4),
        ("reduce", "backward"): (1, 40),
        ("broadcast", "backward"): (1, 20),
        ("all_gather", "step"): (1, 4 * size * (size + 1)),
        ("gather", "step"): (1, 12 * size),
        ("scatter", "step"): (1, 12 * size),
        ("reduce_scatter", "step"): (1, 16 * size),
        ("all_to_all", "step"): (1, 40 * size),
        ("all_to_all", "forward"): (1, 12 * (sum(sent) - sent[rank])),
        ("barrier", "step"): (1, 0),
    }
    if rank == 0:
        expected["send", "step"] = (1, 24)
    if rank == 1:
        expected["recv", "step"] = (1, 0)
    assert rows == ({} if size == 1 else expected)
    ledger.phase = "other"
    ledger.reset()
