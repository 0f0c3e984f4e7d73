"""A schedule as a grid of letters on a terminal.

Tests of report/grid.py, report/picture.py and report/cells.py.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from hpctrain.errors import InputOutputError
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.schedule_check import ScheduleProblem
from hpctrain.pipeline.simulate import Simulation, StageTimes, simulate
from hpctrain.report.cells import KINDS, arrange, colour_of, rgb
from hpctrain.report.grid import text
from hpctrain.report.picture import draw, png

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def made(
    name: str, stages: int, micro_batches: int, chunks: int | None = None, times: StageTimes | None = None
) -> tuple[Schedule, Simulation]:
    times = times or StageTimes()
    schedule = generate_schedule(name, stages, micro_batches, chunks, times)
    return schedule, simulate(schedule, times)


def plain(drawn: str) -> str:
    return ESCAPE.sub("", drawn)


def test_the_grid_of_1f1b_is_the_figure_of_the_paper() -> None:
    drawn = text(*made("1f1b", 2, 3), color=False, width=80)
    assert drawn.splitlines() == [
        "1f1b, 2 stages, 3 micro-batches: bubble 25.00% (cost 12, ideal 9)",
        "",
        "stage                                   idle  peak",
        "0 F0 F1       B0--- F2 B1---    B2---  25.0%     2",
        "1    F0 B0--- F1 B1--- F2 B2---        25.0%     1",
        "  0     2     4     6     8     10     time",
        "",
        "F forward, B backward, with the number of the micro-batch",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [60, 80, 132, 240])
def test_rows_are_in_line_and_within_the_width(name: str, color: bool, width: int) -> None:
    schedule, simulation = made(name, 4, 8)
    drawn = text(schedule, simulation, color, width)
    assert ("\x1b" in drawn) == color
    rows = [plain(line) for line in drawn.splitlines() if re.match(r"[0-3] .*%", plain(line))]
    assert len(rows) == 4
    assert len(set(map(len, rows))) == 1
    assert max(len(plain(line)) for line in drawn.splitlines()) <= width
    for row, idle, peak in zip(rows, simulation.idle, simulation.peak_activations, strict=True):
        assert row.split()[-2:] == [f"{100 * idle / simulation.cost:.1f}%", f"{peak:g}"]


def test_every_action_stands_where_and_as_long_as_it_is_done() -> None:
    schedule, simulation = made("zb-h1", 3, 5, times=StageTimes(2, 1, 1, 1))
    lines = text(schedule, simulation, color=False, width=200).splitlines()
    for stage in range(3):
        row = lines[3 + stage][2:-12]
        words = [(match.start() / 3, match[0]) for match in re.finditer(r"[FIW]\d", row)]
        assert words == list(zip(simulation.start[stage], map(str, schedule.stages[stage]), strict=True))


def test_unequal_times_are_to_scale() -> None:
    schedule, simulation = made("1f1b", 1, 4, times=StageTimes(10, 23.7, 0))
    row = text(schedule, simulation, color=False, width=200).splitlines()[3][2:-12]
    starts = [match.start() for match in re.finditer(r"[FB]\d", row)]
    scale = len(row.rstrip()) / simulation.cost
    assert starts == [pytest.approx(start * scale, abs=1) for start in simulation.start[0]]


def test_colour_tells_kind_and_chunk() -> None:
    schedule, simulation = made("interleaved", 2, 2, 2)
    row = text(schedule, simulation, color=True, width=132).splitlines()[3]
    cells = re.findall(r"\x1b\[48;5;(\d+);38;5;(\d+)m *(\d+) *\x1b\[0m", row)
    assert [int(number) for _, _, number in cells] == [action.micro_batch for action in schedule.stages[0]]
    colours = {
        (action.kind, action.chunk): cell[0] for action, cell in zip(schedule.stages[0], cells, strict=True)
    }
    assert len(colours) == len(set(colours.values())) == 4


def test_colours_differ_in_more_than_hue() -> None:
    # Blue to orange through green: told apart by lightness where red and green look the same.
    light = [
        sum(share * part for share, part in zip((0.3, 0.59, 0.11), rgb(colour_of(kind, 0, 1)), strict=True))
        for kind in ("F", "B", "I", "W")
    ]
    assert light == sorted(light)
    assert min(after - before for before, after in itertools.pairwise(light)) > 0.03


def test_narrow_cells_show_the_last_digit_and_say_so() -> None:
    drawn = plain(text(*made("1f1b", 2, 12), color=True, width=60))
    assert drawn.splitlines()[-1].endswith("the last digit")
    assert "Not shown" not in drawn
    (row,) = (line for line in drawn.splitlines() if line.startswith("1 "))
    last = re.sub(r"[^0-9]", "", row[2:-12])
    assert last == "".join(f"{number % 10}{number % 10}" for number in range(12))


def test_a_large_grid_is_cut_with_a_note() -> None:
    drawn = text(*made("1f1b", 64, 512), color=False, width=120)
    lines = drawn.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    (note,) = (line for line in lines if line.startswith("Not shown: "))
    assert "24 stages" in note
    assert "--png" in note
    assert lines[3].startswith(" 0 F0")
    assert "B511" in lines[3]


def test_a_cut_never_shows_a_part_of_a_number() -> None:
    for width in range(60, 90):
        lines = text(*made("gpipe", 4, 128), color=False, width=width).splitlines()[3:7]
        numbers = [int(number) for line in lines for number in re.findall(r"B(\d+)", line[:-12])]
        assert numbers
        assert min(numbers) > 110


def test_a_picture_holds_every_action(tmp_path: Path) -> None:
    schedule, simulation = made("zb-h1", 4, 8)
    png(schedule, simulation, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    figure = draw(schedule, simulation)
    (axes,) = figure.axes
    assert sum(len(group.get_paths()) for group in axes.collections) == sum(map(len, schedule.stages))
    assert axes.get_title(loc="left") == "zb-h1, 4 stages, 8 micro-batches: bubble rate 11.11%"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time", "stage")
    (legend,) = figure.legends
    assert [entry.get_text() for entry in legend.get_texts()] == [KINDS["F"], KINDS["I"], KINDS["W"]]
    numbers = [label.get_text() for label in axes.texts if label.get_text().isdecimal()]
    assert numbers.count("7") >= 4 * 3


def test_a_large_picture_is_whole() -> None:
    schedule, simulation = made("1f1b", 64, 512)
    (axes,) = draw(schedule, simulation).axes
    assert sum(len(group.get_paths()) for group in axes.collections) == 64 * 1024
    assert axes.get_xlim() == (0, simulation.finish)


def test_the_place_of_a_problem_is_framed() -> None:
    schedule = Schedule.parse("F0 B0 F1 B1\nB0 F0 F1 B1")
    problem = ScheduleProblem(1, 0, Action("B", 0), "comes before F0 of its own")
    (axes,) = draw(schedule, None, [problem]).axes
    (frame,) = axes.patches
    cell = arrange(schedule, None)[1][0]
    assert frame.get_bbox().x0 == cell.start
    assert frame.get_bbox().y0 < 1 < frame.get_bbox().y1
    assert str(problem) in [words.get_text() for words in axes.texts]


def test_what_is_missing_is_framed_after_the_last_action() -> None:
    schedule = Schedule.parse("F0 B0\nF0")
    (axes,) = draw(schedule, None, [ScheduleProblem(1, None, Action("B", 0), "is missing")]).axes
    (frame,) = axes.patches
    assert frame.get_bbox().x0 == arrange(schedule, None)[1][-1].end


def test_a_deadlock_is_drawn_as_far_as_it_comes() -> None:
    rows = arrange(Schedule.parse("F0 F1 B1 B0\nF0 B0 F1 B1"), None)
    assert [cell.reached for cell in rows[0]] == [True, True, True, True]
    rows = arrange(Schedule.parse("F0 B0 F1 B1\nF0 F1 B0 B1"), None)
    assert [cell.reached for cell in rows[0]] == [True, False, False, False]
    assert [cell.reached for cell in rows[1]] == [True, False, False, False]
    assert min(cell.start for row in rows for cell in row if not cell.reached) > rows[1][0].end


def test_without_a_problem_the_way_of_the_data_is_the_simulators() -> None:
    for name in ("1f1b", "interleaved", "zb-h2"):
        schedule = generate_schedule(name, 4, 8)
        chunks = schedule.chunks
        simulation = simulate(schedule, StageTimes(chunks, chunks, chunks, 0))
        assert arrange(schedule, None) == arrange(schedule, simulation)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match="cannot be written: No such file"):
        png(*made("gpipe", 2, 2), tmp_path / "nowhere" / "grid.png")
