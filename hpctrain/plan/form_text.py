"""Text about the traffic of forms of communication, and about the step time over a slow link."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hpctrain.plan.forms import FormPlan, LinkPlan, OtherForm
from hpctrain.report.terminal import columns
from hpctrain.text import fitted
from hpctrain.units import format_bytes, format_rate, format_seconds


def form_lines(plan: FormPlan) -> list[str]:
    """Return a table of bytes per step and axis, and a sentence about the step time over a link.

    The result is empty for one rank.
    """
    forms = {"payload per rank and step": plan.form_traffic} | (
        {"with exact sums": plan.exact_traffic} if plan.exact_traffic is not None else {}
    )
    payloads = {name: each.largest.payload() for name, each in forms.items()}
    axes = sorted({axis for payload in payloads.values() for axis in payload})
    if not axes:
        return []
    head = ("axis", *forms)
    rows = [
        (name, *(format_bytes(of_axis) for of_axis in numbers))
        for name, numbers in [
            *((axis, [payload.get(axis, 0.0) for payload in payloads.values()]) for axis in axes),
            *(
                [("all axes", [sum(payload.values()) for payload in payloads.values()])]
                if len(axes) > 1
                else []
            ),
        ]
    ]
    lines = ["", *fitted([head, *rows], (0,), columns())]
    if not plan.form_traffic.complete:
        lines.append(
            "Traffic of layers along the tensor and context axes is not included, since it depends on values."
        )
    return lines + ([sentence(plan.over_link)] if plan.over_link is not None else [])


def alternative_lines(alternatives: Sequence[OtherForm]) -> list[str]:
    """Return a table of other forms of communication, with step times over a link if there is one."""
    if not alternatives:
        return []
    over = alternatives[0].plan.over_link
    head = ["form", "payload per step", *([f"over {over.link}", "faster below"] if over is not None else [])]
    rows = [head]
    for each in alternatives:
        cells = [each.name, format_bytes(sum(each.plan.form_traffic.largest.payload().values()))]
        if each.plan.over_link is not None:
            step = each.plan.over_link.step
            cells.append(format_seconds(step.seconds if step.computing else step.moving))
            even = each.plan.over_link.break_even
            exact = each.plan.exact_traffic is None
            cells.append(
                ""
                if exact
                else "never"
                if even is None
                else "any speed"
                if even == inf
                else format_rate(even)
            )
        rows.append(cells)
    return ["", *fitted(rows, (0,), columns())]


def sentence(over: LinkPlan) -> str:
    """Return a sentence about the step time over a link, as far as it is known."""
    has_time = over.step.computing > 0
    own = _step_clause(over.step.seconds if has_time else over.step.moving, has_time)
    text = f"Over a link of {over.link}, {own}"
    if has_time:
        text += f", compared with {format_seconds(over.step.computing)} without it"
    if over.exact_step is None:
        return f"{text}."
    exact = format_seconds(over.exact_step.seconds if has_time else over.exact_step.moving)
    text += f"; with exact sums it would be {exact}."
    if over.form_seconds is None:
        return f"{text} Its computation is not measured on GPUs and not included."
    result = _break_even_clause(over.break_even)
    return f"{text} Its computation takes {format_seconds(over.form_seconds)} more on this machine: {result}."


def _step_clause(seconds: float, has_time: bool) -> str:
    if has_time:
        return f"a step takes {format_seconds(seconds)}"
    return f"sending takes {format_seconds(seconds)} per step (add the rest with --step-seconds or --like)"


def _break_even_clause(even: float | None) -> str:
    if even is None:
        return "it is never faster"
    if even == inf:
        return "it is faster on any link"
    return f"it is faster on links below {format_rate(even)}"
