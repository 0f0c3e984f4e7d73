"""Sweeps: their runs and names, the slots of a machine, runs that fail, stop and go on, and what is told.

Tests of train/sweep/variants.py, train/sweep/slots.py, train/sweep/results.py, report/swept.py, cli/sweep.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from math import exp, nan
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.sweep import command
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.job.job_options import JobOptions
from hpctrain.job.script import render_script
from hpctrain.report.metric_rows import read_metrics
from hpctrain.report.swept import SweptRun, picture
from hpctrain.train.sweep.results import VariantResult, best_of, find_metric, result_lines, swept_runs
from hpctrain.train.sweep.slots import make_slots
from hpctrain.train.sweep.sweep_deck import sweep_job, without_running
from hpctrain.train.sweep.variants import make_sweep, record_runs, recorded_digests, split_values
from hpctrain.watch.folder import lock_run_folder
from tests.data.preparing import prepare
from tests.launch import ROOT

DECK = """
[run]
title = "small"
steps = 4
evaluate_every = 2
[model]
family = "gpt2"
layers = 1
hidden = 16
heads = 2
[data]
tokens = "tokens.h5"
validation = 0.1
[batch]
global_size = 4
micro_size = 2
sequence = 16
"""


@pytest.fixture
def deck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deck.toml").write_text(DECK)
    return Path("deck.toml")


@pytest.fixture
def tokens(deck: Path, world: World) -> Path:
    Path("text.txt").write_text("".join(f"{n * n % 997} lines of text\n" for n in range(600)))
    prepare(world.single_rank_world(), Path("tokens.h5"), ["text.txt"])
    return Path("tokens.h5")


def test_values_stand_between_commas() -> None:
    assert split_values("run.seed=1, 2,3") == ("run.seed", ["1", "2", "3"])
    assert split_values('model.frozen=["a","b"],["c"]') == ("model.frozen", ['["a","b"]', '["c"]'])
    assert split_values('run.notes="a,b",c') == ("run.notes", ['"a,b"', "c"])
    assert split_values("run.seed=") == ("run.seed", [""])


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("seed=1", "must be section.key=VALUE"),
        ("run.seed", "must be section.key=VALUE"),
        ("run.seed=1,,2", "has an empty value between two commas"),
        ("run.seed=1,2,1", "has 1 twice"),
        ("learning_rate.peak=1e-4,0.0001", "has 0.0001 twice"),
        ("run.dir=a,b", "is set by the sweep for each run"),
        ("run.seed=1,\x1b2", "control"),
    ],
)
def test_values_that_will_not_do_are_told(argument: str, told: str) -> None:
    with pytest.raises(HpctrainError, match=told):
        split_values(argument)


def test_runs_are_all_combinations(deck: Path) -> None:
    given = ["learning_rate.peak=1e-3,3e-3", "run.seed=1,2,3", "run.steps=9"]
    sweep = make_sweep(deck, given, 1, None)
    assert sweep.folder == Path("runs/small-sweep") and sweep.keys == ("learning_rate.peak", "run.seed")
    assert [each.name for each in sweep.variants] == [
        f"peak={peak},seed={seed}" for peak in ("1e-3", "3e-3") for seed in (1, 2, 3)
    ]
    last = sweep.variants[-1].deck
    assert (last.learning_rate.peak, last.run.seed, last.run.steps) == (3e-3, 3, 9)
    assert last.run.title == "small peak=3e-3,seed=3"
    assert last.run.dir == "runs/small-sweep/peak=3e-3,seed=3"
    odd = make_sweep(
        deck, ['model.frozen=["a/../b"],["a/../c"],["a.b"]', "optimizer.name=sgd,lion"], 1, "mine"
    )
    names = [each.name for each in odd.variants]
    assert len({*names}) == 6 and not any("/" in name or ".." in name for name in names)
    assert odd.folder == Path("runs/mine")
    assert [each.name for each in make_sweep(deck, [], 1, None).variants] == ["all"]


def test_all_that_is_wrong_is_told_before_any_run(deck: Path) -> None:
    with pytest.raises(HpctrainError) as caught:
        make_sweep(deck, ["batch.micro_size=0,3,2", "model.heads=2,5"], 1, None)
    text = "\n".join(caught.value.problems)
    assert "micro_size=0" in text and "batch.micro_size x data ranks = 3" in text and "model.heads" in text
    values = ",".join(map(str, range(4000)))
    with pytest.raises(HpctrainError, match="the sweep would have 4000 runs, more than 1000"):
        make_sweep(deck, [f"run.seed={values}"], 1, None)
    with pytest.raises(HpctrainError, match=r"run\.seed is given twice"):
        make_sweep(deck, ["run.seed=1,2", "run.seed=3"], 1, None)
    for name in ("a/b", "..", "", "x" * 100):
        with pytest.raises(HpctrainError, match=r"--name .*: must be a folder name"):
            make_sweep(deck, ["run.seed=1,2"], 1, name)


def test_a_sweep_is_written_down_and_guards_its_runs(deck: Path) -> None:
    record_runs(make_sweep(deck, ["run.seed=1,2"], 1, None))
    sweep = make_sweep(deck, ["run.seed=2,3", "run.steps=50"], 1, None)
    record_runs(sweep)  # longer, and more of them
    assert [*recorded_digests(sweep.folder)] == ["seed=1", "seed=2", "seed=3"]
    (sweep.folder / "seed=2").mkdir()
    with pytest.raises(HpctrainError, match="seed=2: was started with another deck; choose another --name"):
        record_runs(make_sweep(deck, ["run.seed=1,2", "optimizer.clip=0.5"], 1, None))
    (sweep.folder / "sweep.json").write_text("[]")
    with pytest.raises(HpctrainError, match=r"sweep\.json: was not written by a sweep"):
        recorded_digests(sweep.folder)


def test_slots_have_cores_and_gpus_of_their_own() -> None:
    cores = range(8)
    assert [slot.cores for slot in make_slots(None, 2, 2, cores, [])] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [slot.cores for slot in make_slots(None, 3, 1, cores, [])] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [slot.cores for slot in make_slots(None, 16, 1, cores, [])] == [None]
    assert [slot.cores for slot in make_slots(5, 2, 1, cores, [])] == [None] * 5
    assert [slot.gpus for slot in make_slots(None, 1, 1, cores, ["2", "3"])] == [("2",), ("3",)]
    assert [slot.gpus for slot in make_slots(4, 1, 1, cores, ["0", "1"])] == [None] * 4


def test_one_that_fails_stops_no_other_and_is_tried_again(tokens: Path) -> None:
    runner, sets = CliRunner(), ("--set", "data.tokens=tokens.h5,away.h5", "--set", "learning_rate.peak=1e-2")
    done = runner.invoke(command, ["deck.toml", *sets, "--slots", "2"], standalone_mode=False)
    assert done.exception is None and done.return_value == 1, done.output
    assert (
        "tokens=tokens.h5: done" in done.output and "tokens=away.h5: failed with exit code 3" in done.output
    )
    folder = Path("runs/small-sweep")
    assert "away.h5" in (folder / "tokens=away.h5.out").read_text()
    row = next(line.split() for line in done.output.splitlines() if line.startswith("tokens.h5 "))
    losses = [each["loss"] for each in read_metrics(folder / "tokens=tokens.h5/metrics.jsonl")]
    assert row[1:4] == ["done", "4/4", f"{losses[-1]:.4f}"] and row[-1] == "best" and float(row[4]) > 0
    trained = (folder / "tokens=tokens.h5/metrics.jsonl").stat().st_mtime_ns
    shutil.copy("tokens.h5", "away.h5")
    again = ["deck.toml", *sets, "--plot", "a.png", "--json", "a.json", "--figure", "validation/perplexity"]
    done = runner.invoke(command, again, standalone_mode=False)
    assert done.exception is None and done.return_value == 0, done.output
    assert "1 of 2 runs are done already" in done.output and "tokens=tokens.h5: started" not in done.output
    assert (folder / "tokens=tokens.h5/metrics.jsonl").stat().st_mtime_ns == trained
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads(Path("a.json").read_text())["runs"]
    assert [run["state"] for run in runs] == ["done", "done"] and runs[0]["loss"] == runs[1]["loss"]
    assert runs[0]["values"] == {"data.tokens": "tokens.h5"}
    assert runs[0]["figure"] == pytest.approx(exp(runs[0]["validation_loss"])) == runs[1]["figure"]
    assert "validation perplexity" in done.output and "best: runs/small-sweep/" in done.output
    done = runner.invoke(command, [*again[:5], "--show"], standalone_mode=False)
    assert done.return_value == 0 and "begun" not in done.output and "best: runs/small-sweep/" in done.output


def test_a_sweep_stops_in_good_order_and_goes_on(tokens: Path) -> None:
    """Of runs of two ranks, which mpirun starts."""
    words = [
        sys.executable,
        "-m",
        "hpctrain",
        "sweep",
        "deck.toml",
        "--set",
        "run.seed=1,2",
        "--set",
        "run.steps=400",
    ]
    words += ["--set", "run.evaluate_every=0", "--ranks-each", "2", "--slots", "1", "--name", "two"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in environment.items() if not name.startswith("OMPI_COMM")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    started = subprocess.Popen(words, **pipes)  # type: ignore[call-overload]
    rows, deadline = Path("runs/two/seed=1/metrics.jsonl"), time.monotonic() + 200
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    told, _ = started.communicate(timeout=200)
    assert started.returncode == 75, told
    assert (
        "seed=1: stopped with a checkpoint" in told
        and "1 run not started; repeat the command to continue" in told
    )
    stopped = len(read_metrics(rows))
    assert 0 < stopped < 400 and not Path("runs/two/seed=2").exists()
    done = subprocess.run([*words, "--set", "run.seed=1"], **pipes)  # type: ignore[call-overload]
    assert done.returncode == 2 and "run.seed is given twice" in done.stdout
    shorter = [word.replace("steps=400", f"steps={stopped + 3}") for word in words]
    done = subprocess.run(shorter, **pipes)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout
    assert [row["step"] for row in read_metrics(rows)] == [*range(1, stopped + 4)]
    assert len(read_metrics(Path("runs/two/seed=2/metrics.jsonl"))) == stopped + 3


def test_runs_that_a_killed_sweep_left_running_are_told(deck: Path) -> None:
    first, *others = make_sweep(deck, ["run.seed=1,2"], 1, None).variants
    said: list[str] = []
    with lock_run_folder(first.folder):
        assert without_running([first, *others], said.append) == others
    assert [line.partition(" (")[0] for line in said] == [f"{first.name}: is still running"]
    assert f"process {os.getpid()} on " in said[0]
    assert without_running([first, *others], pytest.fail) == [first, *others]


def test_ranks_do_not_sweep(deck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(HpctrainError, match=r"starts ranks itself .*; start it without mpirun"):
        CliRunner().invoke(command, ["deck.toml"], standalone_mode=False, catch_exceptions=False)


def test_the_best_run_is_that_of_the_least_validation_loss(deck: Path) -> None:
    sweep = make_sweep(deck, ["run.seed=1,2,3"], 1, None)
    one, two, three = sweep.variants
    rows = [
        VariantResult(one, "done", 4, 2.0, 3.0),
        VariantResult(two, "done", 4, 2.5, 2.5),
        VariantResult(three, "failed", 1, 1.0, 1.0),
    ]
    assert best_of(rows) is rows[1] and best_of([]) is None
    assert (
        best_of([rows[0], VariantResult(two, "done", 4, 2.5)]) is rows[0]
    )  # by the loss, as one has no other
    lines = result_lines(sweep, rows, None)
    assert lines[0].split() == ["run.seed", "state", "step", "loss", "validation", "tokens/s"]
    assert lines[2].split() == ["2", "done", "4/4", "2.5000", "2.5000", "best"]
    assert lines[-1] == "best: runs/small-sweep/seed=2"


def test_the_best_run_is_that_of_the_figure_that_is_wanted(deck: Path) -> None:
    sweep = make_sweep(deck, ["run.seed=1,2,3"], 1, None)
    one, two, three = sweep.variants
    rows = [
        VariantResult(one, "done", 4, 2.0, 3.0, selected=1.5),
        VariantResult(two, "done", 4, 2.5, 2.5, selected=nan),
        VariantResult(three, "done", 4, 2.2, 2.6, selected=1.25),
    ]
    wanted = find_metric(sweep, "validation/bits_per_byte")
    assert best_of(rows, wanted) is rows[2] and best_of(rows[1:2], wanted) is None
    lines = result_lines(sweep, rows, None, wanted)
    assert lines[0].split()[3:6] == ["validation", "bits/byte", "loss"]
    assert lines[3].split() == ["3", "done", "4/4", "1.2500", "2.2000", "2.6000", "best"]
    assert result_lines(sweep, rows[1:2], None, wanted)[-1].startswith("best: none, because no finished run")
    (axes,) = picture("a", swept_runs(rows), "validation bits/byte").axes
    assert axes.get_ylabel() == "validation bits/byte" and [*axes.lines[0].get_ydata()][::2] == [1.5, 1.25]


@pytest.mark.parametrize(
    ("figure", "sets", "told"),
    [
        ("valdation", (), '--figure valdation: is not an evaluation set (did you mean "validation"?)'),
        ("xyz", (), '--figure xyz: is not an evaluation set (use "validation")'),
        (
            "validation/accuracy",
            (),
            "--figure validation/accuracy: is not a metric of an evaluation set (use validation,",
        ),
        ("validation", ("data.validation=0", "run.evaluate_every=0"), "requires an evaluation set"),
    ],
)
def test_a_figure_that_there_is_not_is_told_before_any_run(
    deck: Path, figure: str, sets: tuple[str, ...], told: str
) -> None:
    words = ["deck.toml", "--set", "run.seed=1,2", *(word for each in sets for word in ("--set", each))]
    done = CliRunner().invoke(command, [*words, "--figure", figure], standalone_mode=False)
    assert told in str(done.exception) and isinstance(done.exception, HpctrainError)
    assert len(done.exception.problems) == 1 and not Path("runs").exists()


def test_the_picture_has_a_line_for_other_values() -> None:
    runs = [
        SweptRun({"learning_rate.peak": peak, "run.seed": seed}, 3.0 + number, nan)
        for number, (peak, seed) in enumerate([("1e-2", "1"), ("1e-3", "1"), ("1e-3", "2")])
    ]
    (axes,) = picture("a_b", runs).axes
    assert axes.get_xscale() == "log" and axes.get_ylabel() == "loss, mean of the last tenth"
    assert [list(line.get_xdata()) for line in axes.lines] == [[1e-3, 1e-2], [1e-3]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["seed = 1", "seed = 2"]
    (axes,) = picture("b", [SweptRun({"optimizer.name": name}, 1.0, 2.0) for name in ("sgd", "lion")]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["sgd", "lion"]
    assert axes.get_ylabel() == "validation loss"


def test_an_array_job_has_each_run(deck: Path) -> None:
    """Of any values: what the script gives to hpctrain is what the sweep's own runs are given."""
    given = [
        "run.seed=1,2",
        "batch.global_size=8",
        "optimizer.name=sgd,lion",
        'data.tokens="q\'`$(touch owned) x"',
    ]
    job = sweep_job(deck, given, 4, "a 'name", JobOptions("slurm", (2, 2), 600))
    text = render_script(job, "echo", "a.sh", "hpctrain")
    assert "#SBATCH --array=0-3" in text and "#SBATCH --ntasks-per-node=2" in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    sweep = make_sweep(deck, given, 4, "a 'name")
    begin, end = text.index("settings=("), text.index("ranks_per_node=")
    for task, variant in enumerate(sweep.variants):
        shown = f'SLURM_ARRAY_TASK_ID={task}\n{text[begin:end]}\nprintf "%s\\0" "$run_dir" "${{settings[@]}}"'
        done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
        folder, *words = done.stdout.partition("\n")[2].split("\0")[:-1]
        assert folder == str(variant.folder)
        assert words[1::2] == [*variant.settings] and {*words[::2]} == {"--set"}
        assert read_deck(deck, words[1::2], 4).run.dir == str(variant.folder)
    assert not Path("owned").exists()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if shellcheck.exists():
        found = subprocess.run(
            [shellcheck, "-S", "warning", "-s", "bash", "-"], input=text, text=True, capture_output=True
        )
        assert found.returncode == 0, found.stdout


def test_the_command_writes_an_array_job(deck: Path) -> None:
    runner, words = CliRunner(), ["deck.toml", "--set", "run.seed=1,2", "--slurm", "a.sh"]
    more = [
        "--time",
        "2 h",
        "--account",
        "me",
        "--module",
        "gcc",
        "--module",
        "openmpi/5",
        "--directive",
        "--qos=high",
    ]
    done = runner.invoke(command, [*words, *more], standalone_mode=False)
    assert done.return_value == 0 and "submit it with `sbatch a.sh`" in done.output, done.output
    text = Path("a.sh").read_text()
    assert "\n#SBATCH --qos=high\n" in text and "gcc openmpi/5" in text
    assert "#SBATCH --time=02:00:00" in text and "#SBATCH --job-name=small-sweep" in text
    for more, told in (
        (["deck.toml", "--account", "me"], "--account requires --slurm"),
        (["deck.toml", "--module", "gcc"], "--module requires --slurm"),
        ([*words, "--show"], "--slurm conflicts with --show"),
        ([*words, "--nodes", "3"], "--nodes 3: must divide --ranks-each 1"),
    ):
        done = runner.invoke(command, more, standalone_mode=False)
        assert told in str(done.exception), done.exception
