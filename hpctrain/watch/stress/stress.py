"""`hpctrain doctor --stress SECONDS`: tests of all nodes, whose results are compared with known ones.

All ranks test at the same time, since ranks of a node share its power, memory and disk. In each round,
products, memory, collectives and disk have a share of the time.
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
from hpctrain.watch.stress.memory_test import MemoryTest
from hpctrain.watch.stress.nodes import (
    MEASURES,
    degraded_nodes,
    exclusion_advice,
    nodes_of,
    rate_text,
    rows_of,
    slow_nodes,
)
from hpctrain.watch.stress.products import ProductTest, StressShape
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime, ignore_result
from hpctrain.watch.stress.stored_rates import add_rates, check_file, default_rates_file, read_rates
from hpctrain.watch.stress.stress_options import StressOptions, check_folder

LONGEST_ROUND = 30.0
HANG_SECONDS = 120.0
"""Seconds without a message from a rank after which the test ends and names the rank."""

MOST_LINES = 20
"""Largest number of lines of progress."""

LEAST_STORED_SECONDS = 10.0
"""Seconds of a test from which on its rates are stored and compared with stored ones."""

_MOST_SHOWN = 20
"""Largest number of wrong results that are shown."""


class StressSizes(NamedTuple):
    """Sizes of the tests.

    Attributes:
        shapes: Shapes of products; None for those of the device.
        memory: Largest number of bytes of a rank's memory; None for its share of what is free.
        words: Words of a large message.
        file: Largest size of a rank's file in bytes.
    """

    shapes: Sequence[StressShape] | None = None
    memory: int | None = None
    words: int = collectives.LARGE
    file: int = disk.MOST


@dataclass(frozen=True)
class StressResult:
    """Results of the stress test, the same on all ranks, except that only rank 0 knows earlier rates.

    Attributes:
        rows: Table of the nodes' rates.
        findings: Wrong results, slow nodes, and what was not tested.
        sentence: Summary.
        code: Exit code.
    """

    rows: list[list[str]]
    findings: list[DoctorFinding]
    sentence: str
    code: int


class Test(Protocol):
    """Interface of a test."""

    def run(self, record: StressRecord, test_time: TestTime, number: int) -> None:
        """Test until the time is over.

        Args:
            record: Record to which results are added.
            test_time: Time of the test.
            number: Number of the round.
        """


def stress(
    world: World,
    options: StressOptions,
    report: Callable[[str], None],
    on_result: ResultHook = ignore_result,
    sizes: StressSizes | None = None,
) -> StressResult:
    """Test all nodes. Collective. A rank that hangs ends the job, as in a run.

    Args:
        world: The ranks.
        options: Options of the test.
        report: Function that shows a line of progress, called on rank 0.
        on_result: Function that is called with each result before it is compared.
        sizes: Sizes of the tests; None for the usual ones.

    Raises:
        HpctrainError: The folder or the file of rates cannot be used.
    """
    with world.agreement():
        check_folder(options.folder)
        if world.rank == 0 and options.rates is not None:
            check_file(options.rates)
    removed = remove_leftovers(options.folder)
    everyone = world.everyone
    hosts = tuple(everyone.all_gather_object(socket.gethostname()))
    devices = everyone.all_gather_object(gpu_name(world.device) or processor_name())
    this_rank = StressRank(world.rank, hosts, world.device, world.local_rank, world.local_size)
    rounds: list[list[dict[str, Any]]] = []
    world.hang.set_limit(HANG_SECONDS)
    with world.hang.training_steps(), Interrupts() as interrupts:
        world.ledger.activity = "testing the nodes"
        tests = _tests(world, this_rank, options, on_result, sizes or StressSizes())
        count = max(2, round(options.seconds / LONGEST_ROUND))
        everyone.barrier()
        start = perf_counter()
        for number in range(count):
            record = StressRecord()
            if number == 0 and removed:
                names = ", ".join(removed)
                text = f"removed files of a killed test from {options.folder}: {names}"
                record.notes.append((disk.TEST, text))
            deadlines = [start + options.seconds * each / count for each in (number, number + 1)]
            is_stopped = _run_round(world, tests, number, (deadlines[0], deadlines[1]), record, interrupts)
            rounds.append(everyone.all_gather_object(record.row()))
            spent = perf_counter() - start
            if world.rank == 0 and (number + 1) % -(-count // MOST_LINES) == 0 and not is_stopped:
                report(_line(spent, options.seconds, rounds))
            if is_stopped or (number + 1 < count and _any_rank(world, spent >= options.seconds)):
                break
        spent = perf_counter() - start
    return _result(world, options, hosts, devices, rounds, spent, is_stopped)


def _run_round(
    world: World,
    tests: Sequence[tuple[float, Test]],
    number: int,
    interval: tuple[float, float],
    record: StressRecord,
    interrupts: Interrupts,
) -> bool:
    """Run all tests once. Return True if an interrupt of any rank has stopped them. Collective.

    Args:
        world: The ranks.
        tests: Tests with their shares of time.
        number: Number of the round.
        interval: Planned start and end of the round, in seconds of `perf_counter`.
        record: Record to which results are added.
        interrupts: Interrupts of this rank.
    """
    start, end = interval
    all_shares, passed = sum(share for share, _ in tests), 0.0
    for share, test in tests:
        passed += share / all_shares
        test_time = TestTime(start + (end - start) * passed, lambda: interrupts.received)
        test.run(record, test_time, number)
        reset_peak(world.device)
        if _any_rank(world, interrupts.received):
            return True
    return False


def _tests(
    world: World, this_rank: StressRank, options: StressOptions, on_result: ResultHook, sizes: StressSizes
) -> list[tuple[float, Test]]:
    """Return the tests with their shares of time. Collective."""
    host = on_host(world.device)
    shapes = sizes.shapes or (products.HOST_SHAPES if host else products.GPU_SHAPES)
    sharing = StressRank(
        this_rank.rank, this_rank.hosts, this_rank.device, this_rank.local_rank, _sharers(world)
    )
    tests: list[tuple[float, Test]] = [
        (4.0, ProductTest(this_rank, cores_of(world) if host else (), shapes, on_result)),
        (2.5, MemoryTest(sharing, sizes.memory, on_result)),
    ]
    if world.size > 1:
        tests.append((2.0, Collectives(world, this_rank, sizes.words, on_result)))
    tests.append((1.5, DiskTest(this_rank, options.folder, world.size, sizes.file, on_result)))
    return tests


def cores_of(world: World) -> tuple[int, ...]:
    """Return the cores that this rank tests. Collective.

    Ranks that may use the same cores split them. It is empty if the system does not name cores.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    all_ranks = world.everyone.all_gather_object([world.node, allowed])
    same = [rank for rank, each in enumerate(all_ranks) if each == [world.node, allowed]]
    number = same.index(world.rank)
    return tuple(allowed[number :: len(same)] or allowed[number % len(allowed) :][:1]) if allowed else ()


