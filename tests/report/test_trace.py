"""Traces: a file that Perfetto reads, and the steps and bubbles that are read from it.

Tests of report/recorded.py beside report/trace.py.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpctrain.cli.plot import command as plot
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.timeline import EVALUATION, SCHEDULE, Timeline, TimelineSpan
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.report import trace
from hpctrain.report.comparison import draw_comparison
from hpctrain.report.plots import plot_runs
from hpctrain.report.recorded import RecordedStep, read_trace
from hpctrain.report.trace import lanes, write_trace
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare

DECK = """
[run]
title = "traced"
steps = 4
evaluate_every = 1
evaluate_sequences = 4
trace = true
trace_steps = 2
[model]
family = "gpt2"
layers = 4
hidden = 32
heads = 4
[data]
tokens = "{tokens}"
validation = 0.2
[batch]
global_size = 8
micro_size = 1
sequence = 32
[layout]
pipeline = {stages}
schedule = "{schedule}"
[learning_rate]
peak = 1e-2
[machine]
peak_flops = 1e10
"""


def recorded(schedule: Schedule, times: StageTimes) -> RecordedStep:
    """A step that runs exactly as simulated."""
    simulation = simulate(schedule, times)
    return RecordedStep(7, schedule, simulation.start, simulation.end)


def write_run(run_dir: Path, content: str) -> Path:
    run_dir.mkdir(parents=True)
    row = {"step": 1, "loss": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "grad_norm": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run_dir / "trace.json").write_text(content)
    return run_dir


def events(stages: list[str], starts: list[list[float]], durations: list[list[float]]) -> str:
    """A trace by hand: a rank a stage, one step, milliseconds."""
    found: list[dict[str, Any]] = []
    for rank, line in enumerate(stages):
        for name, start, duration in zip(line.split(), starts[rank], durations[rank], strict=True):
            place = {"ts": 1e3 * start, "dur": 1e3 * duration, "pid": rank, "tid": 0}
            found.append({"ph": "X", "cat": SCHEDULE, "name": name, **place, "args": {"step": 3}})
    ranks = [{"pipeline": rank, "data": 0} for rank in range(len(stages))]
    about = {"schedule": "by hand", "placement": "loop", "ranks": ranks}
    return json.dumps({"otherData": about, "traceEvents": found[::-1]})


# Two stages, two micro-batches; F takes 2 and B 4, messages 1; stage 1 dawdles for 1 before its last action.
# Stage 0 works for 12 of its 21, from 10 to 31; stage 1 works for 12 of its 13.
STAGES = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
STARTS = [[10.0, 12.0, 20.0, 27.0], [13.0, 15.0, 19.0, 22.0]]
DURATIONS = [[2.0, 2.0, 4.0, 4.0], [2.0, 4.0, 2.0, 4.0]]


def test_a_step_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(events(STAGES, STARTS, DURATIONS))
    (step,) = read_trace(path)
    assert (step.step, step.schedule.name) == (3, "by hand")
    assert [" ".join(map(str, stage)) for stage in step.schedule.stages] == STAGES
    measured = step.measured()
    assert measured.cost == pytest.approx(0.021)
    assert measured.ideal == pytest.approx(0.012)
    assert measured.bubble_rate == pytest.approx(1 - 12 / 21)
    assert measured.idle == pytest.approx((0.009, 0.009))
    times = step.times()
    assert times.forward == pytest.approx([0.002, 0.002])
    assert times.input_gradient == pytest.approx([0.004, 0.004])
    assert times.weight_gradient == [0.0, 0.0]
    # F1 came while stage 1 was busy and tells nothing; F0, B0 and B1 took 1 each.
    assert times.communication == pytest.approx([0.001])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
def test_what_runs_as_simulated_is_measured_and_simulated_so(name: str) -> None:
    chunks = 1 if name in {"gpipe", "1f1b", "zb-h1"} else 2
    schedule = generate_schedule(name, 2, 8, chunks=chunks)
    step = recorded(schedule, StageTimes(3.0, 2.0, 1.0, 0.25))
    expected = simulate(schedule, StageTimes(3.0, 2.0, 1.0, 0.25))
    assert step.measured() == expected
    again = simulate(schedule, step.times())
    assert again.ideal == pytest.approx(expected.ideal)
    if name != "dualpipe-v":  # mixes whole and split backward
        assert again.bubble_rate == pytest.approx(expected.bubble_rate)


def test_closed_forms_of_the_bubble() -> None:
    for stages, micro_batches in [(2, 4), (4, 8)]:
        step = recorded(generate_schedule("1f1b", stages, micro_batches, chunks=1), StageTimes())
        assert step.measured().bubble_rate == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_boundaries_without_waiting_take_the_mean_of_the_others() -> None:
    """The first boundary's messages are never waited for; the second's take 1 and 3."""
    schedule = Schedule.parse("F0\nF0\nF0")
    hidden = RecordedStep(1, schedule, ((0.0,), (2.0,), (6.0,)), ((1.0,), (3.0,), (7.0,)))
    assert hidden.times().communication == [1.0, 3.0]
    busy = Schedule.parse("F0 F1\nF0 F1")
    late = RecordedStep(1, busy, ((0.0, 1.0), (1.5, 4.5)), ((1.0, 2.0), (4.5, 5.0)))
    assert late.times().communication == [0.5]
    alone = RecordedStep(1, Schedule.parse("F0 B0"), ((0.0, 1.0),), ((1.0, 2.0),))
    assert alone.times().communication == []


def test_waiting_for_a_stage_and_for_its_messages() -> None:
    """Stage 1 waits until 2 for F0 of stage 0, and 1 until that has come; 1 for F1 to come; its B0 is late by
    0.5, which no other causes; at the end 1.5 for B0 of stage 0.
    """
    schedule = Schedule.parse("F0 F1 B0\nF0 F1 B0")
    step = RecordedStep(1, schedule, ((0.0, 2.0, 7.0), (3.0, 5.0, 6.0)), ((2.0, 4.0, 8.0), (4.0, 5.5, 6.5)))
    assert step.waits(1) == pytest.approx((2 + 1.5, 1 + 1))
    assert step.waits(0) == pytest.approx((2.5, 0.5))
    slow = RecordedStep(1, Schedule.parse("F0 F1\nF0 F1"), ((0.0, 1.0), (1.0, 4.0)), ((1.0, 2.0), (3.0, 5.0)))
    assert slow.waits(1) == (1, 1)  # F1 was done at 2, where stage 1 still had F0 to do
    alone = RecordedStep(1, Schedule.parse("F0 B0"), ((0.0, 2.0),), ((1.0, 3.0),))
    assert alone.waits(0) == (0, 0)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_a_simulated_stage_works_or_waits(name: str) -> None:
    schedule = generate_schedule(name, 4, 8, 2 if name in {"zb-v", "interleaved"} else 1)
    for message in (0.0, 0.25):
        step = recorded(schedule, StageTimes(2.0, 2.0, 1.0, message))
        finish = max(row[-1] for row in step.end)
        waits = [step.waits(stage) for stage in range(4)]
        assert (max(messages for _, messages in waits) > 0) == (message > 0)
        for (bubble, messages), starts, ends in zip(waits, step.start, step.end, strict=True):
            worked = sum(ends) - sum(starts)
            assert bubble + messages == pytest.approx(finish - worked)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"traceEvents": [', "not a whole JSON file"),
        ("[]", "not the trace of a run"),
        ('{"traceEvents": []}', "not the trace of a run"),
        (events(["Q0"], [[0.0]], [[1.0]]), "not the trace of a run"),
    ],
    ids=["cut off", "a list", "of another program", "no action"],
)
def test_bad_traces_are_told_in_a_sentence(tmp_path: Path, content: str, said: str) -> None:
    run_dir = write_run(tmp_path / "run", content)
    with pytest.raises(InputOutputError, match=said) as caught:
        plot_runs([run_dir])
    assert str(run_dir / "trace.json") in str(caught.value)


def test_plot_draws_both_schedules_with_both_bubbles(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", events(STAGES, STARTS, DURATIONS))
    result = CliRunner().invoke(plot, [str(run_dir)])
    assert result.exit_code == 0
    picture = run_dir / "plots" / "schedule.png"
    assert str(picture) in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    (step,) = read_trace(run_dir / "trace.json")
    figure = draw_comparison("run", step)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "measured, step 3: bubble 42.9%, cost 21 ms, ideal 12 ms"
    # Stage 1: F0 3-5, B0 5-9, F1 9-11, B1 11-15; stage 0: F0 0-2, F1 2-4, B0 10-14, B1 16-20.
    assert titles[1].endswith("bubble 40.0%, cost 20 ms, ideal 12 ms")
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == pytest.approx((0, 21))


def test_pictures_of_several_runs_do_not_overwrite_one_another(tmp_path: Path) -> None:
    content = events(STAGES, STARTS, DURATIONS)
    runs = [write_run(tmp_path / name / "run", content) for name in "ab"]
    written = plot_runs(runs, tmp_path / "out")
    assert {path.name for path in written} >= {"schedule_a_run.png", "schedule_b_run.png"}


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_large_trace_is_gathered_in_pieces(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_PIECE", 100)
    mesh, timeline = Mesh(world, {"pipeline": world.size}), Timeline(1, 100)
    timeline.begin_step(1)
    for index in range(5 * (world.rank + 1)):
        timeline.record("data", f"call {index}", index + 0.25, index + 2.0, 8)
    path = mpi_tmp_path / "trace.json"
    write_trace(path, timeline, mesh, Schedule.parse("F0"))
    world.everyone.barrier()
    found = json.loads(path.read_text())["traceEvents"]
    for rank in range(world.size):
        mine = [event for event in found if event["pid"] == rank and event["ph"] == "X"]
        assert [event["name"] for event in mine] == [f"call {index}" for index in range(5 * (rank + 1))]
        assert [event["ts"] for event in mine] == [1e6 * index for index in range(5 * (rank + 1))]
        assert {event["dur"] for event in mine} == {1.75e6}
    assert not list(mpi_tmp_path.glob("*.partial"))


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_folder_that_is_gone_is_told_on_all_ranks(world: World, mpi_tmp_path: Path) -> None:
    timeline = Timeline(1, 10)
    with pytest.raises(InputOutputError, match="the trace cannot be written"):
        write_trace(
            mpi_tmp_path / "gone" / "trace.json",
            timeline,
            Mesh(world, {"data": world.size}),
            Schedule.parse("F0"),
        )
    world.everyone.barrier()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_a_run_records_every_action_of_its_schedule(
    world: World, mpi_tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = 2 if world.size % 2 == 0 else 1
    monkeypatch.chdir(mpi_tmp_path)
    if world.rank == 0:
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        Path("traced.toml").write_text(
            DECK.format(tokens="tokens.h5", stages=stages, schedule=schedule)
            if stages > 1
            else DECK.format(tokens="tokens.h5", stages=1, schedule="1f1b")
        )
    world.everyone.barrier()
    prepare(world, Path("tokens.h5"), ["text.txt"])
    assert run_deck(world, Path("traced.toml"), [f"batch.global_size={8 * world.size // stages}"]) == 0
    assert world.ledger.timeline is None
    world.everyone.barrier()
    path = Path("runs/traced/trace.json")
    content = json.loads(path.read_text())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        assert {"ts", "dur", "pid", "tid", "name", "cat"} <= set(span)
        assert span["ts"] >= 0
        assert span["dur"] >= 0
    labels = {(e["name"], e["pid"], e["tid"]): e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    for rank in range(world.size):
        assert labels["process_name", rank, 0]["name"].startswith(f"rank {rank}, stage ")
    _no_overlap_in_a_row(spans)
    assert {span["args"]["step"] for span in spans} == {3, 4}, "the newest steps only"
    assert {span["cat"] for span in spans} >= {SCHEDULE, EVALUATION, "phases"}

    chunks = 2 if schedule == "interleaved" and stages > 1 else 1
    expected = generate_schedule(schedule, stages, 8, chunks=chunks) if stages > 1 else None
    pipeline = [rank for rank, place in enumerate(content["otherData"]["ranks"]) if place["data"] == 0]
    for step in (3, 4):
        done: dict[tuple[int, str], tuple[float, float]] = {}
        for stage, rank in enumerate(pipeline):
            mine = [s for s in spans if (s["pid"], s["cat"], s["args"]["step"]) == (rank, SCHEDULE, step)]
            if expected is not None:
                assert [span["name"] for span in mine] == list(map(str, expected.stages[stage]))
            else:
                assert [span["name"] for span in mine] == [f"{k}{m}" for m in range(8) for k in "FB"]
            assert labels["thread_name", rank, mine[0]["tid"]]["name"] == SCHEDULE
            done |= {(stage, s["name"]): (s["ts"], s["ts"] + s["dur"]) for s in mine}
        if expected is not None:
            for micro_batch in range(8):
                assert done[1, f"F{micro_batch}"][0] >= done[0, f"F{micro_batch}"][1] - 1e-3
                back = "I" if schedule == "zb-h1" else "B"
                if chunks == 1:
                    assert done[0, f"{back}{micro_batch}"][0] >= done[1, f"{back}{micro_batch}"][1] - 1e-3
    if stages > 1:
        moved = [s for s in spans if (s["cat"], s["args"]["step"]) == ("pipeline", 4)]
        sends = sum(span["name"] == "send" for span in moved)
        evaluated = sum(s["cat"] == EVALUATION and s["args"]["step"] == 4 for s in spans)
        tied = 2  # the embeddings' gradients
        boundaries = stages * chunks - 1
        per_pipeline = (
            8 * 2 * boundaries + tied + evaluated // (world.size // stages) * boundaries // (boundaries + 1)
        )
        assert sends == per_pipeline * (world.size // stages)
        assert sum(span["name"] == "recv" for span in moved) == sends
        assert all(0 <= span["args"]["inside_us"] <= span["dur"] + 0.01 for span in moved)
    step = read_trace(path)[-1]
    measured = step.measured()
    assert 0 <= measured.bubble_rate < 1
    assert simulate(step.schedule, step.times()).ideal <= measured.cost * 1.0001
    if world.rank == 0:
        drawn = any(path.name == "schedule.png" for path in plot_runs(["runs/traced"]))
        assert drawn == (stages > 1)
    world.everyone.barrier()


def _no_overlap_in_a_row(spans: list[dict[str, Any]]) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans:
        rows.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for row in rows.values():
        assert all(start >= end - 1e-3 for (_, end), (start, _) in pairwise(sorted(row)))


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_records_nothing_unless_asked(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mpi_tmp_path)
    if world.rank == 0:
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        Path("traced.toml").write_text(DECK.format(tokens="tokens.h5", stages=1, schedule="1f1b"))
    world.everyone.barrier()
    prepare(world, Path("tokens.h5"), ["text.txt"])
    overrides = ["run.trace=false", "run.trace_steps=", "run.steps=1"]
    assert run_deck(world, Path("traced.toml"), overrides) == 0
    assert not Path("runs/traced/trace.json").exists()


def test_spans_under_way_at_once_get_lanes_of_their_own() -> None:
    spans = [TimelineSpan("x", "", *ends) for ends in [(4, 5), (0, 3), (1, 2), (2, 6), (3, 4), (1, 1)]]
    found = lanes(spans)
    assert found == [0, 0, 1, 1, 0, 1]
    assert lanes([TimelineSpan("x", "", 0, 9 - index) for index in range(3)]) == [2, 1, 0]
    assert lanes([TimelineSpan("x", "", index, index + 1) for index in range(5)]) == [0] * 5
