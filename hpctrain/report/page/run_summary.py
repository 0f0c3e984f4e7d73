"""Contents of a report page about a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpctrain.checkpoint.provenance import HistorySegment
from hpctrain.report.marks import StepMark
from hpctrain.report.metric_rows import Row
from hpctrain.report.recorded import RecordedStep
from hpctrain.report.samples import SampledAnswer
from hpctrain.units import format_bytes, format_seconds


class ValuePair(NamedTuple):
    """Predicted and measured value of a quantity; None if there is none."""

    words: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class PredictedVsMeasured:
    """Table of predicted and measured values.

    Attributes:
        heading: Title of the table.
        unit: "bytes" or "seconds".
        pairs: The values.
        note: Note below the table.
        total: True if the last pair is the sum of all others.
    """

    heading: str
    unit: str
    pairs: Sequence[ValuePair]
    note: str = ""
    total: bool = True

    def written(self, value: float) -> str:
        """Return a value with its unit as text."""
        return format_bytes(value) if self.unit == "bytes" else format_seconds(value)


@dataclass(frozen=True)
class RunEvent:
    """Event of a run.

    Attributes:
        time: Time in the log; "" if the log has none.
        step: Step; None if there is none.
        kind: Kind of the event.
        words: Description.
    """

    time: str
    step: int | None
    kind: str
    words: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """Existing checkpoint.

    Attributes:
        path: Its file.
        size: Size in bytes.
        written: When it was written (UTC).
        note: Names of links to it.
    """

    path: Path
    size: int
    written: str
    note: str = ""


@dataclass(frozen=True)
class RunSummary:
    """Everything that a page shows of a run.

    Attributes:
        name: Short name.
        folder: The run folder.
        title: Title of the run.
        rows: Rows of metrics.
        marks: Events at steps.
        counts: What the run counts, "tokens" or "samples".
        state: State in its status.
        reason: Reason of its end.
        facts: Further values of its status, by description.
        deck: Values of its deck by "section.key".
        comparisons: Predicted and measured values.
        step: Recorded step of a pipeline; None without one.
        checkpoints: Its checkpoints.
        history: Runs of its chain.
        events: Events in its logs.
        samples: Answers of a policy.
        problems: Sentences about files that could not be read.
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
    checkpoints: Sequence[StoredCheckpoint] = ()
    history: Sequence[HistorySegment] = ()
    events: Sequence[RunEvent] = ()
    samples: Sequence[SampledAnswer] = ()
    problems: Sequence[str] = ()
