"""Stacked bars: heights, what is pooled, and the ideal line.

Tests of report/scaling.py and report/figures.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.report.figures import require_picture_suffix
from hpctrain.report.scaling import PlannedBar, draw_causes, draw_scaling

BARS = [
    PlannedBar("4", 4, {"products": 4.0, "sums": 2.0, "dust": 0.001}, 190.0),
    PlannedBar("2", 2, {"products": 8.0, "sums": 1.0, "dust": 0.05}, 100.0),
]


def test_bars_stack_to_the_seconds_of_a_step() -> None:
    (axes,) = draw_causes("title", BARS).axes
    names = axes.get_legend_handles_labels()[1]
    assert names == ["products", "sums", "other (less than 1% each)"]
    columns = zip(*axes.containers, strict=True)
    tops = [max(patch.get_y() + patch.get_height() for patch in column) for column in columns]
    assert tops == pytest.approx([6.001, 9.05])
    heights = [[patch.get_height() for patch in container] for container in axes.containers]
    assert heights[:2] == [[4.0, 8.0], [2.0, 1.0]]


def test_ideal_is_the_fewest_ranks_speed_times_ranks() -> None:
    _, speeds = draw_scaling("title", BARS).axes
    ideal, planned = speeds.lines
    assert list(ideal.get_xdata()) == [2, 4] and list(ideal.get_ydata()) == [100.0, 200.0]
    assert list(planned.get_ydata()) == [100.0, 190.0]
    assert [text.get_text() for text in speeds.texts] == ["100%", "95%"]


def test_endings_are_those_of_pictures() -> None:
    for name in ("a.png", "b.SVG", "c.pdf"):
        require_picture_suffix(Path(name))
    with pytest.raises(HpctrainError, match="the name of a picture must end with"):
        require_picture_suffix(Path("a.jpeg"))
