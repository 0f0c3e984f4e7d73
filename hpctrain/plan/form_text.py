"""What ranks send each other, and what that is worth over a link, in words and a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hpctrain.plan.forms import FormPlan, OtherForm, OverLink
from hpctrain.report.terminal import columns
from hpctrain.text import fitted
from hpctrain.units import format_bytes, format_rate, format_seconds


def form_lines(plan: FormPlan) -> list[str]:
    """Bytes of a step by axis, of the deck and by exact sums; seconds over a link; nothing of one rank."""
    forms = {"payload per rank and step": plan.own} | (
        {"with exact sums": plan.exact} if plan.exact is not None else {}
    )
    moved = {name: each.most.payload() for name, each in forms.items()}
    axes = sorted({axis for payload in moved.values() for axis in payload})
    if not axes:
        return []
    head = ("axis", *forms)
    rows = [
        (name, *(format_bytes(of_axis) for of_axis in numbers))
        for name, numbers in [
            *((axis, [payload.get(axis, 0.0) for payload in moved.values()]) for axis in axes),
            *([("all axes", [sum(payload.values()) for payload in moved.values()])] if len(axes) > 1 else []),
        ]
    ]
    lines = ["", *fitted([head, *rows], (0,), columns())]
    if not plan.own.whole:
        lines.append(
            "Traffic of layers along the tensor and context axes is not included, since it depends on values."
        )
    return lines + ([sentence(plan.over)] if plan.over is not None else [])


def other_lines(others: Sequence[OtherForm]) -> list[str]:
    """A table of other forms, with seconds of a step over a link where there is one."""
    if not others:
        return []
    over = others[0].plan.over
    head = ["form", "payload per step", *([f"over {over.link}", "faster below"] if over is not None else [])]
    rows = [head]
    for each in others:
        cells = [each.name, format_bytes(sum(each.plan.own.most.payload().values()))]
        if each.plan.over is not None:
            own = each.plan.over.own
            cells.append(format_seconds(own.seconds if own.computing else own.moving))
            even = each.plan.over.even
            exact = each.plan.exact is None
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


def sentence(over: OverLink) -> str:
    """Over a link, how long a step takes, or what of it is known."""
    known = over.own.computing > 0
    own = _step(over.own.seconds if known else over.own.moving, known)
    text = f"Over a link of {over.link}, {own}"
    if known:
        text += f", compared with {format_seconds(over.own.computing)} without it"
    if over.exact is None:
        return f"{text}."
    exact = format_seconds(over.exact.seconds if known else over.exact.moving)
    text += f"; with exact sums it would be {exact}."
    if over.cost is None:
        return f"{text} Its computation is not measured on GPUs and not included."
    return (
        f"{text} Its computation takes {format_seconds(over.cost)} more on this machine: {_pays(over.even)}."
    )


def _step(seconds: float, known: bool) -> str:
    if known:
        return f"a step takes {format_seconds(seconds)}"
    return f"sending takes {format_seconds(seconds)} per step (add the rest with --step-seconds or --like)"


def _pays(even: float | None) -> str:
    if even is None:
        return "it is never faster"
    if even == inf:
        return "it is faster on any link"
    return f"it is faster on links below {format_rate(even)}"
