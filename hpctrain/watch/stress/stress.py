"""`hpctrain doctor --stress SECONDS`: what nodes compute, remember, send and write, beside what is known.

All ranks test at the same time, since those of a node share its power, memory and disk: in rounds, of which
each has its share of time for products, memory, collectives and disk.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from hpctrain.comm.world import World
from hpctrain.errors import EXIT_DIFFERENT, EXIT_INTERRUPTED
from hpctrain.host.device import gpu_identity, gpu_name, on_host
from hpctrain.host.device_memory import reset_peak
from hpctrain.host.doctor import DoctorFinding
from hpctrain.host.processor import processor_name
from hpctrain.text import counted
from hpctrain.units import format_seconds
from hpctrain.watch.stress import collectives, disk, products
from hpctrain.watch.stress.collectives import Collectives
from hpctrain.watch.stress.disk import DiskTest, remove_leftovers
from hpctrain.watch.stress.interrupts import Interrupts
from hpctrain.watch.stress.kept import check_file, keep_rates, read_rates, usual_file
from hpctrain.watch.stress.memory import MemoryTest
from hpctrain.watch.stress.nodes import (
    MEASURES,
    fallen_nodes,
    leaving_out,
    nodes_of,
    rate_text,
    rows_of,
    slow_nodes,
)
from hpctrain.watch.stress.products import ProductTest, StressShape
from hpctrain.watch.stress.record import Look, StressRank, StressRecord, TestTime, as_it_is
from hpctrain.watch.stress.stress_options import StressOptions, check_folder

LONGEST_ROUND = 30.0
HANG_SECONDS = 120.0
"""Without a sign of life from any rank, after which the test ends and says whose is missing."""

MOST_LINES = 20
"""Of progress."""

LEAST_KEPT = 10.0
"""Seconds of a test whose rates are kept, and compared with those that are: in less there are few of each."""

_TOLD = 20  # of results that came out wrong


class StressSizes(NamedTuple):
    """Of what is tested: shapes of products (None: those of the device), most bytes of a rank's memory (None:
    its share of what is free) and of its file, words of a large message.
    """

    shapes: Sequence[StressShape] | None = None
    memory: int | None = None
    words: int = collectives.LARGE
    file: int = disk.MOST


@dataclass(frozen=True)
class StressResult:
    """What came out, the same on all ranks but for what rank 0 alone knows of earlier rates: rows of nodes,
    findings, one sentence of it all, and the exit code.
    """

    rows: list[list[str]]
    findings: list[DoctorFinding]
    sentence: str
    code: int


class Test(Protocol):
    """One of the tests."""

    def run(self, record: StressRecord, turn: TestTime, number: int) -> None:
        """Test until the turn is over, in the round of that number, and enter what was found."""


def stress(
    world: World,
    wish: StressOptions,
    report: Callable[[str], None],
    look: Look = as_it_is,
    sizes: StressSizes | None = None,
) -> StressResult:
    """Test all nodes. Collective; `report` takes lines on rank 0 meanwhile.

    HpctrainError where the wish cannot be. A rank that hangs ends the job as in a run.
    """
    with world.agreement():
        check_folder(wish.folder)
        if world.rank == 0 and wish.rates is not None:
            check_file(wish.rates)
    removed = remove_leftovers(wish.folder)
    everyone = world.everyone
    hosts = tuple(everyone.all_gather_object(socket.gethostname()))
    devices = everyone.all_gather_object(gpu_name(world.device) or processor_name())
    place = StressRank(world.rank, hosts, world.device, world.local_rank, world.local_size)
    rounds: list[list[dict[str, Any]]] = []
    world.hang.set_limit(HANG_SECONDS)
    with world.hang.training_steps(), Interrupts() as interrupts:
        world.ledger.activity = "testing the nodes"
        tests = _tests(world, place, wish, look, sizes or StressSizes())
        shares = sum(share for share, _ in tests)
        count = max(2, round(wish.seconds / LONGEST_ROUND))
        everyone.barrier()
        began = perf_counter()
        for number in range(count):
            record = StressRecord()
            if number == 0 and removed:
                names = ", ".join(removed)
                told = f"removed files of a killed test from {wish.folder}: {names}"
                record.notes.append((disk.TEST, told))
            passed = 0.0
            stopped = False
            for share, test in tests:
                passed += share / shares
                deadline = began + wish.seconds * (number + passed) / count
                test.run(record, TestTime(deadline, lambda: interrupts.came), number)
                reset_peak(world.device)
                stopped = _agreed(world, interrupts.came)
                if stopped:
                    break
            rounds.append(everyone.all_gather_object(record.row()))
            spent = perf_counter() - began
            if world.rank == 0 and (number + 1) % -(-count // MOST_LINES) == 0 and not stopped:
                report(_line(spent, wish.seconds, rounds))
            if stopped or (number + 1 < count and _agreed(world, spent >= wish.seconds)):
                break
        spent = perf_counter() - began
    return _result(world, wish, hosts, devices, rounds, spent, stopped)


def _tests(
    world: World, place: StressRank, wish: StressOptions, look: Look, sizes: StressSizes
) -> list[tuple[float, Test]]:
    """Each with its share of time. Collective."""
    host = on_host(world.device)
    shapes = sizes.shapes or (products.HOST_SHAPES if host else products.GPU_SHAPES)
    sharing = StressRank(place.rank, place.hosts, place.device, place.local_rank, _sharers(world))
    tests: list[tuple[float, Test]] = [
        (4.0, ProductTest(place, cores_of(world) if host else (), shapes, look)),
        (2.5, MemoryTest(sharing, sizes.memory, look)),
    ]
    if world.size > 1:
        tests.append((2.0, Collectives(world, place, sizes.words, look)))
    tests.append((1.5, DiskTest(place, wish.folder, world.size, sizes.file, look)))
    return tests


def cores_of(world: World) -> tuple[int, ...]:
    """The cores that this rank tests: of those that it may use its part, where other ranks may use the same.

    None where the system does not tell. Collective.
    """
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    all_ranks = world.everyone.all_gather_object([world.node, mine])
    same = [rank for rank, each in enumerate(all_ranks) if each == [world.node, mine]]
    turn = same.index(world.rank)
    return tuple(mine[turn :: len(same)] or mine[turn % len(mine) :][:1]) if mine else ()


def _sharers(world: World) -> int:
    """Return the number of ranks that take their memory from where this one does. Collective."""
    memories = world.everyone.all_gather_object((world.node, gpu_identity(world.device)))
    return memories.count(memories[world.rank])


def _agreed(world: World, wanted: bool) -> bool:
    """Whether any rank wants it. Collective."""
    return bool(world.everyone.all_reduce(torch.tensor(wanted, dtype=torch.int64), "max").item())


def _line(spent: float, seconds: float, rounds: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What the last round tells, of all ranks the median."""
    values = [[row["rates"][name] for row in rounds[-1] if name in row["rates"]] for name in MEASURES]
    rates = [
        f"{name} {rate_text(name, median(some))}" for name, some in zip(MEASURES, values, strict=True) if some
    ]
    wrong = sum(row["number"] for each in rounds for row in each)
    told = f"{counted(wrong, 'result')} WRONG" if wrong else "no wrong result"
    return f"{spent:.0f} s of {seconds:.0f} s: {', '.join(rates)}; {told}"


