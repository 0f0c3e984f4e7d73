"""`hpctrain bench collectives`: times of collectives, compared with mpi4py and gloo on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, product, takewhile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hpctrain.bench.measurement import publish
from hpctrain.bench.peers.collective_calls import (
    OPERATIONS,
    CollectiveCall,
    calls_by_program,
    start_gloo,
    stop_gloo,
)
from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import choose_transport
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.small_messages import SMALL_OPERATIONS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.terminal import stderr_console
from hpctrain.text import either, table
from hpctrain.units import format_bytes, parse_bytes

# Limits of the time relative to that of mpi4py: a ratio from LARGE_BYTES on, and additional seconds below.
LARGE_BYTES = 64 * 1024
LARGE_RATIO = 1.10
SMALL_SECONDS = 15e-6

# Least speed through shared memory from HUGE_BYTES on, relative to mpi4py and to gloo (0 for no limit).
HUGE_BYTES = 64 * 1024 * 1024
SPEEDS: Mapping[str, tuple[float, float]] = {"all_reduce": (2.5, 4.0), "reduce_scatter": (6.0, 0.0)}

# Approximate time of all samples of an operation and size, and of a sample, which repeats a fast operation.
SECONDS_PER_CASE = 0.4
SECONDS_PER_SAMPLE = 200e-6
MIN_SAMPLES, MAX_SAMPLES = 7, 400


@dataclass(frozen=True)
class CollectiveRow:
    """Times of one operation with one size: medians over the samples, of the slowest rank.

    Attributes:
        operation: Name of the operation. "send_recv" is a message to another rank and back.
        bytes: Size of the complete tensor.
        hpctrain: Seconds of hpctrain.
        mpi4py: Seconds of mpi4py.
        gloo: Seconds of gloo; None if it was not measured.
        shared: True if the ranks read each other's memory.
    """

    operation: str
    bytes: int
    hpctrain: float
    mpi4py: float
    gloo: float | None
    shared: bool = False

    @property
    def ratio(self) -> float:
        """Time of hpctrain divided by that of mpi4py."""
        return self.hpctrain / self.mpi4py

    @property
    def within_limits(self) -> bool:
        """True if hpctrain is as fast as the limits of this module require, which `_limits` describes."""
        if self.shared and self.bytes >= HUGE_BYTES and self.operation in SPEEDS:
            over_mpi4py, over_gloo = SPEEDS[self.operation]
            faster_than_gloo = self.gloo is None or self.gloo >= over_gloo * self.hpctrain
            return faster_than_gloo and self.mpi4py >= over_mpi4py * self.hpctrain
        if self.shared and self.bytes <= LARGE_BYTES and self.operation in SMALL_OPERATIONS:
            return self.ratio <= 1
        if self.bytes >= LARGE_BYTES:
            return self.ratio <= LARGE_RATIO
        return self.hpctrain - self.mpi4py <= SMALL_SECONDS


def bench_collectives(
    world: World, operations: str, min_bytes: str, max_bytes: str, gloo: bool, output: Path | None
) -> None:
    """Measure operations with sizes that grow by factors of four, and print a table. Collective.

    Args:
        world: All ranks.
        operations: Names of operations, separated by commas, or "all".
        min_bytes: Smallest size, with a unit.
        max_bytes: Limit of the largest size, with a unit.
        gloo: Also measure gloo.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: An operation is unknown, a size is wrong, or there is one rank only.
    """
    names = list(OPERATIONS) if operations == "all" else [name.strip() for name in operations.split(",")]
    with world.agreement():
        unknown = [name for name in names if name not in OPERATIONS]
        if unknown:
            raise HpctrainError(f"--operations {', '.join(unknown)}: must be {either(OPERATIONS)}")
        first, last = parse_bytes(min_bytes), parse_bytes(max_bytes)
        if not 4 <= first <= last:
            raise HpctrainError(
                f"--min-bytes {min_bytes} --max-bytes {max_bytes}: "
                "must be at least 4 bytes, in ascending order"
            )
        if world.size < 2:
            raise HpctrainError(
                "bench collectives: requires two ranks or more (mpirun -n 2 hpctrain bench ...)"
            )
    if gloo:
        start_gloo(world)
    group = world.new_group(("world",), tuple(range(world.size)), choose_transport(world, "auto"))
    rows = []
    sizes = list(takewhile(lambda size: size <= last, (first * 4**power for power in count())))
    with _progress(world, len(names) * len(sizes)) as progress:
        for name, size in product(names, sizes):
            progress(f"{name} {format_bytes(size, binary=True)}")
            rows.append(_measure(group, name, size, gloo))
    if gloo:
        stop_gloo()
    results = {"ranks": world.size, "rows": [asdict(row) for row in rows]}
    publish(world, result_lines(rows, world.size), results, output)


@contextmanager
def _progress(world: World, steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a progress bar of rank 0, which only a terminal shows."""
    console = stderr_console()
    console.quiet = world.rank != 0
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=text)


