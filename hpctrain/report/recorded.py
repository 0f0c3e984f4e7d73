"""Recorded steps of a trace: their bubble, and the times from which they are simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.timeline import SCHEDULE
from hpctrain.errors import HpctrainError, InputOutputError, failing_as
from hpctrain.files import parse_json, read_text
from hpctrain.pipeline.action import Action, Kind, Placement, Schedule
from hpctrain.pipeline.simulate import Simulation, StageTimes, summarize

TRACE_FILE = "trace.json"
TRACE_BYTES = 1 << 30
"""Largest size of a trace, several times that of a run's largest one."""


@dataclass(frozen=True)
class RecordedStep:
    """Recorded step of one pipeline: the actions of each stage in order, with start and end.

    Actions start when their data are available. Times are seconds from the first start.
    """

    step: int
    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    def measured(self) -> Simulation:
        """Return cost, ideal and bubble, as the simulator defines them."""
        return summarize(self.schedule, self.start, self.end)

    def times(self) -> StageTimes:
        """Return the mean time of each kind of action in each part of the model, and of messages.

        If the backward pass of a part is never split, the input gradient has all of its time. A message takes
        the time from the end of the action that sends it to the start of the one that needs it, if the
        receiver was idle in between. A boundary without such a message has the mean of the others, or 0 if
        there are none.
        """
        schedule = self.schedule
        kinds: dict[tuple[Kind, int], list[float]] = {}
        for stage, actions in enumerate(schedule.stages):
            for action, start, end in zip(actions, self.start[stage], self.end[stage], strict=True):
                kinds.setdefault((action.kind, schedule.part(stage, action.chunk)), []).append(end - start)
        means = {key: math.fsum(values) / len(values) for key, values in kinds.items()}
        parts = range(schedule.parts)
        return StageTimes(
            forward=[means.get(("F", part), 0.0) for part in parts],
            input_gradient=[means.get(("I", part), means.get(("B", part), 0.0)) for part in parts],
            weight_gradient=[means.get(("W", part), 0.0) for part in parts],
            communication=self._message_times(),
        )

    def waits(self, stage: int) -> tuple[float, float]:
        """Return the seconds in which a stage waited for other stages to compute, and for messages."""
        ends = self._ends()
        bubble, messages = 0.0, 0.0
        free = min(row[0] for row in self.start if row)
        for action, start, end in zip(
            self.schedule.stages[stage], self.start[stage], self.end[stage], strict=True
        ):
            sent = self._sent(ends, stage, action)
            if sent is not None and start > free:
                came = min(max(sent, free), start)
                bubble, messages = bubble + came - free, messages + start - came
            free = end
        return bubble + max(row[-1] for row in self.end if row) - free, messages

    def _ends(self) -> dict[tuple[bool, int, int], float]:
        """Return when the result of each action is available, by direction, part and micro-batch."""
        return {
            (action.kind == "F", self.schedule.part(stage, action.chunk), action.micro_batch): end
            for stage, actions in enumerate(self.schedule.stages)
            for action, end in zip(actions, self.end[stage], strict=True)
            if action.kind != "W"
        }

    def _sent(self, ends: Mapping[tuple[bool, int, int], float], stage: int, action: Action) -> float | None:
        """Return when another stage had computed the data of an action; None if it needs none."""
        forward, part = action.kind == "F", self.schedule.part(stage, action.chunk)
        other = part - 1 if forward else part + 1
        if action.kind == "W" or not 0 <= other < self.schedule.parts:
            return None
        return (
            None
            if self.schedule.stage_and_chunk(other)[0] == stage
            else ends[forward, other, action.micro_batch]
        )

    def _message_times(self) -> list[float]:
        schedule, ends = self.schedule, self._ends()
        seen: list[list[float]] = [[] for _ in range(schedule.parts - 1)]
        for stage, actions in enumerate(schedule.stages):
            free = -math.inf
            for action, start, end in zip(actions, self.start[stage], self.end[stage], strict=True):
                sent = self._sent(ends, stage, action)
                if sent is not None and sent >= free:
                    part = schedule.part(stage, action.chunk)
                    seen[part - 1 if action.kind == "F" else part].append(start - sent)
                free = end
        every = [time for boundary in seen for time in boundary]
        overall = max(0.0, math.fsum(every) / len(every)) if every else 0.0
        return [max(0.0, math.fsum(each) / len(each)) if each else overall for each in seen]


def read_trace(path: Path) -> list[RecordedStep]:
    """Return the recorded steps of the first pipeline (its other coordinates are 0), oldest first.

    Raises:
        InputOutputError: The file cannot be read, or is not the trace of a run.
    """
    try:
        with failing_as(f"{path}: cannot be read"):
            content = parse_json(read_text(path, TRACE_BYTES))
    except ValueError as error:
        raise InputOutputError(f"{path}: not a whole JSON file; remove it, or run again") from error
    try:
        about = content["otherData"]
        pipeline = {
            rank: coordinates["pipeline"]
            for rank, coordinates in enumerate(about["ranks"])
            if not any(value for axis, value in coordinates.items() if axis != "pipeline")
        }
        steps: dict[int, dict[int, list[tuple[float, float, str]]]] = {}
        for event in content["traceEvents"]:
            if event["ph"] == "X" and event["cat"] == SCHEDULE and event["pid"] in pipeline:
                stages = steps.setdefault(event["args"]["step"], {stage: [] for stage in pipeline.values()})
                start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
                stages[pipeline[event["pid"]]].append((start, end, event["name"]))
        name, placement = about["schedule"], about["placement"]
        return [recorded_step(step, stages, name, placement) for step, stages in sorted(steps.items())]
    except (KeyError, TypeError, AttributeError, HpctrainError) as error:
        raise InputOutputError(
            f"{path}: not the trace of a run; one is written by a run with run.trace = true"
        ) from error


def recorded_step(
    step: int, stages: Mapping[int, Sequence[tuple[float, float, str]]], name: str, placement: Placement
) -> RecordedStep:
    """Return a recorded step.

    Args:
        step: Number of the step.
        stages: Start, end and text of the actions of each stage.
        name: Name of the schedule.
        placement: Placement of the model's parts.
    """
    rows = [sorted(stages[stage]) for stage in sorted(stages)]
    zero = min(row[0][0] for row in rows if row)
    return RecordedStep(
        step,
        Schedule(
            tuple(tuple(Schedule.parse(text, "trace").stages[0][0] for _, _, text in row) for row in rows),
            name,
            placement,
        ),
        tuple(tuple(start - zero for start, _, _ in row) for row in rows),
        tuple(tuple(end - zero for _, end, _ in row) for row in rows),
    )
