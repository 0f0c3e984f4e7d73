"""Checked calls: no result changes, there is no false alarm, and each flipped bit is found at its rank.

Tests of audit/message_audit.py, audit/audited_transport.py, audit/audited_reduction.py, audit/call_log.py,
audit/reduction_check.py, audit/transfer_check.py, audit/start_order.py and audit/block_sums.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.audit.audited_transport import AuditedTransport
from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.audit.message_audit import Depth, MessageAudit, audit_messages
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.reduction import HALVES, reduce_block
from hpctrain.comm.world import World
from hpctrain.units import Link
from tests.comm.transports.random_calls import KINDS, MOVES, SUMS, Flip, FlippingTransport, RandomCalls
from tests.engines import small_deck, trainer
from tests.small_work import write_small_work

WAYS = ("mpi", "shared", "staged", "nodes", "slow", "compared")
DEPTHS: tuple[Depth, ...] = ("cheap", "full")
FINITE = tuple(kind for kind in KINDS if kind not in {"infinite", "large", "wide"})


def groups(world: World, way: str, depth: Depth) -> tuple[Group, Group, MessageAudit]:
    """Return a group of all ranks without checks, one with checks, and the audit, in a world of their own."""
    own = World(world.communicator.Dup())
    if way == "nodes":
        own.emulate_nodes(2)
    if way == "slow":
        own.emulate_link(Link(1e12, 0.0))
    if way == "compared":
        own.compare_calls(True)
    transport = "mpi" if way in {"mpi", "staged"} else "shared"
    plain = Mesh(own, {"data": own.size}, transport).group("data")
    audit = audit_messages(own, depth)
    checked = Mesh(own, {"data": own.size}, transport).group("data")
    if way == "staged":
        for group in (plain, checked):
            group.host = group.accelerator
    return plain, checked, audit


def inner_of(group: Group) -> AuditedTransport:
    """Return the audited transport of a group."""
    assert isinstance(group.host, AuditedTransport)
    return group.host


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two results have the same bits."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def everyones(group: Group, audit: MessageAudit) -> list[DetectedFault]:
    """Return the faults that all ranks have found. Collective."""
    rows = group.all_gather_object([fault.row for fault in audit.collect_faults()])
    return [DetectedFault.from_row(row) for each in rows for row in each]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_result_changes_and_no_alarm_is_false(world: World, way: str, depth: Depth) -> None:
    """All dtypes and magnitudes, cancellation, zeros, infinities and NaN; ranks wait in any order."""
    if way == "nodes" and world.size < 4:
        pytest.skip("nodes of two ranks")
    plain, checked, audit = groups(world, way, depth)
    if way == "nodes":
        for host in (plain.host, inner_of(checked).inner):
            assert isinstance(host, HierarchicalTransport)
            host.least_bytes = 1
    for seed in range(4):
        expected = RandomCalls(plain, seed).make(40)
        found = RandomCalls(checked, seed).make(40)
        wrong = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)]
        assert not wrong, (seed, wrong)
        assert audit.collect_faults() == [], seed
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_large_sums_in_several_rounds_have_the_same_bits(
    world: World, depth: Depth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rounds are in flight at the same time."""
    monkeypatch.setattr("hpctrain.audit.audited_reduction.HOST_ROUND_BYTES", 100_000)
    plain, checked, audit = groups(world, "shared", depth)
    for seed in range(3):
        calls: dict[str, Any] = {
            "operations": SUMS,
            "rows": (0, 70_001, 300_000),
            "kinds": ("normal", "equal", "wide"),
            "dtypes": (torch.float32, torch.bfloat16, torch.int32, torch.float64),
        }
        expected = RandomCalls(plain, seed, **calls).make(8)
        found = RandomCalls(checked, seed, **calls).make(8)
        assert all(same(*pair) for pair in zip(expected, found, strict=True)), seed
        assert audit.collect_faults() == [], seed
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_full_depth_finds_each_changed_bit_at_its_receiver(world: World, way: str) -> None:
    """Bits change in moved tensors, and in inputs and results of sums."""
    _, checked, audit = groups(world, way, "full")
    host, done = inner_of(checked), 0
    inner = host.inner
    for seed in range(60):
        draw = random.Random(seed)
        flip = Flip(draw.randrange(world.size), draw.randrange(8), seed)
        host.inner = FlippingTransport(inner, flip)
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
        operations = (*SUMS, *MOVES, "send")
        RandomCalls(checked, seed, operations, dtypes, rows=(1, 3, 50, 3000, 20_000)).make(10)
        found = everyones(checked, audit)
        told = checked.all_gather_object(flip.done)
        if any(told):
            assert [fault.ranks for fault in found] == [(flip.rank,)], (seed, told, found)
            assert found[0].kind == "message" and found[0].phase == "other", found
            done += 1
        else:
            assert found == [], (seed, found)
    assert done > 50
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_cheap_depth_finds_changes_above_rounding(world: World, way: str) -> None:
    """Changes of results are found at the rank that has them; changes of inputs are found, too."""
    _, checked, audit = groups(world, way, "cheap")
    host, done, small, size = inner_of(checked), 0, 0, world.size
    inner = host.inner
    for seed in range(80):
        draw = random.Random(seed)
        flip = Flip(draw.randrange(size), draw.randrange(6), seed, given=draw.random() < 0.3)
        host.inner = flipping = FlippingTransport(inner, flip)
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
        rows = (1, 3, 50, 3000, 20_000, 300_000)
        RandomCalls(checked, seed, SUMS, dtypes, kinds=FINITE, rows=rows, hows=("sum",)).make(8)
        found = everyones(checked, audit)
        told = checked.all_gather_object((flip.done, flip.call, flip.delta, str(flip.dtype)))[flip.rank]
        operation, call, delta, kind = told
        if not operation:
            assert found == [], (seed, found)
            continue
        done += 1
        dtype = getattr(torch, kind.removeprefix("torch."))
        absolutes = sum(each[call] for each in checked.all_gather_object(flipping.absolutes))
        if dtype.is_floating_point:
            adds = 2.0**-53 * 300_000 if dtype == torch.float64 else 2.0**-24 * (size - 1)
            rounded = torch.finfo(dtype).eps / 2 if dtype in HALVES else 0.0
            must = not delta <= 3 * (adds + rounded) * absolutes + 1e-32  # where NaN is more, too
        else:
            must = True
        bits = operation == "all_reduce" and not flip.given
        if not (must or bits):
            small += 1
            assert len(found) <= 1
            continue
        assert found, (seed, told, absolutes)
        ranks = {fault.ranks for fault in found}
        everyone = tuple(range(size))
        if flip.given or operation == "reduce":
            assert all(flip.rank in each or each == everyone or flip.given for each in ranks), (seed, found)
        elif must or size > 2 or operation == "reduce_scatter":
            assert ranks == {(flip.rank,)}, (seed, told, found)
        else:
            assert ranks <= {(flip.rank,), everyone}, (seed, told, found)
    assert done > 60 and small < done // 2, (done, small)
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "layout",
    [
        "layout.zero=0",
        "layout.zero=1",
        "layout.zero=3",
        "layout.tensor=2",
        "layout.pipeline=2",
        "layout.context=2",
    ],
)
def test_no_bit_of_a_run_changes(world: World, layout: str, depth: Depth) -> None:
    deck = small_deck(layout, "precision.compute=bf16")
    plain = trainer(world, deck)
    own = World(world.communicator.Dup())
    audit = audit_messages(own, depth)
    checked = trainer(own, deck)
    for _ in range(2):
        assert [step.metrics for step in checked.train(1)] == [step.metrics for step in plain.train(1)]
        assert audit.logs and audit.collect_faults() == []
    values = plain.parameters()
    assert all(torch.equal(each, values[name]) for name, each in checked.parameters().items())
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_fault_names_group_operation_phase_and_ranks(world: World) -> None:
    """Ranks of a part of the world are numbered as in the whole world."""
    own = World(world.communicator.Dup())
    audit = audit_messages(own, "full")
    group = Mesh(own, {"tensor": 2}, "mpi").group("tensor")
    own.ledger.phase = "backward"
    host = inner_of(group)
    host.inner = FlippingTransport(host.inner, Flip(1, 0, 0))
    group.broadcast(torch.zeros(3), root=0)
    found = everyones(group, audit)
    assert [(fault.kind, fault.name, fault.phase, fault.ranks) for fault in found] == [
        ("message", "broadcast of tensor", "backward", (1,))
    ]
    assert (
        found[0].detail == "call 1, 12 B of float32: data that rank 1 received differ from what rank 0 sent"
    )
    own.decorate_transports(None)
    assert not isinstance(own.everyone.host, AuditedTransport)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_records_are_bounded_if_nobody_asks_for_faults(
    world: World, depth: Depth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults that were found meanwhile are reported later."""
    monkeypatch.setattr("hpctrain.audit.call_log.CALLS_PER_EXCHANGE", 10)
    _, checked, audit = groups(world, "mpi", depth)
    host = inner_of(checked)
    host.inner = FlippingTransport(host.inner, Flip(1, 0, 5))
    for _ in range(100):
        checked.all_reduce(torch.ones(5000))
        assert all(len(log._records) <= 22 for log in audit.logs)
    assert {fault.ranks for fault in everyones(checked, audit)} == {(1,)}
    started = [checked.start_all_reduce(torch.ones(50_000)) for _ in range(25)]
    assert audit.collect_faults() == []
    for work in reversed(started):
        work.wait()
    assert audit.collect_faults() == [] and all(not log._records for log in audit.logs)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_ranks_may_have_different_nans(world: World, depth: Depth) -> None:
    """The sum of two NaNs keeps the bits of the first one, and MPI may add in either order."""
    _, checked, audit = groups(world, "mpi", depth)
    for count in (3, 100, 400_000):
        bits = torch.full((count,), 0x7FC00000 + world.rank, dtype=torch.int32)
        assert checked.all_reduce(bits.view(torch.float32)).isnan().all()
        assert audit.collect_faults() == []
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
def test_the_rank_that_adds_is_named(world: World) -> None:
    """Large sums are added by one rank for all; for small ones the fault names all ranks."""
    _, checked, audit = groups(world, "shared", "cheap")
    host, size = inner_of(checked), world.size
    inner = host.inner
    for owner in range(size):
        flip = Flip(size - 1, 0, 0, given=True)
        host.inner = flipping = FlippingTransport(inner, flip)

        def add(tensor: Tensor, _span: object, owner: int = owner) -> None:
            tensor[owner * (len(tensor) // size)] += 3.0

        flip.of = add  # type: ignore[method-assign,assignment]
        checked.all_reduce(torch.randn(300_000 * size))
        assert {fault.ranks for fault in everyones(checked, audit)} == {(owner,)}
        assert len(flipping.absolutes) == 1
        flip.number = 0
        checked.all_reduce(torch.randn(1000 * size))
        assert {fault.ranks for fault in everyones(checked, audit)} == {tuple(range(size))}
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("elements", [20, 200_000])
@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_adds_wrongly_is_named(
    world: World, elements: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either its first or its second sum is wrong."""
    _, checked, audit = groups(world, "mpi", "full")
    turns = [0]

    def add(parts: Any, output: Tensor, operation: Any, own: int) -> None:
        reduce_block(parts, output, operation, own)
        turns[0] += 1
        if turns[0] == 1 + again and world.rank == 1:
            output[len(output) // 2 :][:1].view(torch.int32).bitwise_xor_(1 << 3)

    monkeypatch.setattr("hpctrain.audit.audited_reduction.reduce_block", add)
    checked.all_reduce(torch.randn(elements))
    found = everyones(checked, audit)
    assert [fault.ranks for fault in found] == [(1,)] and "two computations" in found[0].detail
    world.everyone.barrier()


RUN_AND_LIST = """
import sys
from hpctrain.cli.main import main
try:
    main()
finally:
    print("loaded:", *sorted(name for name in sys.modules if name.startswith("hpctrain.audit.")))
"""


def test_a_run_that_checks_nothing_loads_no_audit(
    tmp_path: Path, launch: Callable[..., CompletedProcess[str]]
) -> None:
    """Only the types of faults, and the word sum that other packages use, are always loaded."""
    write_small_work(tmp_path)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    for depth in ("off", "cheap"):
        options = ("run", "deck.toml", "--fresh", "--set", f"stability.corruption={depth}")
        done = launch(0, "-c", RUN_AND_LIST, *options, cold=True)
        assert done.returncode == 0, done.stdout + done.stderr
        loaded = done.stdout.splitlines()[-1].split()[1:]
        light = ["hpctrain.audit.bits", "hpctrain.audit.detected_fault"]
        assert (loaded == light) == (depth == "off"), loaded
