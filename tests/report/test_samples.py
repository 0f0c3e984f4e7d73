"""Answers of policies in a run's folder, read and shown. Tests of report/samples.py."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.report.page.page import page
from hpctrain.report.page.run_summary import RunSummary
from hpctrain.report.samples import SAMPLES_FILE, SHOWN, read_samples, try_samples


def row(step: int, text: str = "abc", **more: object) -> str:
    known = {
        "step": step,
        "of": "rollout",
        "prompt": "say <b>",
        "text": text,
        "rewards": {"exact_match": 1.0},
    }
    return json.dumps(known | {"tokens": 4, "ended": "end"} | more) + "\n"


def test_the_newest_are_read_and_what_is_no_answer_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / SAMPLES_FILE
    assert read_samples(path) == []
    lines = [*(row(step) for step in range(1, SHOWN + 6)), "no answer\n", row(99, rewards=None), row(7)[:-5]]
    path.write_text("".join(lines))
    found = read_samples(path)
    assert [each.step for each in found] == [*range(7, SHOWN + 6), 99]
    assert (found[0].prompt, found[0].text, found[0].rewards, found[0].tokens) == ("say <b>", "abc", "1", "4")
    assert found[-1].rewards == ""
    two = row(3, rewards={"a": 0.25, "model": -1.5})
    path.write_text(two)
    assert read_samples(path)[0].rewards == "a 0.25, model -1.5"


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / SAMPLES_FILE).mkdir()
    problems: list[str] = []
    assert try_samples(tmp_path / SAMPLES_FILE, problems) == []
    assert "cannot be read" in problems[0]


def test_a_page_shows_them_as_text(tmp_path: Path) -> None:
    path = tmp_path / SAMPLES_FILE
    path.write_text(row(1) + row(2, text="<script>"))
    rows = [{"step": 1, "loss": 0.0, "reward": 0.5}, {"step": 2, "loss": 0.0, "reward": 0.75}]
    told = RunSummary("policy", tmp_path, "policy", rows, samples=read_samples(path))
    html = page([told])
    assert "Sampled answers" in html
    assert "say &lt;b&gt;" in html
    assert "&lt;script&gt;" in html
    assert html.index("&lt;script&gt;") < html.index(">abc<")
    assert "Sampled answers" not in page([RunSummary("plain", tmp_path, "plain", rows)])
