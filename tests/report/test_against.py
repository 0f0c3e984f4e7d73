"""Loss against what it cost: the points that are drawn, the labels, and what cannot be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.plot import command as plot
from hpctrain.errors import InputOutputError
from hpctrain.report.against import draw_against, labels, plot_against
from hpctrain.report.plots import PlottedRun

DECK = """
[run]
title = "{title}"
[communication]
compress = "{compress}"
emulate = "{emulate}"
"""


def rows(payload: int, steps: int = 4) -> list[dict[str, object]]:
    return [
        {"step": step, "loss": 4 / step, "seconds": 0.5, "payload_bytes": payload * step}
        | ({"validation_loss": 3.0} if step == steps else {})
        for step in range(1, steps + 1)
    ]


def write_run(folder: Path, compress: str, payload: int, emulate: str = "1 Gbit/s") -> Path:
    folder.mkdir()
    (folder / "deck.toml").write_text(DECK.format(title=folder.name, compress=compress, emulate=emulate))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(payload)))
    return folder


def test_points_stand_at_what_was_spent_by_then() -> None:
    (axes,) = draw_against("bytes", [PlottedRun("small", rows(1000))]).axes
    training, validation = axes.lines
    assert list(training.get_xdata()) == [1000, 3000, 6000, 10_000]
    assert list(training.get_ydata()) == [4, 2, 4 / 3, 1]
    assert list(validation.get_xdata()) == [10_000]
    (axes,) = draw_against("time", [PlottedRun("small", rows(1000))]).axes
    assert list(axes.lines[0].get_xdata()) == [0.5, 1.0, 1.5, 2.0]
    assert axes.get_xscale() == "linear"


def test_runs_that_send_much_more_than_others_share_a_logarithmic_axis() -> None:
    runs = [PlottedRun("exact", rows(1000)), PlottedRun("sign", rows(30))]
    assert draw_against("bytes", runs).axes[0].get_xscale() == "log"
    assert draw_against("time", runs).axes[0].get_xscale() == "linear"


def test_runs_are_called_by_what_differs_in_their_decks(tmp_path: Path) -> None:
    exact, sign = (write_run(tmp_path / name, name, 10) for name in ("none", "sign"))
    named = labels([exact, sign])
    assert named[1] == "compress = sign"
    slower = write_run(tmp_path / "slower", "sign", 10, "1 Mbit/s")
    assert labels([sign, slower]) == ["emulate = 1 Gbit/s", "emulate = 1 Mbit/s"]
    again = write_run(tmp_path / "again", "sign", 10)
    assert labels([sign, again]) == ["", ""]
    (again / "deck.toml").write_text("[[[")
    assert labels([again]) == [""]


def test_the_verb_writes_one_picture(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, name, 10) for name in ("none", "sign")]
    out = tmp_path / "out"
    for cost in ("bytes", "time"):
        done = CliRunner().invoke(plot, [*map(str, folders), "--against", cost, "--out", str(out)])
        assert (done.exit_code, done.output) == (0, f"{out}/loss_against_{cost}.png\n")
        assert (out / f"loss_against_{cost}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["loss_against_bytes.png", "loss_against_time.png"]


def test_what_was_not_recorded_is_told(tmp_path: Path) -> None:
    silent = write_run(tmp_path / "silent", "none", 0)
    old = write_run(tmp_path / "old", "none", 1)
    (old / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "seconds": 1.0}\n')
    with pytest.raises(InputOutputError) as caught:
        plot_against("bytes", [silent, old], None, log_loss=False)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "the run sent no bytes, so --against bytes cannot draw it",
        "its metrics have no payload_bytes, which runs of this version record",
    ]


@pytest.mark.parametrize("value", [None, "12", -1, 10**400, True, float("nan"), float("inf")])
def test_a_step_of_unknown_cost_is_told(tmp_path: Path, value: object) -> None:
    run = write_run(tmp_path / "run", "none", 10)
    odd = [row | ({"payload_bytes": value} if row["step"] == 3 else {}) for row in rows(10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    with pytest.raises(InputOutputError, match=r"run: step 3 has (no|an invalid) payload_bytes, so the cost"):
        plot_against("bytes", [run], None, log_loss=False)
    assert plot_against("time", [run], None, log_loss=False).exists()


def test_runs_without_decks_are_called_by_their_folders(tmp_path: Path) -> None:
    exact, sign = (write_run(tmp_path / name, name, 10) for name in ("none", "sign"))
    (exact / "deck.toml").unlink()
    assert labels([exact, sign]) == ["", ""]


def test_keys_of_two_sections_are_told_apart_below_the_picture(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 10) for name in ("none", "sign")]
    for number, run in enumerate(runs, 3):
        more = f"warmup = {number}\n[learning_rate]\nwarmup = {2 * number}\n"
        (run / "deck.toml").write_text((run / "deck.toml").read_text() + more)
    named = labels(runs)
    assert named[1] == "compress = sign, communication.warmup = 4, learning_rate.warmup = 8"
    figure = draw_against("bytes", [PlottedRun(name, rows(10)) for name in named])
    (legend,) = figure.legends
    assert [each.get_text() for each in legend.get_texts()] == named
    assert not draw_against("bytes", [PlottedRun("one", rows(10))]).legends


def test_seconds_of_an_emulated_link_are_marked() -> None:
    slow = [row | {"emulated_link": "1 Gbit/s"} for row in rows(10)]
    assert [PlottedRun("small", table).label for table in (rows(10), slow)] == [
        "small",
        "small (emulated link)",
    ]
