"""The columns of a run's metrics: what they are where steps were repeated, values are missing, lines torn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report import series


def write(folder: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_columns_have_a_value_of_every_step(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        {"step": 1, "tokens": 64, "loss": 3.5, "skipped": False},
        {"step": 2, "tokens": 128, "loss": None, "skipped": True, "spike": "loss", "batch": 4},
        {"step": 3, "tokens": 192, "loss": 2, "validation_loss": 2.5, "experts": {"load": [0.5, None]}},
    )
    columns = hpctrain.metrics(run)
    assert [str(columns[name].dtype) for name in ("step", "tokens", "loss", "skipped", "spike", "batch")] == [
        *("int64", "int64", "float64", "bool", "object", "float64")
    ]
    assert columns["step"].tolist() == [1, 2, 3] and columns["tokens"].tolist() == [64, 128, 192]
    assert np.array_equal(columns["loss"], [3.5, np.nan, 2], equal_nan=True)
    assert columns["skipped"].tolist() == [False, True, False]
    assert columns["spike"].tolist() == ["", "loss", ""]
    assert np.array_equal(columns["validation_loss"], [np.nan, np.nan, 2.5], equal_nan=True)
    load = [[np.nan, np.nan], [np.nan, np.nan], [0.5, np.nan]]
    assert np.array_equal(columns["experts.load"], load, equal_nan=True)
    assert hpctrain.metrics(run / "metrics.jsonl").keys() == columns.keys()


def test_what_a_run_did_last_counts(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    again = [{"step": 3, "loss": 30.0, "spike": "x"}, {"step": 4, "loss": 40.0}]
    columns = hpctrain.metrics(write(tmp_path, *rows, *again))
    assert columns["step"].tolist() == [1, 2, 3, 4]
    assert columns["loss"].tolist() == [1, 2, 30, 40]
    assert columns["spike"].tolist() == ["", "", "x", ""]


def test_a_line_under_way_is_left_out_and_a_damaged_one_told(tmp_path: Path) -> None:
    torn = write(tmp_path, {"step": 1, "loss": 1.0}, '{"step": 2, "los')
    assert hpctrain.metrics(torn)["step"].tolist() == [1]
    with pytest.raises(InputOutputError, match=r"metrics.jsonl:2: not a JSON object"):
        hpctrain.metrics(write(tmp_path, {"step": 1}, "{}\n", {"step": 3}))
    assert hpctrain.metrics(write(tmp_path))["step"].tolist() == []


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    for folder, told, code in (
        (tmp_path, "since it has no metrics.jsonl", 2),
        (tmp_path / "away", "no such run folder or metrics.jsonl", 3),
    ):
        with pytest.raises(HpctrainError, match=told) as caught:
            hpctrain.metrics(folder)
        assert caught.value.exit_code == code
    with pytest.raises(HpctrainError, match="run: must be the path of a run's folder, not None"):
        hpctrain.metrics(None)  # type: ignore[arg-type]


def test_no_file_takes_more_memory_than_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ({"step": step, **{f"{step}-{each}": 1 for each in range(400)}} for step in range(1, 5))
    with pytest.raises(HpctrainError, match="more than 1000 metrics"):
        hpctrain.metrics(write(tmp_path, *many))
    monkeypatch.setattr(series, "CELLS", 100)
    with pytest.raises(HpctrainError, match="more than 100 values in 2 steps"):
        hpctrain.metrics(write(tmp_path, *({"step": step, "x": [0] * 60} for step in range(1, 9))))
    deep: dict[str, Any] = {"loss": 1.0}
    for _ in range(50):
        deep = {"a": deep}
    assert [*hpctrain.metrics(write(tmp_path, {"step": 1, **deep, "b": {"c": 2}}))] == ["step", "b.c"]


def test_reading_metrics_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    run = write(tmp_path, {"step": 1, "loss": 1.0})
    program = f"import sys, hpctrain; hpctrain.metrics({str(run)!r}); print('torch' in sys.modules, "
    program += "'mpi4py' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
