"""The picture of the experts' load: which cells it has, with what values, and where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.report.loads import COLUMNS, draw_load, expert_loads
from hpctrain.report.plots import plot_runs


def row(
    step: int, load: list[float | None], unused: list[int], blocks: tuple[int, ...] = (1, 3)
) -> dict[str, Any]:
    experts = {"blocks": list(blocks), "load": load, "unused": unused}
    return {"step": step, "loss": 2.0, "lr": 1e-3, "tokens_per_s": 1.0, "grad_norm": 1.0, "experts": experts}


def cells(axes: Any) -> np.ndarray:
    """What a panel shows, [blocks, columns]."""
    (mesh,) = axes.collections
    values: np.ndarray = np.ma.filled(mesh.get_array(), math.nan)
    return values


def test_every_block_and_step_has_a_cell() -> None:
    figure = draw_load(
        "small", [row(1, [4.0, 2.0], [1, 0]), row(2, [3.0, None], [0, 2]), row(3, [1.5, 1.0], [0, 0])]
    )
    assert figure is not None
    load, unused, load_bar, unused_bar = figure.axes
    assert np.array_equal(cells(load), [[4.0, 3.0, 1.5], [2.0, math.nan, 1.0]], equal_nan=True)
    assert np.array_equal(cells(unused), [[1, 0, 0], [0, 2, 0]])
    assert [label.get_text() for label in load.get_yticklabels()] == ["1", "3"]
    assert load.yaxis_inverted()
    assert load.get_title(loc="left") == "Load of experts: small"
    assert (load.get_ylabel(), unused.get_ylabel(), unused.get_xlabel()) == ("block", "block", "step")
    assert load_bar.get_ylabel() == "largest load / mean load"
    assert unused_bar.get_ylabel() == "experts without a token"
    assert load.get_xlim() == (0.5, 3.5)


def test_no_panel_for_unused_experts_where_there_are_none() -> None:
    figure = draw_load("small", [row(1, [4.0, 2.0], [0, 0])])
    assert figure is not None
    assert len(figure.axes) == 2


def test_many_steps_share_columns() -> None:
    steps = 2 * COLUMNS
    rows = [row(step, [float(step % 2 + 1), 1.0], [step % 2, 0]) for step in range(1, steps + 1)]
    figure = draw_load("small", rows)
    assert figure is not None
    assert np.array_equal(cells(figure.axes[0]), [[1.5] * COLUMNS, [1.0] * COLUMNS])
    assert np.array_equal(cells(figure.axes[1]), [[1] * COLUMNS, [0] * COLUMNS])
    assert figure.axes[2].get_ylabel() == "largest load / mean load, mean of 2 steps"


@pytest.mark.parametrize(
    "experts",
    [
        None,
        3,
        {},
        {"blocks": []},
        {"blocks": ["1"]},
        {"blocks": [1], "load": [1.0]},
        {"blocks": [1], "load": [1.0, 2.0], "unused": [0]},
        {"blocks": [1], "load": ["x"], "unused": [0]},
    ],
)
def test_rows_that_tell_of_no_mixture_are_passed_over(experts: Any) -> None:
    assert draw_load("dense", [{"step": 1, "loss": 2.0, "experts": experts}]) is None
    good = [row(2, [4.0, 2.0], [1, 0]), row(3, [3.0, 1.0], [1, 0])]
    steps, blocks, values = expert_loads([{"step": 1, "experts": experts}, row(1, [1.0], [0], (2,)), *good])
    assert (steps.tolist(), blocks, values["load"].tolist()) == ([2, 3], [1, 3], [[4.0, 3.0], [2.0, 1.0]])


def test_runs_with_mixtures_have_a_picture_each(tmp_path: Path) -> None:
    tables = {
        "a": [row(1, [4.0, 2.0], [1, 0])],
        "b": [row(1, [2.0, 2.0], [0, 0])],
        "dense": [row(1, [], [], ())],
    }
    for name, rows in tables.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert tmp_path / "a/plots/expert_load.png" in plot_runs([tmp_path / "a"])
    written = plot_runs([tmp_path / name for name in tables], tmp_path / "pictures")
    assert {path.name for path in written} >= {"expert_load_a.png", "expert_load_b.png"}
    assert "expert_load_dense.png" not in {path.name for path in written}
    assert (tmp_path / "pictures/expert_load_a.png").read_bytes().startswith(b"\x89PNG")
