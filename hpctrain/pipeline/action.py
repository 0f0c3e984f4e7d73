"""Pipeline schedules as data: for each stage a list of actions, which can be printed and parsed.

A pipeline cuts the layers of a model into parts, and each stage (a rank of the pipeline axis) holds one part
or several, its chunks. The batch of a step is cut into micro-batches, so that the stages can work at the same
time. A schedule says in which order each stage runs the forward and backward passes of the micro-batches. For
example, 1F1B with two stages and three micro-batches is

      # 1f1b: 2 stages, 3 micro-batches, 1 chunk, loop
      F0 F1 B0 F2 B1 B2
      F0 B0 F1 B1 F2 B2

Stage 0 waits for B0 of stage 1, and stage 1 waits for each F of stage 0. Which tensors are sent, and to whom,
follows from the order.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from hpctrain.errors import HpctrainError
from hpctrain.text import counted

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]

_ACTION = re.compile(r"([FBIW])([0-9]{1,6})(?:\.([0-9]{1,3}))?")
_HEADER = re.compile(
    r"#\s*(?:(?P<name>.+):\s+)?(?P<stages>[0-9]{1,7}) stages?, "
    r"(?P<micro_batches>[0-9]{1,7}) micro-batch(?:es)?, (?P<chunks>[0-9]{1,7}) chunks?, (?P<placement>loop|v)"
)
_IDLE = "-"
_MAX_PROBLEMS = 10
"""Largest number of problems that an error lists."""


@dataclass(frozen=True, slots=True)
class Action:
    """Pass of one micro-batch through one chunk of the stage, written as `F3` or `B3.1`.

    `F` is the forward pass and `B` the whole backward pass. `I` and `W` are its two halves: the gradient of
    the chunk's input, which the stage before waits for, and the gradients of its weights, which nobody waits
    for until the end of the step.

    Attributes:
        kind: "F", "B", "I" or "W".
        micro_batch: Number of the micro-batch in the step, from 0.
        chunk: Number of the chunk on its stage, from 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class ActionIndices(NamedTuple):
    """Indices of what one action requires and produces, for simulations that use flat lists.

    A result is the output of F, or the gradient that B or I computes, of one micro-batch in one part of the
    model.

    Attributes:
        required: Index of the result that the action requires.
        boundary: Index of the boundary between parts that this result crosses; -1 if none.
        duration: Index of the action's time in the concatenated times of F, I, W and B of all parts.
        result: Index of the result that the action produces.
    """

    required: int
    boundary: int
    duration: int
    result: int


@dataclass(frozen=True)
class ScheduleDependencies:
    """Indices of all actions of a schedule.

    Attributes:
        by_stage: For each stage, the indices of its actions in order.
        result_count: Number of results.
        always_ready: Index of the result that is ready from the start, for actions that require none.
    """

    by_stage: tuple[tuple[ActionIndices, ...], ...]
    result_count: int
    always_ready: int


@dataclass(frozen=True)
class Schedule:
    """Actions of every stage, in the order in which the stage runs them.

    The model is cut into `parts`, one for each chunk of each stage. F of a part requires F of the part before
    it. B and I require B or I of the part after it; on the last part, its own F. W requires its own I. All of
    these are of the same micro-batch. Messages follow from this, so the schedule does not contain them.

    Attributes:
        stages: For each stage, its actions.
        name: Name of the schedule, on one line; "" if it has none.
        placement: Stages that hold consecutive parts. "loop" continues after the last stage with the first
            one. "v" turns around: the last stage holds two consecutive parts, and the first stage holds the
            first and the last part.
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = ""
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        assert self.name == " ".join(self.name.split()), "a name is one line, or it does not parse back"

    @property
    def stage_count(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.stages)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of the step."""
        return 1 + max((action.micro_batch for stage in self.stages for action in stage), default=-1)

    @cached_property
    def chunks(self) -> int:
        """Number of model parts that each stage holds."""
        return 1 + max((action.chunk for stage in self.stages for action in stage), default=0)

    @property
    def parts(self) -> int:
        """Number of parts into which the model is cut: chunks x stages."""
        return self.chunks * self.stage_count

    @cached_property
    def peak_live_chunks(self) -> tuple[int, ...]:
        """For each stage, the most (chunk, micro-batch) pairs whose activations it holds at once."""
        return tuple(max(live_activations(actions), default=0) for actions in self.stages)

    @cached_property
    def dependencies(self) -> ScheduleDependencies:
        """Indices of what each action requires and produces."""
        parts, count = self.parts, self.micro_batches
        nothing, last = 2 * parts * count, parts - 1
        stages = []
        for stage, actions in enumerate(self.stages):
            of_chunk = [self.part(stage, chunk) for chunk in range(self.chunks)]
            action_indices = []
            for action in actions:
                part, number = of_chunk[action.chunk], action.micro_batch
                forward, backward = part * count + number, (parts + part) * count + number
                if action.kind == "F":
                    need = forward - count if part else nothing
                    action_indices.append(ActionIndices(need, part - 1, part, forward))
                elif action.kind == "W":
                    action_indices.append(ActionIndices(backward, -1, 2 * parts + part, nothing))
                else:
                    duration = part + (parts if action.kind == "I" else 3 * parts)
                    ends = part == last
                    need = forward if ends else backward + count
                    action_indices.append(ActionIndices(need, -1 if ends else part, duration, backward))
            stages.append(tuple(action_indices))
        return ScheduleDependencies(tuple(stages), nothing + 1, nothing)

    def part(self, stage: int, chunk: int) -> int:
        """Return the index of the model part that `stage` holds as its chunk `chunk`. Part 0 is the first."""
        is_reversed = self.placement == "v" and chunk % 2 == 1
        return chunk * self.stage_count + (self.stage_count - 1 - stage if is_reversed else stage)

    def stage_and_chunk(self, part: int) -> tuple[int, int]:
        """Return the stage that holds a part of the model, and the part's number among the stage's chunks."""
        chunk, stage = divmod(part, self.stage_count)
        is_reversed = self.placement == "v" and chunk % 2 == 1
        return (self.stage_count - 1 - stage if is_reversed else stage), chunk

    def __str__(self) -> str:
        counts = (self.stage_count, "stage"), (self.micro_batches, "micro-batch"), (self.chunks, "chunk")
        header = ", ".join([*(counted(*each) for each in counts), self.placement])
        named = f"# {self.name}: {header}" if self.name else f"# {header}"
        return "\n".join([named, *(" ".join(map(str, stage)) or _IDLE for stage in self.stages)])

    @staticmethod
    def parse(text: str, source: str = "schedule") -> Schedule:
        """Return the schedule that a text describes, in the form that `str` prints.

        Each line has the actions of a stage, separated by blanks, or `-` for a stage without actions. Lines
        that start with `#` are comments, except for the header, which has the name and the placement. Without
        a header the name is "" and the placement "loop".

        Args:
            text: The text.
            source: Name of the text in error messages, such as the path of its file.

        Raises:
            HpctrainError: The text is not a schedule. The message names `source`, the line and the word.
        """
        stages: list[tuple[Action, ...]] = []
        problems: list[str] = []
        header: tuple[int, re.Match[str]] | None = None
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if line.lstrip().startswith("#"):
                match = _HEADER.fullmatch(" ".join(words))
                if match is not None and header is not None:
                    problems.append(f"{source}:{number}: repeats the header of line {header[0]}")
                elif match is not None:
                    header = number, match
            elif words:
                stages.append(tuple(_parse_stage(words, f"{source}:{number}", problems)))
        if not stages:
            problems.append(
                f"{source}: contains no stage (write one line of actions, such as F0 B0, for each stage)"
            )
        if problems:
            omitted = len(problems) - _MAX_PROBLEMS
            more = [f"{source}: and {omitted} more problems"] if omitted > 0 else []
            raise HpctrainError(problems[:_MAX_PROBLEMS] + more)
        if header is None:
            return Schedule(tuple(stages))
        line_number, match = header
        schedule = Schedule(tuple(stages), match["name"] or "", cast(Placement, match["placement"]))
        _check_header(schedule, match, f"{source}:{line_number}")
        return schedule


