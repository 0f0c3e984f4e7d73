"""Picture of products in 8 bits: losses of quantization and scales of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.report.fonts import drawable
from hpctrain.report.metric_rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

KINDS = ("inputs", "weights", "gradients")
_VALUES = ("saturated", "underflowed", "scale_least", "scale_largest")


def quantization_losses(rows: Sequence[Row]) -> tuple[Array, list[str], dict[str, Array]]:
    """Return steps, kinds of layers, and the quantization losses of these layers.

    Steps without values for these layers are left out. Unknown values are NaN.

    Returns:
        The steps [n]; the kinds of layers of the last measured step; values [layers, n] by names such as
        `inputs_underflowed`.
    """
    names = [f"{kind}_{value}" for kind in KINDS for value in _VALUES]
    measured = [row for row in rows if isinstance(row.get("fp8"), dict)]
    layers = measured[-1]["fp8"].get("layers") if measured else None
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        layers = []
    measured = [row for row in measured if _fits(row["fp8"], layers, names)]
    steps = np.array([row["step"] for row in measured], dtype=np.float64)
    sizes = (len(measured), len(layers))
    values = {
        name: np.array([row["fp8"][name] for row in measured], dtype=np.float64).reshape(sizes).T
        for name in names
    }
    return steps, layers, values


def draw_losses(name: str, rows: Sequence[Row]) -> Figure | None:
    """Return a figure of the quantization losses of a run; None if it has not measured them.

    It has a row for inputs, weights and gradients each: to the left the shares that underflow and (dashed)
    saturate, to the right the range of scales as exponents of two. Each kind of layer has a colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps, layers, values = quantization_losses(rows)
    if not layers or not len(steps):
        return None
    figure = Figure(figsize=(11.0, 9.0), layout="constrained")
    panels = figure.subplots(len(KINDS), 2, sharex=True)
    for (shares, scales), kind in zip(panels, KINDS, strict=True):
        for index in range(len(layers)):
            of_layer = {value: values[f"{kind}_{value}"][index] for value in _VALUES}
            style: dict[str, Any] = {"color": f"C{index}", "marker": "." if len(steps) < 40 else None}
            shares.plot(steps, of_layer["underflowed"], linewidth=1.6, **style)
            shares.plot(steps, of_layer["saturated"], linewidth=1.2, linestyle="--", **style)
            least, largest = of_layer["scale_least"], of_layer["scale_largest"]
            scales.fill_between(steps, least, largest, color=f"C{index}", alpha=0.15)
            for scale in (least, largest):
                scales.plot(steps, scale, linewidth=1.2, **style)
        shares.set_yscale("symlog", linthresh=1e-6)
        shares.set_ylim(bottom=0)
        shares.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        shares.set_ylabel(kind, fontsize=12)
        scales.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        scales.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))
        for axes in (shares, scales):
            _set_style(axes)
    panels[0, 0].set_title("underflowed, and saturated (dashed)", fontsize=12, loc="left")
    panels[0, 1].set_title("smallest and largest scale", fontsize=12, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("step", fontsize=12)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    figure.suptitle(f"Products in 8 bits: {drawable(name)}", fontsize=14, x=0.01, ha="left")
    lines = [Line2D([], [], color=f"C{index}", linewidth=1.8) for index in range(len(layers))]
    figure.legend(lines, list(map(drawable, layers)), loc="outside lower center", ncols=4, fontsize=10)
    return figure


def _set_style(axes: Axes) -> None:
    axes.tick_params(labelsize=11)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _fits(values: dict[str, Any], layers: list[str], names: Sequence[str]) -> bool:
    """Return True if there is a number or None for each of these layers."""
    return values.get("layers") == layers and all(
        isinstance(values.get(name), list)
        and len(values[name]) == len(layers)
        and all(value is None or isinstance(value, (int, float)) for value in values[name])
        for name in names
    )
