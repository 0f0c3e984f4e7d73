"""Table and sentences about the time of a step."""

from __future__ import annotations

from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.measured_step import MeasuredStep, side_by_side
from hpctrain.plan.time.step_plan import StepPlan
from hpctrain.text import counted, table
from hpctrain.units import format_count, format_seconds

WHAT = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise operations",
    "recompute": "recomputation",
    "tensor": "waiting for tensor ranks",
    "context": "waiting for context ranks",
    "expert": "expert exchange",
    "messages": "messages between stages",
    "bubble": "pipeline bubble",
    "gradients": "gradient reduction",
    "parameters": "parameter gathering",
    "offload": "offload transfers",
    "optimizer": "optimizer",
    "fixed": "other",
}

WHAT_TOGETHER = {
    "computing": "computation",
    "stages": WHAT["bubble"],
    "update": "optimizer and offload",
}
COMPARED = ("predicted", "measured", "deviation")
"""Columns of predicted and measured values; the deviation is above 0 if the prediction is higher."""

_LEAST = 5e-4
"""Smallest share of a step that has a line."""
_LEAST_HOURS = 0.01


def time_lines(step: StepPlan, machine: MachineRates, hours: str = "rank-hours") -> list[str]:
    """Return lines about the time of a step by cause, its speed, and the time of the run.

    Args:
        step: The predicted step.
        machine: The machine by whose rates it was predicted.
        hours: Unit of the cost of the run, such as "GPU-hours".
    """
    rows = [
        (f"  {WHAT[cause]}", format_seconds(seconds), f"{100 * seconds / step.seconds:.1f}%")
        for cause, seconds in sorted(step.seconds_by_cause.items(), key=lambda each: -each[1])
        if seconds > _LEAST * step.seconds
    ]
    return [
        f"A step takes {format_seconds(step.seconds)} on {machine.name}: "
        f"{format_count(step.tokens / step.seconds)} tokens/s, "
        f"{step.flops_per_rank / 1e12:.3g} TFLOP/s per rank, {100 * step.mfu:.1f}% MFU"
        f"{' (without recomputation)' if step.flops < step.hardware_flops else ''}.",
        *table(rows),
        f"The run of {format_count(step.steps)} steps takes {_run_time(step.run_seconds)}, "
        f"{_hours(step.rank_hours)} {hours}.",
        *_ignored_lines(step),
    ]


def _run_time(seconds: float) -> str:
    """Return the time of a run, from a day on also as a decimal number of days."""
    text = format_seconds(seconds)
    return text if seconds < 86400 else f"{text} ({seconds / 86400:.3g} days)"


def _hours(hours: float) -> str:
    """Return a number of hours; a small one as the bound that it is below."""
    return format_count(hours) if hours >= _LEAST_HOURS else f"less than {_LEAST_HOURS:g}"


def comparison_lines(step: StepPlan, machine: MachineRates, measured: MeasuredStep, stages: int) -> list[str]:
    """Return a table of predicted and measured seconds of a step on a stage, by cause if they are known."""
    holder = f"a step of stage {step.stage}" if stages > 1 else "a step"
    pairs = list[tuple[str, float, float]]()
    if measured.seconds_by_cause is not None:
        pairs = side_by_side(step.seconds_by_cause, measured.seconds_by_cause)
    least = _LEAST * max(step.seconds, measured.seconds)
    words = WHAT | WHAT_TOGETHER
    rows_shown = [
        (words[name], predicted, actual)
        for name, predicted, actual in pairs
        if max(predicted, actual) > least
    ]
    rows = [(holder, *COMPARED)]
    for name, predicted, actual in [*rows_shown, ("total", step.seconds, measured.seconds)]:
        ratio = f"{100 * (predicted - actual) / actual:+.1f}%" if actual > least else ""
        rows.append((name, format_seconds(predicted), format_seconds(actual), ratio))
    mean = f"Measured: mean of {counted(measured.steps, 'step')} and {counted(measured.ranks, 'rank')}"
    lines = [*table(rows), f"{mean}. Predicted: from the rates of {machine.name}."]
    if measured.seconds_by_cause is None:
        lines.append("Causes are not measured on GPUs, because the host only knows when it started kernels.")
    elif stages > 1 and "stages" in measured.seconds_by_cause:
        lines.append("With run.trace = true, the time of messages is measured too.")
    return [*lines, *_ignored_lines(step)]


def _ignored_lines(step: StepPlan) -> list[str]:
    return [f"The effect of {', '.join(step.ignored_keys)} is not included."] if step.ignored_keys else []
