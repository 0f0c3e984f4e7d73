"""Traces of all ranks in one file of Chrome trace JSON, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.timeline import EVALUATION, PHASES, SCHEDULE, Timeline, TimelineSpan, clock_offset
from hpctrain.errors import InputOutputError
from hpctrain.pipeline.action import Schedule
from hpctrain.report.recorded import RecordedStep, recorded_step

_PIECE = 16 * 2**20
_ROWS = (SCHEDULE, EVALUATION, PHASES)


def write_trace(path: Path, timeline: Timeline, mesh: Mesh, schedule: Schedule) -> None:
    """Gather the timelines of all ranks into one file. Collective. The timeline pauses meanwhile.

    Processes are ranks. Threads are rows: the schedule, evaluation, phases of the step, and the groups along
    the axes, each with as many rows as it has simultaneous operations. Times are those of rank 0's clock.

    Args:
        path: The file.
        timeline: Timeline of this rank.
        mesh: Mesh of the ranks.
        schedule: Schedule, whose name and placement are written.

    Raises:
        InputOutputError: The file cannot be written; on all ranks.
    """
    timeline.pause()
    world = mesh.world
    everyone = world.everyone
    ahead = clock_offset(everyone, world.node)
    first = min((span.start for _, span in timeline.spans()), default=math.inf) - ahead
    zero = min(everyone.all_gather_object(first)) + ahead
    text = ",\n".join(map(_dump, rank_events(timeline, mesh, zero))).encode()
    sizes = everyone.all_gather_object(len(text))
    dropped = sum(everyone.all_gather_object(timeline.dropped))
    about = {
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.name,
            "placement": schedule.placement,
            "clock": "host",
            "dropped": dropped,
            "ranks": [mesh.coordinates(rank) for rank in range(world.size)],
        },
    }
    pieces = _pieces(everyone, text, sizes)
    head = _dump(about)[:-1] + ',"traceEvents":[\n'
    error = _write(path, head, pieces, "\n]}\n") if world.rank == 0 else None
    deque(pieces, maxlen=0)  # after an error, too, the other ranks' pieces must be received
    with world.agreement():
        if error is not None:
            raise InputOutputError(f"{path}: the trace cannot be written: {error.strerror or error}")


def gather_steps(timeline: Timeline, mesh: Mesh, schedule: Schedule) -> list[RecordedStep]:
    """Return the recorded steps of this rank's pipeline. Collective. The timeline pauses meanwhile."""
    timeline.pause()
    ahead = clock_offset(mesh.world.everyone, mesh.world.node)
    own = [
        [(span.start - ahead, span.end - ahead, span.name) for span in step.spans if span.row == SCHEDULE]
        for step in timeline.steps
    ]
    stages = mesh.group("pipeline").all_gather_object(own)
    return [
        recorded_step(
            step.step, dict(enumerate(each[number] for each in stages)), schedule.name, schedule.placement
        )
        for number, step in enumerate(timeline.steps)
    ]


def rank_events(timeline: Timeline, mesh: Mesh, zero: float) -> Iterator[dict[str, Any]]:
    """Yield the events of this rank, with microseconds since `zero` on its clock."""
    rank = mesh.world.rank
    axes = [axis for axis in mesh.sizes if axis != "pipeline" and mesh.size(axis) > 1]
    name = [f"rank {rank}", f"stage {mesh.coordinate('pipeline')}"]
    name += [f"{axis} {mesh.coordinate(axis)}" for axis in axes]
    yield _label("process_name", rank, 0, name=", ".join(name))
    yield _label("process_sort_index", rank, 0, sort_index=rank)
    rows: dict[str, list[tuple[int, TimelineSpan]]] = {row: [] for row in _ROWS}
    for step, span in timeline.spans():
        rows.setdefault(span.row, []).append((step, span))
    thread = 0
    for row, spans in rows.items():
        lane_of_span = lanes([span for _, span in spans])
        lane_count = max(lane_of_span, default=-1) + 1
        for lane in range(lane_count):
            yield _label("thread_name", rank, thread + lane, name=row)
            yield _label("thread_sort_index", rank, thread + lane, sort_index=thread + lane)
        for (step, span), lane in zip(spans, lane_of_span, strict=True):
            yield _event(rank, thread + lane, step, span, zero)
        thread += lane_count


def lanes(spans: list[TimelineSpan]) -> list[int]:
    """Assign each span of a row to a lane in which no two spans overlap.

    Returns:
        Lane of each span, in the order of `spans`. Lanes are numbered from 0, and as few as possible.
    """
    order = sorted(range(len(spans)), key=lambda index: (spans[index].start, spans[index].end))
    lane_ends: list[float] = []
    lane_of = [0] * len(spans)
    for index in order:
        span = spans[index]
        lane = next((lane for lane, end in enumerate(lane_ends) if end <= span.start), len(lane_ends))
        if lane == len(lane_ends):
            lane_ends.append(span.end)
        lane_ends[lane] = span.end
        lane_of[index] = lane
    return lane_of


def _event(rank: int, thread: int, step: int, span: TimelineSpan, zero: float) -> dict[str, Any]:
    # Start and end are rounded, not the length, so that spans which follow each other do not overlap.
    start, end = round((span.start - zero) * 1e6, 3), round((span.end - zero) * 1e6, 3)
    details: dict[str, Any] = {"step": step}
    if span.row not in _ROWS:
        details |= {"bytes": span.bytes, "inside_us": round(span.call_seconds * 1e6, 3)}
    at = {"ts": start, "dur": round(end - start, 3), "pid": rank, "tid": thread}
    return {"ph": "X", "name": span.name, "cat": span.row, **at, "args": details}


def _label(kind: str, rank: int, thread: int, **value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": value}


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _pieces(everyone: Group, text: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield the texts of all ranks with commas in pieces of `_PIECE` bytes on rank 0. Other ranks send."""
    for rank, size in enumerate(sizes):
        if rank > 0 and everyone.rank == 0:
            yield b",\n"
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            if everyone.rank == rank:
                piece = bytearray(text[start : start + length])
                if rank == 0:
                    yield bytes(piece)
                else:
                    everyone.send(torch.frombuffer(piece, dtype=torch.uint8), 0)
            elif everyone.rank == 0:
                yield everyone.recv(torch.empty(length, dtype=torch.uint8), rank).numpy().tobytes()


def _write(path: Path, head: str, pieces: Iterator[bytes], tail: str) -> OSError | None:
    """Write a file under a temporary name and rename it. Return the error if that fails."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            file.write(head.encode())
            for piece in pieces:
                file.write(piece)
            file.write(tail.encode())
        temporary.replace(path)
    except OSError as error:
        return error
    return None
