"""`metrics.jsonl`: what every step measured, one strict JSON object a line, every step once."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from hpctrain.deck.sections.evaluation import VALIDATION
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import flush_to_disk, strict_json
from hpctrain.report.rows import Row, scan_metrics


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step measured, over all ranks unless said otherwise.

    `step` counts steps done, this one included; `tokens` counts the tokens of all of them, of a
    dataset that users bring the samples. `figures` are the
    objective's, "loss" among them in nats per token, `grad_norm` is before clipping, `seconds` is this step's
    wall time, `batch` its sequences, `epoch` how often as many were taken as there are, and `epochs` that of
    each entry of a mixture; `mfu` the model FLOPs over the peak FLOPs (0 to 1), `experts`
    the figures of the mixtures, by name lists with a value a mixture, and `fp8` what products in 8 bits lose
    and their scales, likewise with a value a kind of layer (`parallel/fp8/quantization_loss.py`).
    `payload_bytes` are those that rank 0 sent to others in this step, or received from them, as the ledger
    counts; `emulated_link` is there where seconds are those of a link that is not (`communication.emulate`);
    `evaluated` are the figures of what was evaluated after this step, by set
    (see `evaluation_keys`); `staleness`, with servers, is how many
    pushes had one of 0, 1, and so on. `spike` is why the step was left out as one, `went_back` the spike for
    which the run had gone back to the state before this step. A measure that is None was not made and gets no
    key.
    """

    step: int
    tokens: int
    figures: Mapping[str, float]
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_s: float
    batch: int
    skipped: bool = False
    epoch: float | None = None
    epochs: Mapping[str, float] | None = None
    loss_scale: float | None = None
    mfu: float | None = None
    peak_rss_bytes: int | None = None
    evaluated: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    experts: Mapping[str, Sequence[float]] | None = None
    fp8: Mapping[str, Sequence[str | float | None]] | None = None
    payload_bytes: int | None = None
    emulated_link: str | None = None
    staleness: Sequence[int] | None = None
    spike: str | None = None
    went_back: Row | None = None

    @property
    def loss(self) -> float:
        """Of a token, in nats."""
        return self.figures["loss"]

    def row(self) -> Row:
        """The row of the metrics file: what was measured in this order, and the figures besides the loss."""
        own = (each.name for each in fields(self) if each.name not in {"figures", "evaluated"})
        values = {name: getattr(self, name) for name in own}
        measured = {name: value for name, value in values.items() if value is not None}
        measured |= evaluation_keys(self.evaluated)
        return {"step": self.step, "tokens": self.tokens, "loss": self.loss} | measured | dict(self.figures)

    @property
    def validation_loss(self) -> float | None:
        """That of the held-out share, where it was evaluated."""
        return self.evaluated.get(VALIDATION, {}).get("loss")


def evaluation_keys(evaluated: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of sets by their keys in a row: of the held-out share `validation_loss` and so on; of another
    set the loss as `evaluation/NAME`, others as `evaluation/NAME/perplexity`.
    """
    found: dict[str, float] = {}
    for name, figures in evaluated.items():
        for figure, value in figures.items():
            other = f"evaluation/{name}" + (f"/{figure}" if figure != "loss" else "")
            found[f"{VALIDATION}_{figure}" if name == VALIDATION else other] = value
    return found


class MetricsWriter:
    """Appends rows to a metrics file; each is in the hands of the operating system when `write` returns.

    With `resume_step` None the run is a new one and the file must not hold rows yet (HpctrainError). With
    `resume_step` S the rows of later steps, which an earlier run wrote after its last checkpoint, are cut
    off, and so is a torn last line. Only rank 0 makes one. A disk that refuses is an InputOutputError.
    """

    def __init__(self, path: Path | str, resume_step: int | None = None) -> None:
        self.path = Path(path)
        with failing_as(f"{path}: cannot be opened"):
            if resume_step is not None and self.path.exists():
                cut_rows(self.path, resume_step)
            elif resume_step is None and self.path.exists() and self.path.stat().st_size > 0:
                raise HpctrainError(
                    f"{path}: holds the metrics of an earlier run; replace it with `--fresh`, or give the "
                    "new run another run.dir"
                )
            self._file = self.path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics) -> None:
        """Append the row of one step; values that are not finite are written as null."""
        line = strict_json(metrics.row()).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        with failing_as(f"{self.path}: cannot be written"):
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # Half a line would swallow the next one, should the run go on.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise

    def go_back(self, step: int) -> None:
        """Cut off the rows of later steps: the run makes them anew."""
        with failing_as(f"{self.path}: cannot be written"):
            self._file.close()
            cut_rows(self.path, step)
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file, once its rows have reached the disk; a second call does nothing."""
        if not self._file.closed:
            with failing_as(f"{self.path}: cannot be written"), self._file:
                os.fsync(self._file.fileno())


def cut_rows(path: Path, last_step: int) -> None:
    """Leave only the rows of steps up to `last_step`; the old file stands until the new one does."""
    shorter = path.with_name(path.name + ".new")
    with shorter.open("wb") as rows:
        for line, row in scan_metrics(path):
            if row is not None and row["step"] <= last_step:
                rows.write(line)
        rows.flush()
        os.fsync(rows.fileno())
    shorter.replace(path)
    flush_to_disk(path.parent)
