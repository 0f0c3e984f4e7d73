"""Pictures of the load of experts, by block and step."""

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

COLUMNS = 300
"""Largest number of columns. If there are more steps, each column stands for several."""

_LOAD, _UNUSED = "load", "unused"


def expert_loads(rows: Sequence[Row]) -> tuple[Array, list[int], dict[str, Array]]:
    """Return steps, blocks with experts, and the load of these.

    Steps without values for these blocks are left out. Values that are not finite are NaN.

    Returns:
        The steps [n]; the blocks that are mixtures in the last step; `load` and `unused` [blocks, n].
    """
    measured = [row for row in rows if isinstance(row.get("experts"), dict)]
    blocks = measured[-1]["experts"].get("blocks") if measured else None
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        blocks = []
    names = (_LOAD, _UNUSED)
    measured = [row for row in measured if _fits(row["experts"], blocks, names)]
    steps = np.array([row["step"] for row in measured], dtype=np.float64)
    values = {
        name: np.array([row["experts"][name] for row in measured], dtype=np.float64)
        .reshape(len(measured), len(blocks))
        .T
        for name in names
    }
    return steps, blocks, values


def draw_load(name: str, rows: Sequence[Row]) -> Figure | None:
    """Return a figure of the load of experts by block and step; None for a run without experts.

    A second panel shows unused experts, if there are any.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, blocks, values = expert_loads(rows)
    if not blocks or not len(steps):
        return None
    window = -(-len(steps) // COLUMNS)
    edges = _edges(steps, window)
    load = _in_columns(values[_LOAD], window, np.nanmean)
    unused = _in_columns(values[_UNUSED], window, np.nanmax)
    panels = 1 + bool(np.nanmax(unused, initial=0) > 0)
    height = min(4.5, max(2.6, 0.28 * len(blocks) + 1.2))
    figure = Figure(figsize=(8.0, 0.6 + height * panels), layout="constrained")
    axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    top = max(1.5, float(np.nanmax(load, initial=1.0)))
    over = f", mean of {window} steps" if window > 1 else ""
    label = f"largest load / mean load{over}"
    _heat(axes[0], edges, load, blocks, "viridis", (1.0, top), label)
    axes[0].set_title(f"Load of experts: {drawable(name)}", fontsize=14, loc="left", pad=10)
    if panels > 1:
        most = f", maximum of {window} steps" if window > 1 else ""
        most_unused = float(np.nanmax(unused))
        _heat(axes[1], edges, unused, blocks, "Reds", (0.0, most_unused), f"experts without a token{most}")
    axes[-1].set_xlabel("step", fontsize=12)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return figure


def _heat(
    axes: Axes,
    edges: Array,
    values: Array,
    blocks: list[int],
    colours: str,
    span: tuple[float, float],
    label: str,
) -> None:
    """Draw a cell for each block and column, and a colour bar."""
    from matplotlib.ticker import MaxNLocator

    rows = np.arange(len(blocks) + 1) - 0.5
    style: dict[str, Any] = {"cmap": colours, "vmin": span[0], "vmax": span[1], "rasterized": True}
    mesh = axes.pcolormesh(edges, rows, np.ma.masked_invalid(values), **style)
    axes.set_facecolor("#bbbbbb")  # colour of cells whose value is not finite
    axes.invert_yaxis()
    axes.set_ylabel("block", fontsize=12)
    shown = range(0, len(blocks), -(-len(blocks) // 16))
    axes.set_yticks(list(shown), [str(blocks[index]) for index in shown])
    axes.tick_params(labelsize=11)
    assert axes.figure is not None
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(label, fontsize=11)
    bar.locator = MaxNLocator(nbins=6, integer=span[0] == 0)
    bar.update_ticks()


def _edges(steps: Array, window: int) -> Array:
    """Return the beginnings of columns of `window` steps, and the end of the last one."""
    return np.append(steps[::window] - 0.5, steps[-1] + 0.5)


def _in_columns(values: Array, window: int, reduce: Any) -> Array:
    """Reduce values [blocks, n] to [blocks, columns] by a NumPy function; NaN if no value is finite."""
    columns = []
    for first in range(0, values.shape[1], window):
        piece = values[:, first : first + window]
        some = np.isfinite(piece).any(1)
        column = np.full(len(piece), np.nan)
        column[some] = reduce(piece[some], axis=1)
        columns.append(column)
    return np.stack(columns, axis=1)


def _fits(experts: dict[str, Any], blocks: list[int], names: Sequence[str]) -> bool:
    """Return True if there is a number or None for each of these blocks."""
    return experts.get("blocks") == blocks and all(
        isinstance(experts.get(name), list)
        and len(experts[name]) == len(blocks)
        and all(value is None or isinstance(value, (int, float)) for value in experts[name])
        for name in names
    )