def stage_lines(text: str) -> tuple[int, ...]:
    """Return the line number of each stage, from 1, in a text that `Schedule.parse` reads."""
    return tuple(
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    )


def _parse_stage(words: list[str], where: str, problems: list[str]) -> Iterator[Action]:
    if words == [_IDLE]:
        return
    for word in words:
        match = _ACTION.fullmatch(word)
        if match is None:
            problems.append(
                f"{where}: {word!r}: is not an action (write F, B, I or W, the micro-batch and the chunk "
                "unless it is 0, such as F3 or B3.1)"
            )
        else:
            kind, micro_batch, chunk = match.groups()
            yield Action(cast(Kind, kind), int(micro_batch), int(chunk or 0))


def _check_header(schedule: Schedule, match: re.Match[str], where: str) -> None:
    """Raise HpctrainError if the header states other counts than the lines below it have."""
    counts = schedule.stage_count, schedule.micro_batches, schedule.chunks
    problems = [
        f"{where}: the header has {match[key]} {key.replace('_', '-')}, but the lines below have {count}"
        for key, count in zip(("stages", "micro_batches", "chunks"), counts, strict=True)
        if int(match[key]) != count
    ]
    if problems:
        raise HpctrainError(problems)


def live_activations(actions: Iterable[Action]) -> Iterator[int]:
    """Yield, after each action of a stage, the number of (chunk, micro-batch) pairs with saved activations.

    Activations are live from F to the end of B, or of W if the backward pass is split.
    """
    alive = 0
    for action in actions:
        alive += 1 if action.kind == "F" else -1 if action.kind != "I" else 0
        yield alive


def accumulation(micro_batches: int) -> Schedule:
    """Return the schedule of a single stage: gradient accumulation, one micro-batch after another."""
    kinds: tuple[Kind, ...] = ("F", "B")
    actions = tuple(Action(kind, index) for index in range(micro_batches) for kind in kinds)
    return Schedule((actions,), "accumulation")


def number_actions(passes: Iterable[str], micro_batches: int) -> tuple[Action, ...]:
    """Return a stage's actions, given the order of their kinds and chunks, by counting the micro-batches.

    Example: "F0", "F0", "B0" become F0, F1 and B0 of chunk 0.

    Args:
        passes: Kind and chunk of each action, such as "F0". "I" counts as "B". "W" without a chunk follows
            the earliest "I" that no such "W" has followed yet.
        micro_batches: Number of micro-batches; passes of further ones are left out.
    """
    counts: Counter[str] = Counter()
    split: deque[tuple[int, str]] = deque()  # micro-batch and chunk of each I
    actions = []
    for each in passes:
        kind, chunk = each[0], each[1:]
        if each == "W":
            number, chunk = split.popleft()
        else:
            key = each.replace("I", "B")
            number = counts[key]
            counts[key] += 1
        if kind == "I":
            split.append((number, chunk))
        if number < micro_batches:
            actions.append(Action(cast(Kind, kind), number, int(chunk)))
    return tuple(actions)
