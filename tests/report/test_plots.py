from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.plot import command as plot
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.fonts import drawable
from hpctrain.report.plots import PlottedRun, draw, load_runs, plot_runs, smoothed

NAMES = ["loss.png", "learning_rate.png", "throughput.png", "grad_norm.png"]


def rows(steps: int, *, mfu: bool = True, skipped: tuple[int, ...] = ()) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        loss = None if step in skipped else 2 + 3 / step
        row: dict[str, object] = {"step": step, "loss": loss, "lr": 1e-3 / step, "tokens_per_s": 100.0 + step}
        row |= {"grad_norm": 1 / step, "skipped": step in skipped}
        row |= {"mfu": 0.4} if mfu else {}
        row |= {"validation_loss": 2.5} if step % 5 == 0 else {}
        table.append(row)
    return table


def write_run(run_dir: Path, table: list[dict[str, object]]) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return run_dir


def test_pictures_of_one_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "small", rows(20))
    written = plot_runs([run_dir])
    assert written == [run_dir / "plots" / name for name in NAMES]
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000


def test_no_pyplot_state(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    plot_runs([write_run(tmp_path / "small", rows(20))])
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []
    assert {key: value for key, value in mpl.rcParams.items() if not key.startswith("backend")} == {
        key: value for key, value in before.items() if not key.startswith("backend")
    }


def test_loss_has_training_validation_and_skipped_steps() -> None:
    (axes,) = draw([PlottedRun("small", rows(20, skipped=(3, 4)))])["loss"].axes
    training, validation, skipped = axes.lines
    assert list(training.get_xdata()) == [1, 2, *range(5, 21)]
    assert list(training.get_ydata()) == pytest.approx([2 + 3 / step for step in [1, 2, *range(5, 21)]])
    assert list(validation.get_xdata()) == [5, 10, 15, 20]
    assert list(skipped.get_xdata()) == [3, 4]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "validation", "skipped steps (2)"]
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_xlabel() == "step"
    assert axes.get_yscale() == "linear"


def test_logarithmic_loss() -> None:
    (axes,) = draw([PlottedRun("small", rows(20))], log_loss=True)["loss"].axes
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize(("mfu", "panels"), [(True, 2), (False, 1)])
def test_throughput_has_a_panel_for_mfu_where_it_was_measured(mfu: bool, panels: int) -> None:
    figure = draw([PlottedRun("small", rows(20, mfu=mfu))])["throughput"]
    assert len(figure.axes) == panels
    assert figure.axes[0].get_ylabel() == "tokens per second"
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)


def test_what_says_more_than_a_loss_is_drawn_beside_it() -> None:
    """Of a policy the loss of evaluations, its reward with another sign, is not drawn twice."""
    table = rows(6)
    assert not {"reward", "accuracy"} & draw([PlottedRun("small", table)]).keys()
    for row in table:
        row.update({"reward": 0.1 * row["step"], "accuracy": 0.5})
    table[-1].update({"validation_reward": 0.75, "validation_loss": -0.75})
    drawn = draw([PlottedRun("policy", table)])
    assert len(drawn["loss"].axes[0].get_lines()) == 1
    training, validation = drawn["reward"].axes[0].get_lines()
    assert validation.get_ydata()[-1] == 0.75
    assert training.get_ydata()[-1] == pytest.approx(0.1 * table[-1]["step"])
    assert drawn["accuracy"].axes[0].get_ylabel() == "share of pairs"


def test_the_noise_scale_is_drawn_where_it_was_measured() -> None:
    """With the batch, and what it is the ratio of; where a step gave no scale, the line goes on past it."""
    table = rows(20)
    assert "noise_scale" not in draw([PlottedRun("small", table)])
    for row in table:
        step = int(str(row["step"]))
        row.update({"batch": 8, "gradient_signal": 2.0 / step, "gradient_noise": 3.0})
        row.update({"noise_scale": 1.5 * step} if step > 4 else {})
    runs = [PlottedRun("small", table), PlottedRun("other", rows(9))]
    for drawn, of_run in ((runs[:1], ""), (runs, "small, ")):
        scale, squares = draw(drawn)["noise_scale"].axes
        shown = {str(line.get_label()): line for axes in (scale, squares) for line in axes.lines}
        names = "noise scale", "batch", "true gradient", "noise of a sequence"
        assert list(shown) == [of_run + name for name in names]
        assert list(shown[f"{of_run}noise scale"].get_xdata()) == list(range(5, 21))
        assert list(shown[f"{of_run}batch"].get_ydata()) == [8] * 20
        assert list(shown[f"{of_run}true gradient"].get_ydata()) == [2.0 / step for step in range(1, 21)]
        assert (scale.get_yscale(), squares.get_yscale()) == ("log", "log")


