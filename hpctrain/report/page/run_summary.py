"""What a run's folder tells of it, as a page takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpctrain.checkpoint.provenance import HistorySegment
from hpctrain.report.marks import StepMark
from hpctrain.report.recorded import RecordedStep
from hpctrain.report.rows import Row
from hpctrain.report.samples import ShownAnswer
from hpctrain.units import format_bytes, format_seconds


class ValuePair(NamedTuple):
    """Something of which there is a prediction, a measurement or both; None where there is none."""

    words: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class PredictedVsMeasured:
    """What was predicted beside what was measured, in `bytes` or "seconds", with a note on it; the last pair
    is of all others together if `total`.
    """

    heading: str
    unit: str
    pairs: Sequence[ValuePair]
    note: str = ""
    total: bool = True

    def written(self, value: float) -> str:
        """A value as people read it."""
        return format_bytes(value) if self.unit == "bytes" else format_seconds(value)


@dataclass(frozen=True)
class RunEvent:
    """What happened: when, as the log tells it, or ""; at which step, if at any; what kind of thing; how."""

    time: str
    step: int | None
    kind: str
    words: str


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that is there: its file, bytes, when it was written (UTC), and what else is to be said."""

    path: Path
    size: int
    written: str
    note: str = ""


@dataclass(frozen=True)
class RunSummary:
    """A run. `state` and `facts` are its status, in words; `deck` is told by "section.key"; `history` are the
    runs of its chain. `problems` are sentences on what could not be read.
    """

    name: str
    folder: Path
    title: str
    rows: Sequence[Row]
    marks: Sequence[StepMark] = ()
    counts: str = "tokens"
    state: str = ""
    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    deck: Mapping[str, str] = field(default_factory=dict)
    comparisons: Sequence[PredictedVsMeasured] = ()
    step: RecordedStep | None = None
    checkpoints: Sequence[KeptCheckpoint] = ()
    history: Sequence[HistorySegment] = ()
    events: Sequence[RunEvent] = ()
    samples: Sequence[ShownAnswer] = ()
    problems: Sequence[str] = ()
