"""Losses that come out again, and those that do not; what a checkpoint tells of the runs before it.

Tests of train/replay.py and train/recorded_losses.py.
"""

from __future__ import annotations

import hashlib
import json
from math import nan
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.provenance import HistorySegment, RecordedLoss, history, losses
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import replay as module
from hpctrain.train.replay import difference, judge, replay
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare
from tests.train.test_run import DECK


@pytest.fixture
def run_dir(world: World, mpi_tmp_path: Path) -> Path:
    """The folder of a run of ten steps on all ranks, of which five a checkpoint."""
    deck = mpi_tmp_path / "small.toml"
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        deck.write_text(DECK.format(tokens=mpi_tmp_path / "tokens.h5"))
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")])
    folder = mpi_tmp_path / "run"
    assert run_deck(world, deck, [f"run.dir={folder}", "run.steps=10", "checkpoint.every=5"]) == 0
    return folder


def replayed(world: World, path: Path, *overrides: str, **wish: Any) -> tuple[int, list[str]]:
    """Exit code, on all ranks, and the lines that rank 0 shows; at each the run's folder is as it was."""
    shown: list[str] = []
    before = sorted(path.parent.parent.rglob("*"))

    def show(line: str) -> None:
        assert sorted(path.parent.parent.rglob("*")) == before
        shown.append(line)

    code = replay(world, path, wish.get("steps"), overrides, wish.get("against"), show)
    assert bool(shown) == (world.rank == 0)
    codes, lines = zip(*world.everyone.all_gather_object((code, shown)), strict=True)
    assert len(set(codes)) == 1
    return code, lines[0]


