"""Results of the runs of a sweep, as a table, and the best run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from hpctrain.deck.sections.evaluation import VALIDATION, MetricName, parse_metric_name
from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, HpctrainError
from hpctrain.report.series import metrics
from hpctrain.report.swept import SweptRun
from hpctrain.text import escaped, fitted
from hpctrain.train.sweep.variants import Sweep, SweepVariant
from hpctrain.units import format_count
from hpctrain.watch.metrics import evaluation_keys
from hpctrain.watch.statuses import read_status

_SHARE = 0.1
"""Fraction of the steps, at the end of a run, whose mean loss is shown."""


@dataclass(frozen=True)
class VariantResult:
    """Result of one run; NaN stands for a missing value.

    Attributes:
        variant: The run.
        state: State of the run, such as "done".
        step: Number of steps done.
        loss: Mean loss of the last tenth of the steps.
        validation: Last validation loss.
        tokens_per_s: Median of the tokens per second.
        selected: Value of the metric by which the best run is chosen.
    """

    variant: SweepVariant
    state: str
    step: int = 0
    loss: float = nan
    validation: float = nan
    tokens_per_s: float = nan
    selected: float = nan

    @property
    def done(self) -> bool:
        """True if all steps of its deck are done."""
        return self.state == "done"


def find_metric(sweep: Sweep, name: str | None) -> MetricName | None:
    """Return the metric with a name; raise HpctrainError if a run of the sweep does not have it."""
    if name is None:
        return None
    problems: list[str] = []
    metric = MetricName()
    for each in sweep.variants:
        try:
            metric = parse_metric_name(each.deck, name)
        except HpctrainError as error:
            problems += error.problems
    if problems:
        raise HpctrainError(list(dict.fromkeys(problems)))
    return metric


def results_of(
    sweep: Sweep, codes: Mapping[str, int] | None = None, metric: MetricName | None = None
) -> list[VariantResult]:
    """Return the results of all runs from their folders; `codes` are exit codes of ended runs."""
    return [_result(each, {} if codes is None else codes, metric) for each in sweep.variants]


def _result(variant: SweepVariant, codes: Mapping[str, int], metric: MetricName | None) -> VariantResult:
    code = codes.get(variant.name, EXIT_DONE)
    try:
        status = read_status(variant.folder)
        columns = metrics(variant.folder)
        state, done = escaped(str(status["state"])), int(status.get("step") or 0)
    except (HpctrainError, TypeError, ValueError):  # the file may have been written by another program
        return VariantResult(variant, "waiting" if code in (EXIT_DONE, EXIT_AGAIN) else "failed")
    if state == "done" and done < variant.deck.run.steps:
        state = "waiting"  # for more steps than it had
    if code not in (EXIT_DONE, EXIT_AGAIN) and state != "done":
        state = "failed"
    count = len(columns["step"])
    loss, selected = _mean(columns.get("loss"), max(1, round(_SHARE * count))), nan
    if metric is not None and metric.evaluation_set:
        [key] = evaluation_keys({metric.evaluation_set: {metric.kind: nan}})
        selected = _last(columns.get(key))
    elif metric is not None:
        selected = loss
    return VariantResult(
        variant,
        state,
        int(columns["step"][-1]) if count else 0,
        loss,
        _last(columns.get("validation_loss")),
        float(np.median(columns["tokens_per_s"])) if count and "tokens_per_s" in columns else nan,
        selected,
    )


def _mean(losses: np.ndarray | None, count: int) -> float:
    """Return the mean of the last `count` losses; NaN if one of them is not finite."""
    return nan if losses is None or not len(losses) else float(np.mean(losses[-count:]))


def _last(losses: np.ndarray | None) -> float:
    known = [] if losses is None else losses[np.isfinite(losses)]
    return float(known[-1]) if len(known) else nan


def best_of(results: Sequence[VariantResult], metric: MetricName | None = None) -> VariantResult | None:
    """Return the best finished run, if any.

    It has the lowest value of `metric`. Without a metric, it has the lowest validation loss if all finished
    runs have one, or else the lowest loss.
    """
    done = [each for each in results if each.done]
    if metric is not None:
        known = [each for each in done if isfinite(each.selected)]
        return min(known, key=lambda each: each.selected, default=None)
    validated = bool(done) and all(isfinite(each.validation) for each in done)
    known = [each for each in done if isfinite(each.validation if validated else each.loss)]
    return min(known, key=lambda each: each.validation if validated else each.loss, default=None)


def result_lines(
    sweep: Sweep, results: Sequence[VariantResult], width: int | None, metric: MetricName | None = None
) -> list[str]:
    """Return the lines of the table, in the order of the command, and the best run."""
    best = best_of(results, metric)
    more = metric is not None and metric not in _COLUMNS
    head = (*sweep.keys, "state", "step", *([metric.title] if metric is not None and more else []))
    head = (*head, "loss", "validation", "tokens/s", "")
    rows = [head, *(_row(each, sweep.keys, each is best, more) for each in results)]
    left = (*range(len(sweep.keys) + 1), len(head) - 1)
    lines = fitted(rows, left, width)
    if best is not None:
        lines += ["", f"best: {best.variant.folder}"]
    elif metric is not None and any(each.done for each in results):
        lines += ["", f"best: none, because no finished run has a {metric.title}"]
    return lines


_COLUMNS = (MetricName(), MetricName(VALIDATION))
"""Metrics that the table always contains."""


def _row(result: VariantResult, keys: Sequence[str], best: bool, more: bool) -> tuple[str, ...]:
    values = (*([result.selected] if more else []), result.loss, result.validation)
    losses = (f"{each:.4f}" if isfinite(each) else "" for each in values)
    rate = format_count(result.tokens_per_s) if isfinite(result.tokens_per_s) else ""
    step = f"{result.step}/{result.variant.deck.run.steps}"
    swept_values = (result.variant.values[key] for key in keys)
    return (*swept_values, result.state, step, *losses, rate, "best" if best else "")


def swept_runs(results: Sequence[VariantResult]) -> list[SweptRun]:
    """Return the runs for a picture."""
    return [
        SweptRun(each.variant.values, each.loss, each.validation, each.selected)
        for each in results
        if each.step
    ]
