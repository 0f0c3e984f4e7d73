from __future__ import annotations

import io
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.report.terminal import Terminal
from hpctrain.watch.log import close_log, open_log
from hpctrain.watch.metrics import StepMetrics
from hpctrain.watch.progress import Progress, ProgressDisplay


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Wide(Terminal):
    """A terminal of a width that the test sets."""

    width = 100

    def columns(self) -> int:
        return type(self).width


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "HPCTRAIN_PROGRESS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Wide, "width", 100)
    yield Wide("/dev/null", takes_errors=True)
    close_log(logging.getLogger("hpctrain"))


def metrics(step: int, loss: float = 3.21449, **more: object) -> StepMetrics:
    values = {"grad_norm": 0.81234, "lr": 2.9e-4, "seconds": 1.0, "tokens_per_s": 12345.0, "batch": 1}
    values |= {"metrics": {"loss": loss}} | more
    return StepMetrics(step=step, tokens=step * 100, **values)  # type: ignore[arg-type]


def lines(*steps: StepMetrics, total: int = 1000, start: int = 0, log_every: int = 10) -> list[str]:
    output, clock = io.StringIO(), Clock()
    shown = Progress(total, start, log_every=log_every, display=ProgressDisplay("lines", output, clock=clock))
    with closing(shown) as progress:
        for step in steps:
            clock.now += 0.3
            progress.step(step)
    return output.getvalue().splitlines()


def screen(text: str) -> list[str]:
    """What a terminal shows after such output: carriage returns go back, colours are dropped."""
    shown = [""]
    for piece in re.split(r"(\r|\n|\x1b\[K)", text):
        if piece == "\n":
            shown.append("")
        elif piece == "\r":
            shown[-1] = ""
        else:
            shown[-1] += re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", piece)
    return shown


def test_line_has_exactly_this_form() -> None:
    assert lines(metrics(120, mfu=0.41)) == [
        "step  120/1000  loss  3.2145  grad norm   0.812  lr 2.90e-04  12.3K tokens/s  mfu  41%  "
        "left 14 min 40 s"
    ]


def test_the_epoch_is_told_where_it_is_known() -> None:
    (line,) = lines(metrics(10, epoch=1.23456))
    assert "lr 2.90e-04  epoch 1.23  12.3K tokens/s" in line


def test_columns_stay_in_place() -> None:
    shown = lines(
        metrics(1, 11.25, tokens_per_s=80.0, grad_norm=123.456),
        metrics(10, math.nan, grad_norm=math.inf, skipped=True),
        metrics(20, 2.0, tokens_per_s=1_000_000.0),
        metrics(1000, 2.0),
    )
    assert shown == [
        "step    1/1000  loss 11.2500  grad norm 123.456  lr 2.90e-04     80 tokens/s  left 16 min 39 s",
        "step   10/1000  loss     nan  grad norm     inf  lr 2.90e-04  12.3K tokens/s  left 4 min 57 s  "
        "(skipped)",
        "step   20/1000  loss  2.0000  grad norm   0.812  lr 2.90e-04     1M tokens/s  left 4 min 54 s  "
        "(1 skipped)",
        "step 1000/1000  loss  2.0000  grad norm   0.812  lr 2.90e-04  12.3K tokens/s  took 1 s  (1 skipped)",
    ]


def test_the_noise_scale_is_told_where_it_is_measured() -> None:
    measured = {"loss": 2.0, "gradient_noise": 3.0}
    shown = lines(metrics(1, metrics=measured), metrics(10, metrics=measured | {"noise_scale": 1234.5}))
    assert [line.split("lr 2.90e-04  ")[1] for line in shown] == [
        "12.3K tokens/s  noise scale     -  left 16 min 39 s",
        "12.3K tokens/s  noise scale 1.23K  left 4 min 57 s",
    ]


def test_lines_come_every_so_many_steps_and_for_the_first_and_last() -> None:
    shown = lines(*(metrics(step) for step in range(43, 68)), total=67, start=42)
    assert [line.split()[1] for line in shown] == ["43/67", "50/67", "60/67", "67/67"]


def test_messages_and_evaluations_are_lines() -> None:
    output = io.StringIO()
    with closing(Progress(1000, display=ProgressDisplay("lines", output))) as progress:
        progress.evaluation(40, "validation", {"loss": 3.10206, "perplexity": 22.2436})
        progress.message("checkpoint saved")
        progress.working("evaluating")
    assert (
        output.getvalue() == "step   40/1000  validation loss 3.1021  perplexity 22.244\ncheckpoint saved\n"
    )


def test_time_left_is_by_wall_time_of_the_last_hundred_steps() -> None:
    clock = Clock()
    progress = Progress(1000, display=ProgressDisplay("lines", io.StringIO(), clock=clock))
    assert progress.seconds_left() is None
    for step in range(1, 301):
        clock.now += 5.0 if step <= 200 else 2.0
        progress.step(metrics(step))
    assert progress.seconds_left() == pytest.approx(700 * 2.0)


