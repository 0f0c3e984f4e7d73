from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.host.memory import peak_rss_bytes
from hpctrain.report.metric_rows import read_metrics
from hpctrain.watch.metrics import MetricsWriter, StepMetrics


def step(number: int, loss: float = 2.5, **more: object) -> StepMetrics:
    measured = {"grad_norm": 0.5, "lr": 3e-4, "seconds": 0.25, "tokens_per_s": 2048.0, "batch": 4}
    figures = {"loss": loss, **more.pop("extra", {})}  # type: ignore[dict-item]
    return StepMetrics(step=number, tokens=number * 512, metrics=figures, **measured | more)  # type: ignore[arg-type]


def write_steps(path: Path, *steps: int, resume_step: int | None = None, loss: float = 2.5) -> None:
    with closing(MetricsWriter(path, resume_step)) as writer:
        for number in steps:
            writer.write(step(number, loss))


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_row_has_what_was_measured_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(
            step(
                1,
                mfu=0.4,
                peak_rss_bytes=1000,
                evaluated={"validation": {"loss": 3.0}},
                extra={"wait_seconds": 0.01},
            )
        )
    assert path.read_text() == (
        '{"step": 1, "tokens": 512, "loss": 2.5, "grad_norm": 0.5, "lr": 0.0003, "seconds": 0.25, '
        '"tokens_per_s": 2048.0, "batch": 4, "skipped": false, "mfu": 0.4, "peak_rss_bytes": 1000, '
        '"validation_loss": 3.0, "wait_seconds": 0.01}\n'
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_become_null(tmp_path: Path, loss: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(step(1, loss, skipped=True, extra={"worst": loss}))
    row = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert row["loss"] is None
    assert row["worst"] is None
    assert row["skipped"] is True


def test_figures_of_mixtures_are_lists_in_which_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    experts = {"blocks": [1, 3], "load": [1.5, 2.0], "entropy": [math.nan, 1.25]}
    with closing(MetricsWriter(path)) as writer:
        writer.write(step(1, experts=experts))
    (row,) = read_metrics(path)
    assert row["experts"] == {"blocks": [1, 3], "load": [1.5, 2.0], "entropy": [None, 1.25]}


def test_every_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for number in (1, 2, 3):
        writer.write(step(number))
        assert steps_of(writer.path)[-1] == number
    writer.close()
    writer.close()


def test_resume_cuts_later_steps_and_every_step_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, *range(1, 8), loss=2.5)
    write_steps(path, *range(5, 10), resume_step=4, loss=1.5)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["loss"] for row in rows] == [2.5] * 4 + [1.5] * 5
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 4, "los', '{"step": 4}', "{", "\0\0\0"])
def test_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3)
    with path.open("a") as file:
        file.write(torn)
    assert steps_of(path) == [1, 2, 3]
    write_steps(path, 4, 5, resume_step=9)
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_damaged_line_inside_is_named_and_dropped_by_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"step": "two"}\n' + lines[2])
    with pytest.raises(InputOutputError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)
    write_steps(path, 4, resume_step=3)
    assert steps_of(path) == [1, 3, 4]


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 11, resume_step=10)
    assert steps_of(path) == [11]


def test_new_run_does_not_write_over_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    with pytest.raises(HpctrainError, match="holds the metrics of an earlier run") as caught:
        MetricsWriter(path)
    assert caught.value.exit_code == 2
    assert steps_of(path) == [1, 2]


def test_missing_folder_and_missing_file_are_input_output_errors(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match="cannot be opened: No such file"):
        MetricsWriter(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(InputOutputError, match="cannot be read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_short_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(step(1))
    whole = writer._file

    class Full:
        def write(self, data: bytes) -> int:
            return whole.write(data[:10])

        def fileno(self) -> int:
            return whole.fileno()

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(InputOutputError, match="cannot be written: No space left on device"):
        writer.write(step(2))
    monkeypatch.undo()
    writer.write(step(3))
    writer.close()
    assert steps_of(writer.path) == [1, 3]


def test_peak_rss_is_in_bytes() -> None:
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    assert 0.9 * now < peak_rss_bytes() < 100 * now


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_peak_is_not_that_of_the_process_which_started_this_one() -> None:
    held = np.ones(400 << 20, np.uint8)
    program = "from hpctrain.host.memory import peak_rss_bytes; import torch; print(peak_rss_bytes())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    mine = peak_rss_bytes()
    assert mine > held.nbytes + (100 << 20)
    assert int(told.stdout) < mine - (200 << 20)
