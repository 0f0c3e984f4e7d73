"""Tables, event files and services beside metrics.jsonl, whole and broken; no bit of a run hangs on them.

Tests of watch/dashboards.py, watch/csv_file.py, watch/event_file.py, watch/service.py,
watch/service_process.py, watch/scalars.py and deck/sections/report.py.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import Row, read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.watch import dashboards as module
from hpctrain.watch.csv_file import CsvFile
from hpctrain.watch.dashboards import require_packages
from hpctrain.watch.event_file import EventFile
from hpctrain.watch.folder import delete_run, lock_run_folder
from hpctrain.watch.scalars import numbers, scalars
from hpctrain.watch.service import Service, ServiceError
from tests.train.poisoned import BACK, Poison, make_deck, train
from tests.train.test_run import contents, deck_file
from tests.train.test_spike_response import AT, FROM_MEMORY, SHORT

__all__ = ["deck_file"]

PACKAGE = """
import json, os, sys, time

log = None

def note(*what):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **settings):
        self.settings = settings

class Run:
    def define_metric(self, *name, **rest):
        pass

    def log(self, values, step=None):
        if os.environ.get("FAKE_WRONG") == f"log {step}":
            raise RuntimeError("the service is away")
        if os.environ.get("FAKE_WRONG") == f"hang {step}":
            time.sleep(600)
        note("log", step, values)

    def finish(self, exit_code=0):
        if os.environ.get("FAKE_WRONG") == "finish":
            time.sleep(600)
        note("finish", exit_code)

def init(**facts):
    print("a banner that nobody wants to see")
    if os.environ.get("FAKE_WRONG") == "init":
        sys.exit("not logged in")
    if os.environ.get("FAKE_WRONG") == "init hangs":
        time.sleep(600)
    facts.pop("settings", None)
    note("init", facts)
    return Run()

def teardown():
    note("teardown")
"""


@pytest.fixture
def fakes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages `wandb` and `trackio` that write what they are told into the file that is returned."""
    folder = tmp_path_factory.mktemp("fakes")
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return folder / "log"


