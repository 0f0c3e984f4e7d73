"""The picture of what products in 8 bits lose: its curves, and where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.report.eight_bits import KINDS, draw_losses, quantization_losses
from hpctrain.report.plots import plot_runs

LAYERS = ["attention.query", "feed_forward.down"]


def row(step: int, factor: float = 1.0, layers: list[str] = LAYERS) -> dict[str, Any]:
    told: dict[str, Any] = {"layers": layers}
    for number, kind in enumerate(KINDS):
        each = [factor * (number + index + 1) for index in range(len(layers))]
        told[f"{kind}_saturated"] = [1e-4 * value for value in each]
        told[f"{kind}_underflowed"] = [1e-2 * value for value in each]
        told[f"{kind}_scale_least"] = [-10.0 - number] * len(layers)
        told[f"{kind}_scale_largest"] = [-6.0 + number] * len(layers)
    return {"step": step, "loss": 2.0, "lr": 1e-3, "tokens_per_s": 1.0, "grad_norm": 1.0, "fp8": told}


def unwatched(step: int) -> dict[str, Any]:
    return {key: value for key, value in row(step).items() if key != "fp8"}


def test_each_kind_has_shares_and_scales_by_layer() -> None:
    figure = draw_losses("small", [row(10), unwatched(11), row(20, 2.0)])
    assert figure is not None
    shares, scales = figure.axes[::2], figure.axes[1::2]
    assert [axes.get_ylabel() for axes in shares] == list(KINDS)
    for number, (left, right) in enumerate(zip(shares, scales, strict=True)):
        for index in range(len(LAYERS)):
            under, over = left.lines[2 * index : 2 * index + 2]
            least = 1e-2 * (number + index + 1)
            assert np.allclose(under.get_xydata(), [(10, least), (20, 2 * least)])
            assert np.allclose(over.get_ydata(), [least / 100, least / 50])
            assert (under.get_linestyle(), over.get_linestyle()) == ("-", "--")
            assert [line.get_ydata()[0] for line in right.lines[2 * index : 2 * index + 2]] == [
                -10 - number,
                -6 + number,
            ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == LAYERS


@pytest.mark.parametrize("told", [None, 3, {}, {"layers": []}, {"layers": [1]}, {"layers": ["a"]}])
def test_rows_that_tell_nothing_are_passed_over(told: Any) -> None:
    bare = {"step": 1, "loss": 2.0, "fp8": told}
    assert draw_losses("plain", [bare]) is None
    one = row(3)
    one["fp8"]["inputs_scale_least"] = [None, -4.0]
    steps, layers, values = quantization_losses([bare, row(2, layers=["other"]), one])
    assert (steps.tolist(), layers) == ([3.0], LAYERS)
    assert np.array_equal(values["inputs_scale_least"], [[np.nan], [-4.0]], equal_nan=True)


def test_a_watched_run_has_the_picture(tmp_path: Path) -> None:
    for name, rows in (("watched", [row(1), row(2)]), ("plain", [unwatched(1)])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert "fp8.png" in [path.name for path in plot_runs([tmp_path / "watched"])]
    assert "fp8.png" not in [path.name for path in plot_runs([tmp_path / "plain"])]
    both = plot_runs([tmp_path / "watched", tmp_path / "plain"], tmp_path / "both")
    assert [path.name for path in both if "fp8" in path.name] == ["fp8_watched.png"]
