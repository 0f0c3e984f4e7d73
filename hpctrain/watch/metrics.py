"""`metrics.jsonl`: the metrics of each step, one strict JSON object per line."""

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
from hpctrain.report.metric_rows import Row, scan_metrics


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step, over all ranks unless said otherwise. None means that a value was not measured.

    Attributes:
        step: Number of steps that are done, with this one.
        tokens: Number of tokens of all these steps; with the user's own data set, of samples.
        metrics: Metrics of the objective by name, such as "loss" in nats per token.
        grad_norm: Norm of the gradient before clipping.
        lr: Learning rate.
        seconds: Wall time of the step.
        tokens_per_s: Tokens (or samples) per second.
        batch: Number of sequences.
        skipped: True if the step made no update.
        epoch: Number of passes over the data.
        epochs: Number of passes over the data of each entry of a mixture.
        loss_scale: Loss scale in fp16.
        mfu: Model FLOPs per second over peak FLOP/s (0 to 1).
        peak_rss_bytes: Peak of the memory of a rank's process.
        evaluated: Metrics of sets that were evaluated after this step, by set (see `evaluation_keys`).
        experts: Metrics of mixtures of experts by name, with a value for each mixture.
        fp8: Quantization losses and scales of products in 8 bits by name, with a value for each kind of layer
            (`parallel/fp8/quantization_loss.py`).
        payload_bytes: Bytes that rank 0 sent or received in this step, as the ledger counts them.
        emulated_link: Link that `communication.emulate` names, by which seconds are computed.
        staleness: With servers, number of pushes with a staleness of 0, 1, and so on.
        spike: Reason why the step was skipped as a spike.
        went_back: Row of the spike because of which the run went back to the state before this step.
    """

    step: int
    tokens: int
    metrics: Mapping[str, float]
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
        """Mean loss per token, in nats."""
        return self.metrics["loss"]

    def row(self) -> Row:
        """Return the row of the metrics file, with the values that were measured."""
        names = (each.name for each in fields(self) if each.name not in {"metrics", "evaluated"})
        values = {name: getattr(self, name) for name in names}
        measured = {name: value for name, value in values.items() if value is not None}
        measured |= evaluation_keys(self.evaluated)
        return {"step": self.step, "tokens": self.tokens, "loss": self.loss} | measured | dict(self.metrics)

    @property
    def validation_loss(self) -> float | None:
        """Loss of the validation split after this step; None if it was not evaluated."""
        return self.evaluated.get(VALIDATION, {}).get("loss")


def evaluation_keys(evaluated: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of evaluated sets by their keys in a row.

    Keys of the validation split are `validation_loss` and so on. Those of another set are `evaluation/NAME`
    for the loss, and names such as `evaluation/NAME/perplexity`.
    """
    values: dict[str, float] = {}
    for name, metrics in evaluated.items():
        for metric, value in metrics.items():
            other = f"evaluation/{name}" + (f"/{metric}" if metric != "loss" else "")
            values[f"{VALIDATION}_{metric}" if name == VALIDATION else other] = value
    return values


class MetricsWriter:
    """Appends rows to a metrics file, on rank 0. The operating system has a row when `write` returns.

    Args:
        path: The metrics file.
        resume_step: Step after which a resumed run continues: rows of later steps and an incomplete last line
            are removed. None for a new run, whose file must be empty.

    Raises:
        HpctrainError: The file of a new run has rows.
        InputOutputError: The file cannot be opened or written.
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
        """Append the row of one step. Values that are not finite are written as null."""
        line = strict_json(metrics.row()).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        with failing_as(f"{self.path}: cannot be written"):
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # If the run continues, the next row must not be appended to an incomplete line.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise

    def roll_back(self, step: int) -> None:
        """Remove the rows of later steps, which the run computes again."""
        with failing_as(f"{self.path}: cannot be written"):
            self._file.close()
            cut_rows(self.path, step)
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file after its rows have reached the disk. A second call does nothing."""
        if not self._file.closed:
            with failing_as(f"{self.path}: cannot be written"), self._file:
                os.fsync(self._file.fileno())


def cut_rows(path: Path, last_step: int) -> None:
    """Remove the rows of steps after `last_step`. The old file is replaced when the new one is complete."""
    shorter = path.with_name(path.name + ".new")
    with shorter.open("wb") as rows:
        for line, row in scan_metrics(path):
            if row is not None and row["step"] <= last_step:
                rows.write(line)
        rows.flush()
        os.fsync(rows.fileno())
    shorter.replace(path)
    flush_to_disk(path.parent)
