"""The page of a report: few points that look as many, numbers of the metrics, and text that stays text.

Tests of report/page/thin.py, report/page/curves.py, report/page/markup.py, report/page/sections.py,
report/page/schedule_drawing.py and report/page/page.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.report.marks import StepMark
from hpctrain.report.page import sections
from hpctrain.report.page.curves import POINTS, axis_of, charts_of, points
from hpctrain.report.page.markup import TEXT_LETTERS, embedded, text
from hpctrain.report.page.page import HEAD, MARKS, data_of, limit_marks, page
from hpctrain.report.page.run_summary import PredictedVsMeasured, RunEvent, RunSummary, ValuePair
from hpctrain.report.page.schedule_drawing import CELLS, schedule_of
from hpctrain.report.page.thin import corners, extremes, middles
from hpctrain.report.recorded import RecordedStep

HOSTILE = '</script><img src="x" onerror="1"><!--\u202e\x1b[31m\'&amp;'


def rows(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"step": step, "tokens": 64 * step, "seconds": 0.5, "loss": 2 + 1 / step, "grad_norm": 1.0, **more}
        for step in range(1, steps + 1)
    ]


def told(name: str = "small", table: list[dict[str, Any]] | None = None, **more: Any) -> RunSummary:
    return RunSummary(name, Path(name), name, rows(5) if table is None else table, **more)


def charts(*tables: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {chart["name"]: chart for chart in charts_of(tables)}


def test_few_points_keep_the_extremes_of_every_stretch() -> None:
    values = np.random.default_rng(0).normal(size=10_001)
    values[777], values[5000] = 1e9, -1e9
    kept = extremes(values, 2000)
    assert len(kept) <= 2000
    assert (np.diff(kept) > 0).all()
    assert {0, 777, 5000, 10_000} <= set(kept.tolist())
    # Whatever column of pixels one looks at, what is left reaches as far up and down.
    for start in range(0, 10_000, 100):
        near = (kept >= start - 15) & (kept < start + 115)
        whole = values[max(0, start) : start + 100]
        assert values[kept[near]].max() >= whole.max()
        assert values[kept[near]].min() <= whole.min()
    assert extremes(values[:4], 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("middle", "take"), [("mean", np.mean), ("median", np.median)])
def test_middles_are_of_all_values(middle: Any, take: Any) -> None:
    values = np.random.default_rng(0).normal(size=1000)
    centres, averages = middles(values, 10, middle)
    assert averages == pytest.approx([take(values[start : start + 100]) for start in range(0, 1000, 100)])
    assert centres.tolist() == [start + 49 for start in range(0, 1000, 100)]
    assert middles(values[:3], 10, middle)[1] == pytest.approx(values[:3])


def test_corners_give_a_line_back() -> None:
    steps = np.arange(1.0, 1001.0)
    tokens = np.where(steps <= 300, 64 * steps, 64 * 300 + 128 * (steps - 300))
    kept = corners(steps, tokens, 2000)
    assert steps[kept].tolist() == [1, 300, 1000]
    assert np.interp(steps, steps[kept], tokens[kept]) == pytest.approx(tokens)
    assert len(corners(steps, np.random.default_rng(0).normal(size=1000).cumsum(), 50)) == 50
    assert corners(steps[:1], tokens[:1], 5).tolist() == [0]


def test_curves_have_the_numbers_of_the_metrics() -> None:
    table = rows(2 * POINTS)
    table[99] |= {"loss": None, "grad_norm": float("nan")}
    table[100] |= {"grad_norm": 10**400, "validation_loss": 2.5, "evaluation/code": 1.25, "skipped": True}
    found = charts(table, rows(3))
    training, other, validation, code = sorted(
        found["Loss"]["curves"],
        key=lambda curve: (curve["dashed"], curve["run"], curve["key"] != "validation_loss"),
    )
    assert (other["run"], validation["name"], code["name"]) == (1, "validation", "code")
    assert list(accumulate(other["steps"])) == [1, 2, 3]
    assert other["values"] == [3, 2.5, 2.333333]
    assert (validation["steps"], validation["values"], code["values"]) == ([101], [2.5], [1.25])
    assert len(training["values"]) <= POINTS
    for step, value in zip(accumulate(training["steps"]), training["values"], strict=True):
        assert value == pytest.approx(2 + 1 / step, rel=1e-6)
    assert training["count"] == 2 * POINTS - 1
    norms = points(table, "grad_norm")
    assert len(norms[0]) == 2 * POINTS - 2
    # Neither what is not measured (skipped, step), nor what is the same everywhere, is a chart.
    assert list(found) == ["Loss", "Gradient norm", "Step time"]


def test_unknown_numbers_get_charts_of_their_own() -> None:
    table = rows(3)
    for index, row in enumerate(table):
        row |= {"noise_scale": index, "batch": 8, "words": "x", "flag": True, "k" * 99: -index}
    assert list(charts(table))[-2:] == ["noise_scale", "k" * 40]


def test_figures_of_sets_share_charts() -> None:
    table = rows(3)
    for name in ("validation_", "evaluation/tokens/"):
        for index, row in enumerate(table):
            row |= {f"{name}bits_per_byte": 1.5 + index, f"{name}perplexity": 9 - index}
            row["evaluation/tokens"] = 3.0
    found = charts(table)
    assert list(found)[:2] == ["Loss", "Bits per byte"]
    assert [curve["name"] for curve in found["Loss"]["curves"]] == ["training", "tokens"]
    assert [curve["name"] for curve in found["Bits per byte"]["curves"]] == ["validation", "tokens"]
    assert not any("perplexity" in name for name in found)


def test_one_spike_asks_for_a_logarithmic_axis() -> None:
    table = rows(10)
    assert charts(table)["Gradient norm"]["log"] is False
    table[4]["grad_norm"] = 1e6
    assert charts(table)["Gradient norm"]["log"] is True
    table[5]["grad_norm"] = 0.0
    assert charts(table)["Gradient norm"]["log"] is False


def test_axes_are_told_by_their_corners() -> None:
    assert axis_of(rows(100), "tokens") == {"steps": [1, 99], "values": [64, 6400]}
    assert axis_of(rows(100), "time") == {"steps": [1, 99], "values": [0.5, 50]}
    assert axis_of([{"step": 1}], "time") is None
    assert axis_of([{"step": -1, "tokens": 1}, {"step": 10**30, "tokens": 1}], "tokens") is None


def test_marks_are_thinned_by_kind() -> None:
    many = [StepMark(step, "skipped", "x") for step in range(1000)]
    shown = limit_marks([*many, StepMark(3, "fault", "y")])
    assert sum(mark.kind == "skipped" for mark in shown) <= MARKS
    assert StepMark(3, "fault", "y") in shown
    assert [mark.step for mark in shown] == sorted(mark.step for mark in shown)


def test_text_stays_text() -> None:
    assert text('<b a="1">&') == "&lt;b a=&quot;1&quot;&gt;&amp;"
    assert text("a\x1b[31m\u202e\n") == "a\\u001B[31m\\u202E\\n"
    assert text("x" * 9999) == "x" * TEXT_LETTERS + "..."
    assert "<" not in embedded({"a": HOSTILE})
    assert json.loads(embedded({"a": HOSTILE, "b": math.nan})) == {"a": HOSTILE, "b": None}


def test_a_page_is_whole_and_asks_for_nothing() -> None:
    """Whatever stands in the files of a run ends no element, and names nothing to be fetched."""
    step = _recorded()
    hostile = told(
        HOSTILE,
        rows(5, **{HOSTILE: 1}),
        marks=[StepMark(2, "spike", HOSTILE)],
        state=HOSTILE,
        reason=HOSTILE,
        facts={"steps": HOSTILE, HOSTILE: HOSTILE},
        deck={HOSTILE: HOSTILE},
        comparisons=[PredictedVsMeasured(HOSTILE, "bytes", [ValuePair(HOSTILE, 1.0, 2.0)], HOSTILE)],
        step=step,
        events=[RunEvent(HOSTILE, 3, HOSTILE, HOSTILE)],
        problems=[HOSTILE],
    )
    for runs in ([hostile], [hostile, told("other")]):
        made = page(runs)
        assert made.startswith(HEAD)
        assert made.count("<script") == made.count("</script>") == 2
        assert "<img" not in made
        assert "\x1b" not in made
        assert "http" not in made.replace("http-equiv", "")
        assert not re.search(r"url\((?!#)|@import|@font-face|<[a-z]+ [^>]*src=|\shref=\"(?!#)", made)
        found = json.loads(made.partition('id="data">')[2].partition("</script>")[0])
        assert found == json.loads(json.dumps(data_of(runs)))
        script, style = (
            made.rpartition(f"<{name}>")[2].partition(f"</{name}>")[0] for name in ("script", "style")
        )
        policy = made.partition('content="')[2].partition('"')[0]
        for content in (script, style):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy


def test_tables_tell_what_the_runs_hold() -> None:
    one = told("one", deck={"a.b": "1", "c.d": "2"}, facts={"ranks": "2"}, state="done")
    other = told("other", rows(9), deck={"a.b": "1", "c.d": "3", "e.f": "4"}, facts={"ranks": "4"})
    parts = {name: html for name, _, html in sections.all_sections([one, other])}
    keys = re.findall(
        r"<tr><th class=\"text\">([^<]*)</th><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>", parts["decks"]
    )
    assert keys == [("c.d", "2", "3"), ("e.f", "-", "4")]
    assert "No events: no stop" in parts["events"]
    top = sections.overview([one, other])
    assert "<td>2.2</td>" in top  # the last loss of five steps
    assert "<td>2.11111</td>" in top
    assert '<span class="state done">done</span>' in top
    assert "MFU</th>" not in top  # which no run has measured
    events = [RunEvent("", step, "warning", f"at {step}") for step in range(sections.EVENTS + 7)]
    (told_of,) = [html for name, _, html in sections.all_sections([told(events=events)]) if name == "events"]
    assert told_of.count("<tr>") == sections.EVENTS + 1
    assert "7 earlier events are not shown" in told_of


def test_predictions_are_told_beside_measurements() -> None:
    pairs = [
        ValuePair("parameters", 200.0, 100.0),
        ValuePair("buffers", None, 5.0),
        ValuePair("total", 200.0, 105.0),
    ]
    (found,) = [
        html
        for name, _, html in sections.all_sections(
            [told(comparisons=[PredictedVsMeasured("Memory", "bytes", pairs)])]
        )
        if name == "predicted"
    ]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", found)
    assert cells[5:9] == ["parameters", "200 B", "100 B", "+100.0%"]
    assert cells[9:13] == ["buffers", "", "5 B", ""]
    widths = re.findall(r'class="bar (\w+)" y="\d" height="7" width="([\d.]+)"', found)
    assert widths[:4] == [
        ("predicted", "120.0"),
        ("measured", "60.0"),
        ("predicted", "0.0"),
        ("measured", "3.0"),
    ]


def _recorded(stages: int = 2, micro_batches: int = 4) -> RecordedStep:
    schedule = generate_schedule("1f1b", stages, micro_batches)
    result = simulate(schedule, StageTimes(1.0, 1.0, 1.0))
    return RecordedStep(7, schedule, result.start, result.end)


def test_a_schedule_is_drawn_with_its_bubble() -> None:
    drawn = schedule_of(_recorded())
    # Of the step the bubble is (p - 1) / (m + p - 1), as it ran and as simulated.
    assert drawn.count(": bubble 20.0%") == 2
    actions = sum(path.count("M") for path in re.findall(r' d="(M[^"]*Z)"', drawn))
    assert actions == 2 * 2 * 2 * 4
    assert drawn.count(">stage 0<") == drawn.count(">stage 1<") == 1
    large = schedule_of(_recorded(4, CELLS // 8 + 1))
    assert "<svg" not in large
    assert "too large to be drawn here" in large
