"""Two runs side by side: other keys of their decks, and final figures with their differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.report.metric_rows import Row
from hpctrain.report.runs import RunRecord, side_by_side
from tests.engines import small_deck


def record(name: str, rows: list[Row], *keys: str) -> RunRecord:
    deck = small_deck(*keys)
    return RunRecord(Path(name), deck, {row["step"]: row for row in rows}, None, len(rows))


def rows(count: int, scale: float = 1.0) -> list[Row]:
    return [
        {"step": step, "tokens": 100 * step, "loss": scale * 100 / step, "seconds": 0.5 * scale}
        | {"tokens_per_s": 200 / scale, "peak_rss_bytes": 2_000_000 + step, "grad_norm": 1.0, "mfu": 0.4}
        | ({"validation_loss": scale * (2 + (step - 20) ** 2 / 100)} if step % 10 == 0 else {})
        for step in range(1, count + 1)
    ]


def cells(lines: list[str]) -> dict[str, list[str]]:
    found = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {each[0].strip(): [cell.strip() for cell in each[1:]] for each in found if each}


def test_figures_and_how_far_they_are_apart() -> None:
    first, second = record("a", rows(40)), record("b", rows(40, 1.5), "learning_rate.peak=0.5")
    lines = side_by_side(first, second, None)
    told = cells(lines)
    assert lines[0].split() == ["deck", "keys", "that", "differ", "first", "second"]
    assert told["learning_rate.peak"][1] == "0.5"
    assert told["run"] == ["a", "b"]
    assert told["steps"][0].startswith("40 of ")
    assert told["loss"] == ["2.5", "3.75", "+50.00%"]
    tenth = sum(100 / step for step in range(37, 41)) / 4
    assert told["loss of the last tenth"] == [f"{tenth:.6g}", f"{1.5 * tenth:.6g}", "+50.00%"]
    assert told["validation loss"] == ["6", "9", "+50.00%"]
    assert told["best validation loss"] == ["2 (step 20)", "3 (step 20)", "+50.00%"]
    assert told["time"] == ["20 s", "30 s", "+50.00%"]
    assert told["tokens"] == ["4K", "4K", "equal"]
    assert told["tokens/s, median"] == ["200", "133", "-33.33%"]
    assert told["MFU, median"] == ["40.0%", "40.0%", "equal"]
    assert told["memory of rank 0, peak"] == ["2 MB", "2 MB", "equal"]
    assert "sent by rank 0" not in told


def test_what_is_not_recorded_is_left_out_or_a_dash() -> None:
    bare: list[Row] = [{"step": 1, "loss": None, "grad_norm": True, "seconds": float("nan")}]
    told = cells(side_by_side(record("a", bare), record("b", rows(3)), None))
    assert told["loss"] == ["-", "33.3333"]
    assert "best validation loss" not in told
    assert "loss of the last tenth" not in told
    lines = side_by_side(record("a", bare), record("b", bare), None)
    assert lines[0] == "The decks have the same values."
    assert cells(lines).keys() == {lines[0], "first", "run", "title", "steps"}


@pytest.mark.parametrize(("scale", "words"), [(20.0, "20 times"), (1.0, "equal"), (0.5, "-50.00%")])
def test_differences_in_words(scale: float, words: str) -> None:
    told = cells(side_by_side(record("a", rows(30)), record("b", rows(30, scale)), None))
    assert told["validation loss"][-1] == words
