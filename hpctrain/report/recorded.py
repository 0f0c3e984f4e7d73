"""Steps as they ran, read from a trace: their bubble, and the times from which to simulate them."""

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
TRACE_BYTES = 1 << 30  # several times what a run writes at most


@dataclass(frozen=True)
class RecordedStep:
    """One step of one pipeline as it ran: the actions of each stage in order, with start and end.

    Actions start when what they need is there. Times are seconds from the first start.
    """

    step: int
    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    def measured(self) -> Simulation:
        """Cost, ideal and bubble, as the simulator defines them."""
        return summarize(self.schedule, self.start, self.end)

    def times(self) -> StageTimes:
        """The mean time of each kind of action in each part of the model, and of messages.

        A part whose backward is never split has all of it as its input gradient's. A message takes the
        time from the end of the action that makes it to the start of the one that needs it, counted where
        the receiver had nothing else to do meanwhile; a boundary without such a case takes the mean of
        the others, none at all where there is none.
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
        """Seconds in which a stage had nothing to do until another one was done, or at the end all were; and
        until what it needed had come from there.
        """
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
        """When the result of each action is there, by direction, part and micro-batch."""
        return {
            (action.kind == "F", self.schedule.part(stage, action.chunk), action.micro_batch): end
            for stage, actions in enumerate(self.schedule.stages)
            for action, end in zip(actions, self.end[stage], strict=True)
            if action.kind != "W"
        }

    def _sent(self, ends: Mapping[tuple[bool, int, int], float], stage: int, action: Action) -> float | None:
        """When another stage was done with what an action needs; None where it needs nothing of another."""
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
    """The recorded steps of the pipeline whose other coordinates are all 0, oldest first.

    Raises InputOutputError for a file that cannot be read, or is no trace of a run.
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
    """The step in which every stage did actions of these starts, ends and texts, by the schedule's name and
    placement.
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