def test_bar_is_one_line_and_messages_stand_above_it(terminal: Terminal) -> None:
    output, clock = io.StringIO(), Clock()
    with closing(Progress(200, display=ProgressDisplay("auto", output, terminal, clock))) as progress:
        assert progress.style == "bar"
        assert screen(output.getvalue())[0].startswith("step   0/200 ━")
        for step in range(1, 101):
            clock.now += 1.0
            progress.step(metrics(step))
        progress.message("checkpoint saved")
        progress.working("evaluating")
        assert screen(output.getvalue())[-1].endswith("evaluating")
        progress.evaluation(100, "validation", {"loss": 3.0})
        clock.now += 1.0
        progress.step(metrics(101))
    shown = screen(output.getvalue())
    assert shown[:2] == ["checkpoint saved", "step 100/200  validation loss 3.0000"]
    assert shown[3:] == [""]
    assert shown[2].startswith("step 101/200 ━")
    assert shown[2].endswith("loss 3.2145  validation 3.0000  12.3K tokens/s  1 min 39 s left")
    assert len(shown[2]) <= 99


@pytest.mark.parametrize("width", [10, 25, 40, 60, 80, 100, 200])
def test_bar_fits_the_window(terminal: Terminal, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wide, "width", width)
    output = io.StringIO()
    with closing(Progress(200, display=ProgressDisplay("auto", output, terminal))) as progress:
        progress.step(metrics(200, mfu=0.4, evaluated={"validation": {"loss": 3.0}}, skipped=True))
    shown = screen(output.getvalue())[-2]
    assert 0 < len(shown) < width
    assert shown.startswith("step 200/"[: width - 1])
    if width >= 40:
        assert "loss 3.2145" in shown
    if width == 200:
        assert "━" * 40 in shown
        assert "grad norm 0.812" in shown
        assert "mfu 40%" in shown
        assert "1 skipped" in shown


def test_bar_is_drawn_at_most_ten_times_a_second(terminal: Terminal) -> None:
    output, clock = io.StringIO(), Clock()
    with closing(Progress(10_000, display=ProgressDisplay("auto", output, terminal, clock))) as progress:
        for step in range(1, 1001):
            clock.now += 0.002
            progress.step(metrics(step))
        assert 15 <= output.getvalue().count("\r") <= 21


def test_steps_between_drawings_cost_microseconds(terminal: Terminal) -> None:
    progress = Progress(100_000, display=ProgressDisplay("auto", io.StringIO(), terminal, Clock()))
    row = metrics(7)
    began = time.process_time()
    for _ in range(10_000):
        progress.step(row)
    assert (time.process_time() - began) / 10_000 < 100e-6


def test_warnings_are_shown_above_the_bar(
    terminal: Terminal, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, output = open_log(tmp_path, 0), io.StringIO()
    with closing(Progress(9, logger=logger, display=ProgressDisplay("auto", output, terminal))) as progress:
        progress.step(metrics(1))
        logger.warning("mind the gap")
    logger.warning("after it")
    assert screen(output.getvalue())[0] == "warning: mind the gap"
    assert capfd.readouterr().err == "warning: after it\n"


def test_warnings_stay_on_stderr_where_that_is_another_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, output = open_log(tmp_path, 0), io.StringIO()
    display = ProgressDisplay("auto", output, Wide("/dev/null", takes_errors=False))
    with closing(Progress(9, logger=logger, display=display)):
        logger.warning("mind the gap")
    assert "mind" not in output.getvalue()
    assert capfd.readouterr().err == "warning: mind the gap\n"


def test_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def codes() -> set[str]:
        output = io.StringIO()
        with closing(Progress(9, display=ProgressDisplay("auto", output, terminal))) as progress:
            progress.step(metrics(9))
        return set(re.findall(r"\x1b\[[0-9;]*m", output.getvalue()))

    coloured = re.compile(r"[;\[](3[0-79]|38;[0-9;]+)[;m]")
    assert any(coloured.search(code) for code in codes())
    monkeypatch.setenv("NO_COLOR", "1")
    assert codes() == set()  # nothing is bold either


def test_style_is_chosen(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def style(wish: str = "auto", on: Terminal | None = terminal) -> str:
        display = ProgressDisplay(wish, io.StringIO(), on)  # type: ignore[arg-type]
        return Progress(9, display=display).style

    assert (style(), style("lines")) == ("bar", "lines")
    monkeypatch.setattr("hpctrain.watch.progress.find_terminal", lambda: None)
    assert (style(on=None), style("bar", None)) == ("lines", "bar")
    monkeypatch.setenv("TERM", "dumb")
    assert (style(), style("bar")) == ("lines", "bar")
    monkeypatch.setenv("HPCTRAIN_PROGRESS", "bar")
    assert style() == "bar"
    monkeypatch.setenv("HPCTRAIN_PROGRESS", "lines")
    assert (style(), style("bar")) == ("lines", "bar")


def test_screen_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        """What could not be written is tried again at every flush, as Python's own streams do."""

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    for style in ("lines", "bar"):
        with closing(Progress(2, display=ProgressDisplay(style, Gone()))) as progress:
            progress.step(metrics(1))
            progress.message("hello")
            progress.step(metrics(2))


def test_letters_that_the_screen_does_not_have_are_replaced() -> None:
    raw = io.BytesIO()
    display = ProgressDisplay("lines", io.TextIOWrapper(raw, encoding="ascii"))
    with closing(Progress(2, display=display)) as progress:
        progress.message("naïve")
        assert raw.getvalue() == b"na?ve\n"
