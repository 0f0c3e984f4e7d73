"""A pipeline schedule is data: per stage a list of actions that prints and parses as text."""

from __future__ import annotations

import re
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
_MOST_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: a kind, a micro-batch and the chunk of the stage; written `F3`, `B3.1`.

    Forward `F`, whole backward `B`, or backward in two pieces: the gradient of the input `I`, and of the
    weights `W`.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class ActionIndices(NamedTuple):
    """An action by numbers: the result that it needs and that it gives, the boundary between parts that the
    first one comes over, -1 for none, and where its time is among those of F, I, W and B of all parts.
    """

    need: int
    delay: int
    duration: int
    result: int


@dataclass(frozen=True)
class Wires:
    """Those of all stages, over so many `results`, of which one is `nothing`: known from the beginning."""

    of_stages: tuple[tuple[ActionIndices, ...], ...]
    results: int
    nothing: int


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in the order in which the stage does them.

    The model is cut into `parts`, one for each chunk of each stage. F of a part needs F of the part before
    it, B or I needs B or I of the part after it (the last part: its own F), W needs its own I, always of the
    same micro-batch. What is sent and received follows from that, so it is not written. The placement says
    where the parts are: `loop` goes from the last stage back to the first one, `v` turns around there.
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = ""
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        assert self.name == " ".join(self.name.split()), "a name is one line, or it does not parse back"

    @property
    def stage_count(self) -> int:
        """Stages of the pipeline, P."""
        return len(self.stages)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return 1 + max((action.micro_batch for stage in self.stages for action in stage), default=-1)

    @cached_property
    def chunks(self) -> int:
        """Model parts a stage holds."""
        return 1 + max((action.chunk for stage in self.stages for action in stage), default=0)

    @property
    def parts(self) -> int:
        """Pieces that the model is cut into: chunks x stages."""
        return self.chunks * self.stage_count

    @cached_property
    def most_alive(self) -> tuple[int, ...]:
        """Most chunks' micro-batches whose activations each stage holds at once."""
        return tuple(max(live_activations(actions), default=0) for actions in self.stages)

    @cached_property
    def wires(self) -> Wires:
        """What each action needs and gives."""
        parts, count = self.parts, self.micro_batches
        nothing, last = 2 * parts * count, parts - 1
        stages = []
        for stage, actions in enumerate(self.stages):
            of_chunk = [self.part(stage, chunk) for chunk in range(self.chunks)]
            wires = []
            for action in actions:
                part, number = of_chunk[action.chunk], action.micro_batch
                forward, backward = part * count + number, (parts + part) * count + number
                if action.kind == "F":
                    need = forward - count if part else nothing
                    wires.append(ActionIndices(need, part - 1, part, forward))
                elif action.kind == "W":
                    wires.append(ActionIndices(backward, -1, 2 * parts + part, nothing))
                else:
                    duration = part + (parts if action.kind == "I" else 3 * parts)
                    ends = part == last
                    need = forward if ends else backward + count
                    wires.append(ActionIndices(need, -1 if ends else part, duration, backward))
            stages.append(tuple(wires))
        return Wires(tuple(stages), nothing + 1, nothing)

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model, counted from the input, is chunk `chunk` of stage `stage`."""
        turned = self.placement == "v" and chunk % 2 == 1
        return chunk * self.stage_count + (self.stage_count - 1 - stage if turned else stage)

    def home(self, part: int) -> tuple[int, int]:
        """Stage and chunk of a part of the model."""
        chunk, stage = divmod(part, self.stage_count)
        turned = self.placement == "v" and chunk % 2 == 1
        return (self.stage_count - 1 - stage if turned else stage), chunk

    def __str__(self) -> str:
        counts = (self.stage_count, "stage"), (self.micro_batches, "micro-batch"), (self.chunks, "chunk")
        header = ", ".join([*(counted(*each) for each in counts), self.placement])
        named = f"# {self.name}: {header}" if self.name else f"# {header}"
        return "\n".join([named, *(" ".join(map(str, stage)) or _IDLE for stage in self.stages)])

    @staticmethod
    def parse(text: str, source: str = "schedule") -> Schedule:
        """Read what `str` prints: a line a stage, actions with blanks between them, `-` for a stage without.

        Lines that start with `#` are comments, but for the header, which gives the name and the placement
        and may be left out (no name, loop). Raises HpctrainError naming `source`, the line and the word.
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
            left = len(problems) - _MOST_PROBLEMS
            more = [f"{source}: and {left} more problems"] if left > 0 else []
            raise HpctrainError(problems[:_MOST_PROBLEMS] + more)
        if header is None:
            return Schedule(tuple(stages))
        line_number, match = header
        schedule = Schedule(tuple(stages), match["name"] or "", cast(Placement, match["placement"]))
        _check_header(schedule, match, f"{source}:{line_number}")
        return schedule


def stage_lines(text: str) -> tuple[int, ...]:
    """The line of each stage, counted from 1, in a text that `Schedule.parse` reads."""
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
    """A header that promises other counts than the lines below hold is a mistake in one of the two."""
    counts = schedule.stage_count, schedule.micro_batches, schedule.chunks
    problems = [
        f"{where}: the header has {match[key]} {key.replace('_', '-')}, but the lines below have {count}"
        for key, count in zip(("stages", "micro_batches", "chunks"), counts, strict=True)
        if int(match[key]) != count
    ]
    if problems:
        raise HpctrainError(problems)


def live_activations(actions: Iterable[Action]) -> Iterator[int]:
    """Chunks' micro-batches whose activations a stage holds after each of its actions.

    They live from F to the end of B, or of W where backward is split.
    """
    alive = 0
    for action in actions:
        alive += 1 if action.kind == "F" else -1 if action.kind != "I" else 0
        yield alive


def accumulation(micro_batches: int) -> Schedule:
    """One stage: every micro-batch forward, then backward, before the next."""
    kinds: tuple[Kind, ...] = ("F", "B")
    actions = tuple(Action(kind, index) for index in range(micro_batches) for kind in kinds)
    return Schedule((actions,), "accumulation")