def test_many_points_are_smoothed() -> None:
    figures = draw([PlottedRun("long", rows(900))])
    faint, smooth = figures["grad_norm"].axes[0].lines
    assert len(faint.get_xdata()) == 900
    assert faint.get_alpha() < 0.5
    assert smooth.get_label() == "gradient norm (median of 15 steps)"
    assert len(figures["loss"].axes[0].lines) == 3


def test_runs_are_overlaid_with_their_names(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a" / "run", rows(20)), write_run(tmp_path / "b" / "run", rows(10))
    runs = load_runs([one, other])
    assert [run.name for run in runs] == ["a/run", "b/run"]
    figures = draw(runs)
    assert len(figures["loss"].axes[0].lines) == 4
    assert len(figures["learning_rate"].axes[0].lines) == 2
    written = plot_runs([one, other], tmp_path / "out")
    assert written == [tmp_path / "out" / name for name in NAMES]


def test_smoothing_keeps_straight_lines_at_the_start_and_ignores_spikes() -> None:
    line = np.arange(500.0)
    centres, smooth = smoothed(line, 21, "mean")
    assert smooth[:400] == pytest.approx(line[:400])
    assert len(centres) == 500
    line[250] = math.inf
    assert np.isfinite(smoothed(line, 21, "median")[1]).all()
    assert len(smoothed(np.zeros(5000), 21, "mean")[0]) == 600


def test_one_step_and_no_finite_value_can_be_drawn(tmp_path: Path) -> None:
    for name, table in (("one", rows(1)), ("none", [{"step": 1, "loss": None}]), ("zero", rows(3))):
        assert len(plot_runs([write_run(tmp_path / name, table)], log_loss=True)) == 4


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    empty = write_run(tmp_path / "empty", [])
    good = write_run(tmp_path / "good", rows(3))
    with pytest.raises(HpctrainError) as caught:
        plot_runs([tmp_path / "gone", bare, empty, good])
    assert [problem.partition(": ")[2].partition(";")[0] for problem in caught.value.problems] == [
        "no such run folder",
        "is not a run folder, since it has no metrics.jsonl",
        "has no step yet",
    ]
    assert caught.value.exit_code == 3
    (good / "metrics.jsonl").write_text("{\n{\n")
    with pytest.raises(InputOutputError, match="no such run folder"):
        plot_runs([tmp_path / "gone", good])


def test_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "small", rows(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputOutputError, match="pictures cannot be written"):
        plot_runs([run_dir], tmp_path / "file")


def test_verb_prints_the_paths(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "small", rows(3))
    result = CliRunner().invoke(plot, [str(run_dir), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [str(tmp_path / "out" / name) for name in NAMES]


ODD_NAMES = ["訓練 🚀", "a$b$c", "_hidden", "one\nline", "x\x1b[31m", "ꙮ𓀀", "é ü ∑"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_hidden", " ".join(ODD_NAMES)])
def test_any_name_is_drawn_without_a_warning(name: str, tmp_path: Path) -> None:
    assert len(plot_runs([write_run(tmp_path / name, rows(6))], tmp_path / "one")) == 4


@pytest.mark.filterwarnings("error")
def test_any_names_are_drawn_together_without_a_warning(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / each, rows(6)) for each in (*ODD_NAMES, "other")]
    assert len(plot_runs(runs, tmp_path / "all")) == 4


def test_what_no_font_has_is_a_square() -> None:
    assert drawable("é ü ∑ plain") == "é ü ∑ plain"
    assert drawable("a$b$") == r"a\$b\$"
    assert drawable("_x\n\x1b") == " _x□□"
    assert drawable("\U00013000\u200d") in {"□\u200d", "□", "\U00013000"}


def test_without_matplotlib_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(plot, [str(write_run(tmp_path / "a", rows(6)))])
    assert str(result.exception) == (
        "drawing pictures needs the package matplotlib, which is not installed: pip install matplotlib"
    )
    assert not (tmp_path / "a" / "plots").exists()
