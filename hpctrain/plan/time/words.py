"""The seconds of a step in words and a table for people."""

from __future__ import annotations

from hpctrain.plan.time.machine import Machine
from hpctrain.plan.time.step import StepPlan
from hpctrain.table import table
from hpctrain.units import format_count, format_seconds

WHAT = {
    "products": "products with matrices",
    "attention": "attention",
    "elementwise": "norms, activations, sums, losses",
    "recompute": "what is computed again",
    "tensor": "tensor ranks wait for each other",
    "context": "context ranks wait for each other",
    "expert": "rows on their way to experts and back",
    "messages": "messages between stages",
    "bubble": "waiting for other stages",
    "gradients": "sums of gradients",
    "parameters": "gathered parameters",
    "offload": "what lies elsewhere, on its way",
    "optimizer": "optimizer",
    "fixed": "all else",
}

_LEAST = 5e-4  # of a step: less is not worth a line


def time_lines(step: StepPlan, machine: Machine) -> list[str]:
    """Where the seconds of a step go, how fast that is, and how long the run takes."""
    rows = [
        (f"  {WHAT[cause]}", format_seconds(seconds), f"{100 * seconds / step.seconds:.1f}%")
        for cause, seconds in sorted(step.seconds_by_cause.items(), key=lambda each: -each[1])
        if seconds > _LEAST * step.seconds
    ]
    return [
        f"A step takes {format_seconds(step.seconds)} on {machine.name}: "
        f"{format_count(step.tokens / step.seconds)} tokens/s, "
        f"{step.flops_per_rank / 1e12:.3g} TFLOP/s a rank, {100 * step.mfu:.1f}% of the peak"
        f"{' without what is computed again' if step.flops < step.hardware_flops else ''} (MFU).",
        *table(rows),
        f"The run's {format_count(step.steps)} steps take {format_seconds(step.run_seconds)}, or "
        f"{step.run_seconds / 86400:.3g} days: {format_count(step.rank_hours)} hours of ranks.",
        *([f"What changes with {', '.join(step.untold)} is not in it."] if step.untold else []),
    ]
