"""The seconds of a step in words and a table for people."""

from __future__ import annotations

from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.measured import MeasuredStep, side_by_side
from hpctrain.plan.time.step import StepPlan
from hpctrain.text import counted, table
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

WHAT_TOGETHER = {
    "computing": "products, attention, all by element",
    "stages": WHAT["bubble"],
    "update": "optimizer, and what lies elsewhere",
}
COMPARED = ("predicted", "measured", "predicted more")
"""Columns of what was predicted beside what was measured: the last one says by how much, below 0 for less."""

_LEAST = 5e-4  # of a step: less is not worth a line


def time_lines(step: StepPlan, machine: MachineRates) -> list[str]:
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
        *_untold(step),
    ]


def comparison_lines(step: StepPlan, machine: MachineRates, measured: MeasuredStep, stages: int) -> list[str]:
    """Seconds of a step as planned, beside those measured on that stage; by cause where that is known."""
    holder = f"a step of stage {step.stage}" if stages > 1 else "a step"
    pairs = list[tuple[str, float, float]]()
    if measured.seconds_by_cause is not None:
        pairs = side_by_side(step.seconds_by_cause, measured.seconds_by_cause)
    least = _LEAST * max(step.seconds, measured.seconds)
    words = WHAT | WHAT_TOGETHER
    shown = [(words[name], there, here) for name, there, here in pairs if max(there, here) > least]
    rows = [(holder, *COMPARED)]
    for name, there, here in [*shown, ("the whole step", step.seconds, measured.seconds)]:
        ratio = f"{100 * (there - here) / here:+.1f}%" if here > least else ""
        rows.append((name, format_seconds(there), format_seconds(here), ratio))
    mean = f"Measured is the mean of {counted(measured.steps, 'step')} and {counted(measured.ranks, 'rank')}"
    lines = [*table(rows), f"{mean}, predicted by the rates of {machine.name}."]
    if measured.seconds_by_cause is None:
        lines.append(
            "By cause nothing is measured on GPUs: the host's clock tells when work was handed over."
        )
    elif stages > 1 and "stages" in measured.seconds_by_cause:
        lines.append("How long messages take, apart from that, is measured with run.trace = true.")
    return [*lines, *_untold(step)]


def _untold(step: StepPlan) -> list[str]:
    return [f"What changes with {', '.join(step.untold)} is not in it."] if step.untold else []