def told(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def metrics(folder: Path, rows: Sequence[Row], mode: str = "a") -> None:
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def feed_rows(folder: Path, writer: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        metrics(folder, [row])
        writer.write(row, 1000.0 + row["step"])


def row(step: int, loss: float = 2.0, **more: Any) -> Row:
    return {"step": step, "tokens": 100 * step, "loss": loss, "skipped": False, **more}


def test_the_figures_of_a_row() -> None:
    full = row(3, experts={"blocks": [1, 3], "load": [1.5]}, spike="loss 9", staleness=[4], none=None)
    assert scalars(full) == {
        "step": 3,
        "tokens": 300,
        "loss": 2.0,
        "skipped": False,
        "experts/blocks/0": 1,
        "experts/blocks/1": 3,
        "experts/load/0": 1.5,
        "spike": "loss 9",
        "staleness/0": 4,
    }
    assert numbers(row(1)) == {"step": 1, "tokens": 100, "loss": 2, "skipped": 0}


def test_columns_of_a_table_grow_and_rows_before_have_them_empty(tmp_path: Path) -> None:
    writer = CsvFile(tmp_path, 0)
    assert (tmp_path / "metrics.csv").read_text() == ""
    feed_rows(tmp_path, writer, [row(1), row(2, validation_loss=1.5), row(3, math.nan)])
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,tokens,loss,skipped,validation_loss",
        "1,100,2.0,False,",
        "2,200,2.0,False,1.5",
        "3,300,,False,",
    ]
    writer.close(completed=True)
    assert not (tmp_path / "metrics.csv.new").exists()


def test_a_table_goes_on_and_back_by_what_metrics_hold(tmp_path: Path) -> None:
    metrics(tmp_path, [row(step, 5.0 - step) for step in (1, 2, 3)])
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n2,what a killed job le")
    writer = CsvFile(tmp_path, 3)
    feed_rows(tmp_path, writer, [row(4, 1.0), row(5, 0.5)])
    assert [(each["step"], each["loss"]) for each in table(tmp_path / "metrics.csv")] == [
        ("1", "4.0"),
        ("2", "3.0"),
        ("3", "2.0"),
        ("4", "1.0"),
        ("5", "0.5"),
    ]
    # The run is ahead of this writer: it went back and made steps anew before that is told here.
    metrics(tmp_path, [row(step, 5.0 - step) for step in (1, 2)], "w")
    metrics(tmp_path, [row(3, 9.0)])
    writer.roll_back(2)
    writer.write(row(3, 9.0), 0.0)
    assert [each["loss"] for each in table(tmp_path / "metrics.csv")] == ["4.0", "3.0", "9.0"]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader makes of a run's files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_event_files_are_read_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert "tensorflow" not in sys.modules
    writer = EventFile(tmp_path, 0)
    feed_rows(tmp_path, writer, [row(1, 3.5), row(2, 2.5, validation_loss=3.0, spike="words"), row(3, 1.5)])
    assert events(tmp_path)["loss"] == [(1, 3.5), (2, 2.5), (3, 1.5)]  # while it is open
    found = events(tmp_path)
    assert found["validation_loss"] == [(2, 3.0)]
    assert found.keys() == {"tokens", "loss", "skipped", "validation_loss"}
    writer.roll_back(1)
    writer.write(row(2, 2.25), 0.0)
    assert events(tmp_path)["loss"] == [(1, 3.5), (2, 2.25)]
    writer.close(completed=False)
    # Killed within a record, and begun anew from a checkpoint after step 1 within the same second.
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again = EventFile(tmp_path, 1)
    again.write(row(2, 2.125), 0.0)
    again.close(completed=True)
    assert events(tmp_path)["loss"] == [(1, 3.5), (2, 2.125)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert "tensorflow" not in sys.modules


FACTS = {"id": "0a1b2c3d", "name": "small", "folder": "/x", "mode": "offline", "config": {"run.steps": 3}}


def test_what_services_are_told(fakes: Path) -> None:
    for package in ("wandb", "trackio"):
        fakes.unlink(missing_ok=True)
        service = Service(package, FACTS)
        for step in (1, 2):
            service.write(row(step), 0.0)
        service.roll_back(1)
        service.write(row(2, 9.0), 0.0)
        service.close(completed=True)
        init, *rows, last = [each for each in told(fakes) if each[0] != "teardown"]
        if package == "wandb":
            assert init[1] == {
                "project": "hpctrain",
                "id": "0a1b2c3d",
                "name": "small",
                "dir": "/x",
                "mode": "offline",
                "config": {"run.steps": 3},
                "resume": "allow",
            }
            # It wants its own count to grow, and draws by the step in the row.
            assert [(each[1], each[2]["step"], each[2]["loss"]) for each in rows] == [
                (1, 1, 2.0),
                (2, 2, 2.0),
                (3, 2, 9.0),
            ]
            assert last == ["finish", 0]
        else:
            assert (init[1]["project"], init[1]["name"]) == ("hpctrain", "small-0a1b2c3d")
            assert [(each[1], each[2]["loss"]) for each in rows] == [(1, 2.0), (2, 2.0), (2, 9.0)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("init", "SystemExit: not logged in"), ("log 2", "RuntimeError: the service is away")],
)
def test_a_service_that_fails_says_why(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_WRONG", wrong)
    service = Service("wandb", FACTS)
    with pytest.raises(ServiceError, match=words):
        feed_rows(tmp_path, service, [row(step) for step in range(1, 10_000)])


def test_a_killed_run_leaves_no_service_behind(fakes: Path) -> None:
    service = Service("wandb", FACTS)
    service.write(row(1), 0.0)
    assert service._process.stdin is not None
    service._process.stdin.close()  # as the kernel does
    assert service._process.wait(60) == 0
    assert told(fakes)[-2:] == [["finish", 1], ["teardown"]]
    assert service._process.stdout is not None
    service._process.stdout.close()


def test_packages_that_are_missing_are_problems_of_the_deck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as wandb makes one where it is used
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "deck.toml").write_text(DECK)
    deck = read_deck(
        tmp_path / "deck.toml", ["report.wandb=offline", "report.trackio=true", "report.tensorboard=true"], 1
    )
    with pytest.raises(HpctrainError) as caught:
        require_packages(deck)
    assert caught.value.exit_code == 2
    said = " ".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "requires the package wandb, which is not installed: pip install wandb" in said
    require_packages(read_deck(tmp_path / "deck.toml", ["report.csv=true"], 1))


DECK = """
[run]
steps = 3
[model]
family = "llama"
layers = 1
hidden = 8
heads = 1
vocabulary = 300
[data]
tokens = "tokens.h5"
[batch]
global_size = 1
sequence = 4
[learning_rate]
peak = 0.001
"""


def hang(*_: object) -> None:
    time.sleep(600)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_without_a_package_ends_before_it_begins(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_installed", lambda package: package != "wandb")
    keys = [f"run.dir={mpi_tmp_path}/run", "report.wandb=offline", "report.tensorboard=true"]
    with pytest.raises(HpctrainError, match=r"report\.wandb=offline: requires the package wandb") as caught:
        run_deck(world, deck_file, keys)
    assert len(caught.value.problems) == 1
    assert not (mpi_tmp_path / "run").exists()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_has_the_same_bits_with_all_of_it(
    world: World, deck_file: Path, mpi_tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["run.steps=6", "checkpoint.every=3"]
    on = [*keys, "report.csv=true", "report.wandb=online", "report.trackio=true"]
    has_tensorboard = module._installed("tensorboard")
    on += ["report.tensorboard=true"] * has_tensorboard
    run_deck(world, deck_file, [*keys, f"run.dir={mpi_tmp_path}/plain"])
    run_deck(world, deck_file, [*on, f"run.dir={mpi_tmp_path}/told"])
    monkeypatch.setattr(CsvFile, "write", hang)
    monkeypatch.setenv("FAKE_WRONG", "finish")
    monkeypatch.setattr(module, "SECONDS_TO_END", 0.5)
    began = time.monotonic()
    run_deck(world, deck_file, [*on, f"run.dir={mpi_tmp_path}/broken"])
    assert time.monotonic() - began < 300
    if world.rank > 0:
        return
    ends = [
        contents(mpi_tmp_path / name / "checkpoints" / "step-00000006.h5")
        for name in ("plain", "told", "broken")
    ]
    for each in ends[1:]:
        assert each.keys() == ends[0].keys()
        assert all(np.array_equal(each[name], ends[0][name]) for name in each)
    folder = mpi_tmp_path / "told"
    rows = read_metrics(folder / "metrics.jsonl")
    cells = table(folder / "metrics.csv")
    assert [float(each["loss"]) for each in cells] == [each["loss"] for each in rows]
    assert [each["validation_loss"] for each in cells] == [""] * 5 + [str(rows[-1]["validation_loss"])]
    said = told(fakes)
    assert sum(each[0] == "init" for each in said) == 4  # of both runs
    assert sum(each[0] == "finish" and each[1] == 0 for each in said) == 2
    if has_tensorboard:
        assert [step for step, _ in events(folder)["loss"]] == list(range(1, 7))
    log = (mpi_tmp_path / "broken" / "log.txt").read_text()
    for name in ("csv", "wandb", "trackio"):
        assert (
            log.count(f"report.{name}: no further steps are sent, it did not finish before the run ended")
            == 1
        )


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_resumed_run_goes_on_in_the_same_series(
    world: World, deck_file: Path, mpi_tmp_path: Path, fakes: Path
) -> None:
    folder = mpi_tmp_path / "run"
    on = ["report.csv=true", "report.wandb=offline", "report.trackio=true"]
    has_tensorboard = module._installed("tensorboard")
    on += ["report.tensorboard=true"] * has_tensorboard
    run_deck(world, deck_file, [*on, "run.steps=5", "checkpoint.every=3", f"run.dir={folder}"])
    world.everyone.barrier()
    if world.rank == 0:
        (folder / "checkpoints" / "step-00000005.h5").unlink()
    world.everyone.barrier()
    resume(world, folder, ["run.steps=7"])
    if world.rank > 0:
        return
    assert [each["step"] for each in table(folder / "metrics.csv")] == list("1234567")
    known = json.loads((folder / "dashboards.json").read_text())["id"]
    begun = [each[1] for each in told(fakes) if each[0] == "init"]
    assert [each["id"] for each in begun if "id" in each] == [known] * 2
    assert {each["name"] for each in begun if "id" not in each} == {f"small-{known}"}
    if has_tensorboard:
        assert [step for step, _ in events(folder)["loss"]] == list(range(1, 8))


@pytest.mark.mpi(min_size=1, max_size=1)
def test_steps_that_a_run_makes_anew_replace_the_earlier_ones(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_tensorboard = module._installed("tensorboard")
    deck = make_deck(world, mpi_tmp_path)
    on = ["report.csv=true", *["report.tensorboard=true"] * has_tensorboard]
    Poison(monkeypatch, [AT], loud=True)
    _, rows = train(world, deck, "back", *BACK, *SHORT, *FROM_MEMORY, *on)
    assert [each["step"] for each in rows if "went_back" in each] == [6]
    folder = mpi_tmp_path / "back"
    assert [float(each["loss"]) for each in table(folder / "metrics.csv")] == [each["loss"] for each in rows]
    if has_tensorboard:
        found = events(folder)["loss"]
        assert [step for step, _ in found] == list(range(1, 25))
        assert np.allclose([loss for _, loss in found], [each["loss"] for each in rows], rtol=1e-6, atol=0)


def test_fresh_deletes_what_they_wrote_and_leaves_what_wandb_did(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock_run_folder(folder).close()
    (folder / "tensorboard").mkdir()
    for name in (
        "metrics.csv",
        "metrics.csv.new",
        "dashboards.json",
        "tensorboard/events.out.tfevents.1.n.2.0",
    ):
        (folder / name).touch()
    delete_run(folder)
    assert not folder.exists()
    lock_run_folder(folder).close()
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "mine").touch()
    (folder / "wandb").mkdir()
    delete_run(folder)
    assert sorted(each.name for each in folder.iterdir() if each.name[0] not in ".l") == [
        "tensorboard",
        "wandb",
    ]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_the_real_packages_take_a_run(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not module._installed(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for _ in range(2):
        service = Service(package, FACTS | {"folder": str(tmp_path)})
        for step in (1, 2, 3):
            service.write(row(step), 0.0)
        service.close(completed=True)
    if package == "wandb":
        assert len(list(tmp_path.glob("wandb/offline-run-*/run-0a1b2c3d.wandb"))) == 2
    else:
        assert (tmp_path / "trackio" / "hpctrain.db").exists()