def _measure(group: Group, operation: str, size: int, gloo: bool) -> CollectiveRow:
    share = max(1, size // 4 // group.size)
    full, part = (group.empty((count,), torch.float32).zero_() for count in (share * group.size, share))
    times = _medians(group, calls_by_program(group, operation, full, part, gloo))
    shared = isinstance(group.host, SharedTransport)
    return CollectiveRow(
        operation, full.nbytes, times["hpctrain"], times["mpi4py"], times.get("gloo"), shared
    )


def _medians(group: Group, calls: dict[str, CollectiveCall]) -> dict[str, float]:
    """Return the median seconds of each call, sampled by turns. Collective."""
    names = list(calls)
    repeats, round_seconds = {}, 0.0
    for name in names:
        _sample(group, calls[name], 3)
        estimate = max(group.all_gather_object(_sample(group, calls[name], 2)))
        repeats[name] = max(1, min(50, int(SECONDS_PER_SAMPLE / estimate)))
        round_seconds += estimate * repeats[name]
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, int(SECONDS_PER_CASE / round_seconds)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(samples):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            times[name].append(_sample(group, calls[name], repeats[name]))
    all_times = group.all_gather_object(times)
    return {
        name: median(max(ranks) for ranks in zip(*(each[name] for each in all_times), strict=True))
        for name in names
    }


def _sample(group: Group, call: CollectiveCall, repeats: int) -> float:
    """Return the mean seconds of one call over `repeats` calls, after a call that is not timed. Collective.

    The untimed call brings the caches into the state in which the operation itself leaves them. Plain calls
    of mpi4py are not recorded, so this records the untimed and the timed calls as "sample" for the watchdog.
    """
    with group.calls.record(Call("sample")):
        call()
    group.barrier()
    with group.calls.record(Call("sample")):
        start = perf_counter()
        for _ in range(repeats):
            call()
        return (perf_counter() - start) / repeats


def result_lines(rows: Sequence[CollectiveRow], ranks: int) -> list[str]:
    """Return the results as a table, and the number of rows within the limits."""
    gloo = any(row.gloo is not None for row in rows)
    names = ["operation", "size", "time", "bandwidth", "mpi4py", "bandwidth", "ratio", "more"]
    lines = [[*names, *(["gloo", "ratio"] if gloo else []), ""]]
    previous = ""
    for row in rows:
        if previous not in {"", row.operation}:
            lines.append([""] * len(lines[0]))
        cells = [
            row.operation if row.operation != previous else "",
            format_bytes(row.bytes, binary=True),
            _microseconds(row.hpctrain),
            _bandwidth(row.bytes, row.hpctrain),
            _microseconds(row.mpi4py),
            _bandwidth(row.bytes, row.mpi4py),
            f"{row.ratio:.2f}",
            _microseconds(row.hpctrain - row.mpi4py),
        ]
        if gloo:
            seconds = row.gloo
            cells += (
                ["-", "-"] if seconds is None else [_microseconds(seconds), f"{row.hpctrain / seconds:.2f}"]
            )
        lines.append([*cells, "" if row.within_limits else "over"])
        previous = row.operation
    count = sum(row.within_limits for row in rows)
    return [
        f"Collectives of fp32 tensors on {ranks} ranks, median times",
        *table(lines),
        f"Within the limits: {count} of {len(rows)} ({_limits(rows)}).",
    ]


def _limits(rows: Sequence[CollectiveRow]) -> str:
    """Return the limits of `CollectiveRow.within_limits` as text."""
    small, huge = (format_bytes(size, binary=True) for size in (LARGE_BYTES, HUGE_BYTES))
    limits = [
        f"{LARGE_RATIO:.2f} times the time of mpi4py from {small}, {SMALL_SECONDS * 1e6:.0f} us more below"
    ]
    if any(row.shared for row in rows):
        limits.append(f"through shared memory up to {small}, the time of mpi4py")
        for name, (over_mpi4py, over_gloo) in SPEEDS.items():
            gloo = f" and {1 / over_gloo:.2f} times that of gloo" if over_gloo else ""
            limits.append(f"{name} from {huge}, {1 / over_mpi4py:.2f} times the time of mpi4py{gloo}")
    return "; ".join(limits)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if abs(seconds) < 0.01 else f"{seconds * 1e3:,.1f} ms"


def _bandwidth(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.2f} GB/s"
