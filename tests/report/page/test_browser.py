"""A report in a real browser: drawn without an error, in time, on a phone, light and dark, with its numbers.

Tests of report/page/page.js and page.css through headless Chromium (Debian's package `chromium`).
"""

from __future__ import annotations

import html
import math
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report.marks import StepMark
from hpctrain.report.page.page import page
from hpctrain.report.page.run_summary import RunEvent, RunSummary

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
    "--virtual-time-budget=4000",
)
LARGEST = 3_000_000


def a_run(number: int, steps: int = 400) -> RunSummary:
    """A run with all that is drawn: of each key a value that tells run and step."""
    noise = random.Random(number)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "tokens": 64 * step, "seconds": 0.5 + 0.1 * noise.random()}
        row |= {"loss": 2 + number + 3 / step + 0.1 * noise.random(), "grad_norm": 1 + noise.random()}
        row |= {
            "lr": 1e-3 / step,
            "tokens_per_s": 1e5 * (1 + noise.random()),
            "mfu": 0.4 + 0.01 * noise.random(),
        }
        row |= {"peak_rss_bytes": 31_000_000_000 + number} | (
            {"validation_loss": 2.5} if step % 50 == 0 else {}
        )
        rows.append(row)
    rows[0]["grad_norm"] = None
    marks = [StepMark(steps // 2, "resumed", "goes on"), StepMark(steps // 3, "spike", "<b>high</b>")]
    events = [RunEvent("2026-11-26 10:00:00", steps // 3, "spike", "high " * 40)]
    name = f"run-{number}"
    deck = {f"section.key_{index}": "x" * index for index in range(60)} | {"run.number": str(number)}
    return RunSummary(name, Path(name), name, rows, marks, state="done", events=events, deck=deck)


def browse(folder: Path, what: str, *flags: str, wait: float = 300) -> str:
    """What the browser prints of an address below this folder."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={folder / 'profile'}"
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    command = [CHROMIUM, *FLAGS, profile, *flags, f"file://{folder}/{what}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=wait, env=environment, check=False)
    return done.stdout


def dom(folder: Path, runs: Sequence[RunSummary], asked: str = "") -> str:
    """The page of runs after its script has run."""
    content = page(runs)
    (folder / "report.html").write_text(content, encoding="utf-8")
    found = browse(folder, f"report.html{asked}", "--dump-dom", "--window-size=1300,900")
    assert "data-error" not in found.partition("<head>")[0]
    assert 'data-drawn="yes"' in found.partition("<head>")[0]
    return found.partition("<script>")[0]  # of which nothing is looked for


def noted(found: str, name: str) -> str:
    """What the script says of the page."""
    return found.partition(f'data-{name}="')[2].partition('"')[0]


def values(found: str) -> dict[str, tuple[int, str]]:
    """What legends tell: by chart, run and key, the step and the text of the value."""
    told = re.findall(r'<b data-curve="([^"]*)" data-step="(\d+)">([^<]*)</b>', found)
    return {html.unescape(curve): (int(step), text) for curve, step, text in told}


def test_five_runs_are_drawn_with_their_numbers(tmp_path: Path) -> None:
    runs = [a_run(number, 10_000) for number in range(5)]
    found = dom(tmp_path, runs)
    assert (tmp_path / "report.html").stat().st_size < LARGEST
    print(f"drawn in {noted(found, 'milliseconds')} ms")
    told = values(found)
    assert len(told) == 8 * 5
    for number, run in enumerate(runs):
        last = run.rows[-1]
        assert told[f"0/{number}/loss"] == (10_000, f"{last['loss']:.6g}")
        assert told[f"1/{number}/grad_norm"] == (10_000, f"{last['grad_norm']:.6g}")
        assert told[f"0/{number}/validation_loss"] == (10_000, "2.5")
        assert told[f"5/{number}/peak_rss_bytes"] == (10_000, "31 GB")
    # Each curve of many steps is drawn twice, as it is and smoothed; marks stand in every chart.
    assert found.count('class="line strong ') == 7 * 5
    assert found.count(' faint"') == 7 * 5
    assert found.count('class="mark resumed c') == found.count('class="mark spike c') == 7 * 5
    assert "&lt;b&gt;high&lt;/b&gt;" in found


def test_what_a_link_asks_for_is_shown(tmp_path: Path) -> None:
    """Over time and not smoothed: the places are sums of seconds, the last of which stands on the axis."""
    runs = [a_run(0), a_run(1, 200)]
    found = dom(tmp_path, runs, "#x=time&smooth=0&colours=dark")
    assert (noted(found, "axis"), noted(found, "theme")) == ("time", "dark")
    assert "line strong" not in found
    assert ">training time</text>" in found
    total = math.fsum(row["seconds"] for row in runs[0].rows)
    minutes = re.findall(r'class="(?:below|end)">(\d) min 00 s</text>', found)
    assert max(map(int, minutes)) == int(total // 60)
    tokens = dom(tmp_path, runs, "#x=tokens")
    assert noted(tokens, "axis") == "tokens"
    assert re.findall(r'class="(?:below|end)">(20K)</text>', tokens)


def framed(folder: Path, runs: Sequence[RunSummary], width: int, script: str) -> list[str]:
    """What a script says of the page of runs in a frame so wide: `inner` is its document, `say` says."""
    content = html.escape(page(runs))
    (folder / "frame.html").write_text(
        f'<!doctype html><iframe width="{width}" height="999" frameborder="0" srcdoc="{content}"></iframe>'
        '<script>const frame = document.querySelector("iframe"), said = [];'
        "const say = (...each) => { said.push(...each); document.body.dataset.said = said.join(' | '); };"
        f"frame.onload = () => {{ const inner = frame.contentDocument; {script} }};</script>",
        encoding="utf-8",
    )
    found = browse(folder, "frame.html", "--dump-dom")
    return html.unescape(noted(found.rpartition("<body")[2], "said")).split(" | ")


def test_a_phone_scrolls_no_page_to_the_side(tmp_path: Path) -> None:
    """Within a frame, as no window of a headless Chromium is so narrow."""
    script = "const all = inner.documentElement; say(all.clientWidth, all.scrollWidth, all.dataset.wider);"
    assert framed(tmp_path, [a_run(0), a_run(1)], 360, script) == ["360", "360", "0"]


def test_the_pointer_tells_values_and_runs_can_be_hidden(tmp_path: Path) -> None:
    runs = [a_run(0), a_run(1)]
    found = framed(
        tmp_path,
        runs,
        900,
        """
        const chart = inner.querySelector(".chart"), svg = chart.querySelector("svg");
        const box = svg.getBoundingClientRect();
        const event = { clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true };
        svg.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", event));
        const told = chart.querySelector("b[data-curve='0/1/loss']");
        say(chart.querySelector(".place").textContent, told.dataset.step, told.textContent);
        say(inner.querySelectorAll(".guide").length);
        svg.dispatchEvent(new frame.contentWindow.PointerEvent("pointerleave", event));
        say(chart.querySelector(".place").textContent, told.textContent);
        inner.querySelector("input[data-run='1']").click();
        say(told.parentNode.hidden, inner.querySelectorAll(".line.strong.c1").length);
        inner.querySelector("input[name=axis][value=tokens]").click();
        say(inner.documentElement.dataset.axis, inner.documentElement.dataset.error);
        """,
    )
    place, step, value, guides, away, last, hidden, left, axis, error = found
    assert place.startswith("step ")
    assert 180 < int(step) < 240
    assert value == f"{runs[1].rows[int(step) - 1]['loss']:.6g}"
    assert (guides, away.partition(";")[0]) == ("7", "last values")
    assert last == f"{runs[1].rows[-1]['loss']:.6g}"
    assert (hidden, left, axis, error) == ("true", "0", "tokens", "")


@pytest.mark.parametrize(("scheme", "dark"), [(0, True), (1, False)])
def test_colours_follow_the_system(tmp_path: Path, scheme: int, dark: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "report.html").write_text(page([a_run(0)]), encoding="utf-8")
    browse(
        tmp_path,
        "report.html",
        f"--screenshot={tmp_path / 'shot.png'}",
        "--window-size=800,600",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    with image.open(tmp_path / "shot.png") as shot:
        corner = shot.convert("L").getpixel((2, 2))
        colours = len(shot.convert("RGB").getcolors(1 << 20) or [])
    assert (corner < 60) if dark else (corner > 230)
    assert colours > 50