def _result(
    world: World,
    wish: StressOptions,
    hosts: Sequence[str],
    devices: Sequence[str],
    rounds: Sequence[Sequence[dict[str, Any]]],
    spent: float,
    stopped: bool,
) -> StressResult:
    nodes = nodes_of(hosts, devices, [[row["rates"] for row in each] for each in rounds])
    wrong = sum(row["number"] for each in rounds for row in each)
    findings = [*_wrong(rounds), *_notes(rounds)]
    slow = list(slow_nodes(nodes))
    if world.rank == 0 and spent >= LEAST_KEPT and len(rounds) > 1:
        path = wish.rates or usual_file()
        slow += fallen_nodes(nodes, read_rates(path))
        why = keep_rates(path, nodes, datetime.now(timezone.utc).date().isoformat())
        if why:
            remedy = "name a writable file with --rates FILE to detect nodes that become slow"
            findings.append(DoctorFinding("rates", f"{path} could not be written: {why}", remedy))
    parts = [
        f"{counted(wrong, 'result')} wrong" if wrong else "all results are correct",
        f"{counted(len(slow), 'rate')} low" if slow else "no node is slow",
    ]
    ended = f"was stopped after {format_seconds(spent)}" if stopped else f"took {format_seconds(spent)}"
    where = f"{counted(world.size, 'rank')} on {counted(len(nodes), 'node')}"
    code = EXIT_DIFFERENT if wrong else EXIT_INTERRUPTED if stopped else 0
    sentence = f"The stress test of {where} {ended}: {', '.join(parts)}."
    return StressResult(rows_of(nodes), findings + slow, sentence, code)


def _wrong(rounds: Sequence[Sequence[dict[str, Any]]]) -> Iterator[DoctorFinding]:
    """What came out wrong, the first of each rank and test first."""
    told = [
        (test, sentence, hosts)
        for each in rounds
        for row in each
        for (test, sentence), hosts in zip(row["wrong"], row["hosts"], strict=True)
    ]
    for test, sentence, hosts in told[:_TOLD]:
        names = [host for host in hosts.split(",") if host]
        remedy = "test the nodes of these ranks individually and in pairs"
        if names:
            remedy = f"inspect {' and '.join(names)}; {leaving_out(names)}"
        yield DoctorFinding(test, sentence, remedy, fatal=True)
    number = sum(row["number"] for each in rounds for row in each)
    if number > len(told[:_TOLD]):
        more = f"{counted(number - len(told[:_TOLD]), 'more result')} wrong"
        yield DoctorFinding("stress", more, "see the results above", fatal=True)


def _notes(rounds: Sequence[Sequence[dict[str, Any]]]) -> Iterator[DoctorFinding]:
    """What was not tested, each thing once."""
    notes = dict.fromkeys(tuple(note) for each in rounds for row in each for note in row["notes"])
    for test, sentence in notes:
        yield DoctorFinding(test, sentence, "")