def _sharers(world: World) -> int:
    """Return the number of ranks that take their memory from where this one does. Collective."""
    memories = world.everyone.all_gather_object((world.node, gpu_identity(world.device)))
    return memories.count(memories[world.rank])


def _any_rank(world: World, flag: bool) -> bool:
    """Return True if the flag is True on any rank. Collective."""
    return bool(world.everyone.all_reduce(torch.tensor(flag, dtype=torch.int64), "max").item())


def _line(spent: float, seconds: float, rounds: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return a line about the last round, with medians of all ranks."""
    values = [[row["rates"][name] for row in rounds[-1] if name in row["rates"]] for name in MEASURES]
    rates = [
        f"{name} {rate_text(name, median(some))}" for name, some in zip(MEASURES, values, strict=True) if some
    ]
    wrong = sum(row["number"] for each in rounds for row in each)
    text = f"{counted(wrong, 'result')} WRONG" if wrong else "no wrong result"
    return f"{spent:.0f} s of {seconds:.0f} s: {', '.join(rates)}; {text}"


def _result(
    world: World,
    options: StressOptions,
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
    if world.rank == 0 and spent >= LEAST_STORED_SECONDS and len(rounds) > 1:
        path = options.rates or default_rates_file()
        slow += degraded_nodes(nodes, read_rates(path))
        why = add_rates(path, nodes, datetime.now(timezone.utc).date().isoformat())
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
    """Yield findings on wrong results."""
    text = [
        (test, sentence, hosts)
        for each in rounds
        for row in each
        for (test, sentence), hosts in zip(row["wrong"], row["hosts"], strict=True)
    ]
    for test, sentence, hosts in text[:_MOST_SHOWN]:
        names = [host for host in hosts.split(",") if host]
        remedy = "test the nodes of these ranks individually and in pairs"
        if names:
            remedy = f"inspect {' and '.join(names)}; {exclusion_advice(names)}"
        yield DoctorFinding(test, sentence, remedy, fatal=True)
    number = sum(row["number"] for each in rounds for row in each)
    if number > len(text[:_MOST_SHOWN]):
        more = f"{counted(number - len(text[:_MOST_SHOWN]), 'more result')} wrong"
        yield DoctorFinding("stress", more, "see the results above", fatal=True)


def _notes(rounds: Sequence[Sequence[dict[str, Any]]]) -> Iterator[DoctorFinding]:
    """Yield findings on what was not tested, each once."""
    notes = dict.fromkeys(tuple(note) for each in rounds for row in each for note in row["notes"])
    for test, sentence in notes:
        yield DoctorFinding(test, sentence, "")
