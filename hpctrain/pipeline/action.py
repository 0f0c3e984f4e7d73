"""A pipeline schedule is data: per stage a list of actions that prints and parses as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from hpctrain.errors import HpctrainError

Kind = Literal["F", "B"]

_ACTION = re.compile(r"([FB])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Action:
    """Forward `F` or backward `B` of one micro-batch through one chunk; written `F3`, `B3.1`."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in the order in which the stage does them."""

    stages: tuple[tuple[Action, ...], ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return 1 + max(action.micro_batch for stage in self.stages for action in stage)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, stage)) for stage in self.stages)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read what `str` prints: a line a stage, actions with blanks between them."""
        lines = [line for line in text.splitlines() if line.strip()]
        return Schedule(tuple(_parse_stage(line, number) for number, line in enumerate(lines)))


def _parse_stage(line: str, stage: int) -> tuple[Action, ...]:
    return tuple(_parse_action(word, stage) for word in line.split())


def _parse_action(word: str, stage: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise HpctrainError(f"schedule, stage {stage}: {word!r} is no action; write F3, B3 or B3.1")
    kind, micro_batch, chunk = match.groups()
    return Action(cast(Kind, kind), int(micro_batch), int(chunk or 0))


def accumulation(micro_batches: int) -> Schedule:
    """One stage: every micro-batch forward, then backward, before the next."""
    actions: Sequence[Action] = [
        Action(kind, index) for index in range(micro_batches) for kind in cast(tuple[Kind, ...], ("F", "B"))
    ]
    return Schedule((tuple(actions),))