def files(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def step_file(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}.h5"


@pytest.mark.mpi(min_size=1, max_size=2)
def test_recorded_losses_come_out_again(world: World, run_dir: Path) -> None:
    path, before = step_file(run_dir, 5), files(run_dir)
    rows = read_metrics(run_dir / "metrics.jsonl")
    code, lines = replayed(world, path)
    assert (code, lines[-1]) == (0, "The 5 replayed losses are equal to the recorded, bit for bit.")
    assert [line.split() for line in lines[2:-1]] == [
        [str(row["step"]), f"{row['loss']:.10f}", f"{row['loss']:.10f}", "equal"] for row in rows[5:]
    ]
    assert lines[0].endswith(f"recorded losses from {run_dir / 'metrics.jsonl'}")
    # State that waits in files waits elsewhere.
    code, lines = replayed(world, path, "memory.optimizer=disk", steps=2)
    assert (code, lines[-1]) == (0, "The 2 replayed losses are equal to the recorded, bit for bit.")
    assert files(run_dir) == before
    code, lines = replayed(world, path, "learning_rate.peak=2e-2")
    assert code == 1
    assert "differ from the recorded: step 7 is the first to differ" in lines[-1]
    assert replayed(world, path, against=step_file(run_dir, 10), steps=1)[0] == 0
    if world.rank == 0:
        (run_dir / "metrics.jsonl").unlink()
    world.everyone.barrier()
    code, lines = replayed(world, path)
    assert (code, lines[-1]) == (0, "The 5 replayed losses are equal to the recorded, bit for bit.")
    assert "the later checkpoints of" in lines[0]


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_run_folder_is_replayed_from_its_newest_checkpoint_before_losses(
    world: World, run_dir: Path
) -> None:
    for folder in (run_dir, run_dir / "checkpoints"):
        shown: list[str] = []
        assert replay(world, folder, 2, (), None, shown.append) == 0
        assert shown[0].startswith("replays small from step 5,") and len(shown) == 5
    step_file(run_dir, 10).write_bytes(b"damaged")
    assert replay(world, run_dir, None, (), None, shown.append) == 0


@pytest.mark.mpi(max_size=1)
def test_the_steps_that_a_longer_run_added_come_out_again(world: World, run_dir: Path) -> None:
    folder = run_dir.parent / "longer"
    keys = ["run.steps=4", "learning_rate.decay_steps=", "learning_rate.warmup=0"]
    assert run_deck(world, run_dir.parent / "small.toml", [f"run.dir={folder}", *keys]) == 0
    assert resume(world, folder, ["run.steps=8"]) == 0
    code, lines = replayed(world, step_file(folder, 4))
    assert (code, lines[-1]) == (0, "The 4 replayed losses are equal to the recorded, bit for bit.")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_one_wrong_bit_is_seen_where_none_may_be(world: World, run_dir: Path) -> None:
    other = run_dir.parent / "other.jsonl"
    if world.rank == 0:
        rows = read_metrics(run_dir / "metrics.jsonl")
        rows[7]["loss"] *= 1 + 2**-50
        other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.everyone.barrier()
    code, lines = replayed(world, step_file(run_dir, 5), against=other)
    assert code == 1
    assert "only up to rounding (step 8 is the first to differ" in lines[-1]
    assert replayed(world, step_file(run_dir, 5), against=other, steps=2)[0] == 0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_another_layout_gives_the_losses_to_rounding(
    world: World, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With half the data ranks, within the ramp of the batch.
    code, lines = replayed(world, step_file(run_dir, 5), "layout.tensor=2")
    assert code == 0
    assert "to rounding" in lines[-1]
    # The run itself goes on in another layout, which its later checkpoint tells.
    resume(world, run_dir, ["run.steps=15", "layout.tensor=2"])
    code, lines = replayed(world, step_file(run_dir, 10))
    assert code == 0
    assert "to rounding" in lines[-1]
    assert "another layout" in lines[-1]
    judged: list[list[str]] = []
    monkeypatch.setattr(module, "judge", lambda *known: judged.append(known[2]) or judge(*known))
    code, lines = replayed(world, step_file(run_dir, 10), "layout.tensor=2", steps=3)
    assert code == 0
    assert "bit for bit" in lines[-1]
    assert judged == [[]]  # nothing there lets bits differ, though the checkpoint is of the layout before


@pytest.mark.mpi(max_size=1)
def test_products_of_later_runs_are_told(
    world: World, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That the run went on by another kernel its later checkpoint tells, and older ones could not.
    resume(world, run_dir, ["run.steps=12", "machine.products=onednn", "checkpoint.keep=3"])
    judged: list[list[str]] = []
    monkeypatch.setattr(module, "judge", lambda *known: judged.append(known[2]) or judge(*known))
    assert replayed(world, step_file(run_dir, 5), steps=7)[0] == 0
    assert replayed(world, step_file(run_dir, 5), steps=5)[0] == 0
    assert replayed(world, step_file(run_dir, 10))[0] == 0
    kept = HistorySegment.of
    monkeypatch.setattr(HistorySegment, "of", lambda row: kept(row | {"computed": {}}))
    replayed(world, step_file(run_dir, 5), steps=7)  # Whether both kernels give the same bits is chance.
    says = "products that something else compute"
    assert judged == [[f"{says}d from step 11 on"], [], [f"{says}s"], []]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_checkpoint_tells_the_runs_before_it(world: World, run_dir: Path) -> None:
    resume(world, run_dir, ["run.steps=12", "run.title=later"])
    state = read_state(step_file(run_dir, 12))
    first, second = history(state)
    assert (first.title, first.first_step, first.last_step, first.went_on_from) == ("small", 1, 10, None)
    assert (second.title, second.first_step, second.last_step) == ("later", 11, 12)
    assert second.went_on_from == str(step_file(run_dir, 10))
    assert first.ranks == second.ranks == first.layout["data"] == world.size
    assert first.versions == second.versions == state["versions"]
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert losses(state) == [RecordedLoss(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_cannot_be_replayed_is_one_sentence(world: World, run_dir: Path) -> None:
    path = step_file(run_dir, 5)
    text = run_dir / "deck.toml"
    for target, overrides, wish, kind, sentence in (
        (step_file(run_dir, 10), (), {}, HpctrainError, "no loss beyond its step 10 is recorded in"),
        (path, (), {"steps": 6}, HpctrainError, "--steps 6: only 5 beyond step 5 are recorded in"),
        (path, ("run.seed=1",), {}, HpctrainError, "--set run.seed=1: changes which samples"),
        (path, ("batch.global_size=16",), {}, HpctrainError, "changes which samples a step takes"),
        (path, (), {"against": path}, HpctrainError, "no loss beyond its step 5"),
        (path, (), {"against": run_dir / "no.jsonl"}, InputOutputError, "no.jsonl: cannot be read"),
        (text, (), {}, HpctrainError, "not an HDF5 file"),
        (
            run_dir,
            (),
            {"steps": 6},
            HpctrainError,
            "no checkpoint has 6 losses recorded after it (5 are recorded",
        ),
        (run_dir.parent, (), {}, InputOutputError, "has no checkpoint (files such as"),
    ):
        with pytest.raises(kind) as caught:
            replayed(world, target, *overrides, **wish)
        assert len(caught.value.problems) == 1
        assert sentence in caught.value.problems[0]
        assert caught.value.exit_code == (3 if kind is InputOutputError else 2)
    with pytest.raises(HpctrainError, match=r"^step-00000005\.h5, its deck:\d+: batch.global_size = 8"):
        resume(world, path, ["batch.micro_size=3"])


def test_verdicts() -> None:
    def verdict(recorded: list[float | None], found: list[float], *why: str, precision: str = "fp32") -> int:
        rows = [(RecordedLoss(1, loss, None), value) for loss, value in zip(recorded, found, strict=True)]
        return judge(rows, precision, why)[0]

    assert verdict([2.0, None], [2.0, nan]) == 0
    assert verdict([2.0, None], [2.0, 3.0], "x") == 1
    assert verdict([2.0, 3.0], [2.0, nan], "x") == 1
    assert verdict([2.0], [2.0001]) == 1
    assert verdict([2.0], [2.0001], "x") == 0
    assert verdict([2.0], [2.001], "x") == 1
    assert verdict([2.0], [2.001], "x", precision="bf16") == 0
    assert verdict([2.0], [2.1], "x", precision="bf16") == 1
    assert difference(0.0, 1.0) == float("inf")
    assert difference(2.0, 1.0) == 0.5
    assert (
        judge([(RecordedLoss(1, 2.0, None), 2.0)], "fp32", [])[1]
        == "The replayed loss is equal to the recorded, bit for bit."
    )
