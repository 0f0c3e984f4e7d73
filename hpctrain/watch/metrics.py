"""`metrics.jsonl`: what every step measured, one strict JSON object a line, every step once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import finite
from hpctrain.report.rows import Row, read_metrics, scan_metrics

__all__ = ["MetricsWriter", "StepMetrics", "read_metrics"]

Measured = bool | int | float | None


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step measured, over all ranks unless said otherwise.

    `step` counts steps done, this one included; `tokens` counts the tokens of all of them. `loss` is in nats
    per token, `grad_norm` is before clipping, `seconds` is this step's wall time, `batch` its sequences,
    `mfu` the model FLOPs over the peak FLOPs (0 to 1). A measure that is None was not made and gets no key.
    """

    step: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_s: float
    batch: int
    skipped: bool = False
    loss_scale: float | None = None
    mfu: float | None = None
    peak_rss_bytes: int | None = None
    validation_loss: float | None = None
    extra: Mapping[str, Measured] = dataclasses.field(default_factory=dict)

    def row(self) -> Row:
        """The row of the metrics file: the fields that were measured, then the extra ones, in this order."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "extra"]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None} | dict(self.extra)


class MetricsWriter:
    """Appends rows to a metrics file; each is in the hands of the operating system when `write` returns.

    With `resume_step` None the run is a new one and the file must not hold rows yet (HpctrainError). With
    `resume_step` S the rows of later steps, which an earlier run wrote after its last checkpoint, are cut
    off, and so is a torn last line. Only rank 0 makes one. A disk that refuses is an InputOutputError.
    """

    def __init__(self, path: Path | str, resume_step: int | None = None) -> None:
        self.path = Path(path)
        with failing_as(f"{self.path}: cannot be opened"):
            if resume_step is None:
                _demand_new(self.path)
            elif self.path.exists():
                _cut(self.path, resume_step)
            self._file = self.path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics) -> None:
        """Append the row of one step; values that are not finite are written as null."""
        self._append(metrics.row())

    def write_evaluation(self, step: int, tokens: int, loss: float) -> None:
        """Append an evaluation that belongs to no step of this run, such as the one before the first step."""
        self._append({"step": step, "tokens": tokens, "validation_loss": loss})

    def close(self) -> None:
        """Close the file, once its rows have reached the disk; a second call does nothing."""
        if not self._file.closed:
            with failing_as(f"{self.path}: cannot be written"), self._file:
                os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, row: Row) -> None:
        strict = {name: finite(value) for name, value in row.items()}
        line = json.dumps(strict, allow_nan=False).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        with failing_as(f"{self.path}: cannot be written"):
            written: int | None = None
            try:
                written = self._file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # Half a line would swallow the next one, should the run go on.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise


def _demand_new(path: Path) -> None:
    if path.exists() and path.stat().st_size > 0:
        raise HpctrainError(
            f"{path}: holds the metrics of an earlier run; replace it with `--fresh`, or give the new run "
            "another run.dir"
        )


def _cut(path: Path, last_step: int) -> None:
    """Leave only the rows of steps up to `last_step`; the old file stands until the new one does."""
    shorter = path.with_name(path.name + ".new")
    with shorter.open("wb") as kept:
        for line, row in scan_metrics(path):
            if row is not None and row["step"] <= last_step:
                kept.write(line)
        kept.flush()
        os.fsync(kept.fileno())
    shorter.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
