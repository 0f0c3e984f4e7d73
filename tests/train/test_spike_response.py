"""What a run does about spikes: updates left out, and ways back, beside runs that never met them.

Tests of train/spike_response.py, checkpoint/state_snapshots.py and fault_checks/spikes.py in whole runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks.spikes import recorded_spikes
from hpctrain.plan.memory_plan import rollback_copy_bytes
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.compared_run import load_run
from hpctrain.train.replay import replay
from hpctrain.train.run import resume
from hpctrain.train.run_construction import open_run
from tests.train.poisoned import BACK, BATCH, SKIP, Jump, Poison, make_deck, train
from tests.train.test_run import contents

SHORT = (
    "run.steps=24",
    "learning_rate.warmup=2",
    "stability.spike_window=8",
    "stability.spike_factor=30.0",
    "data.validation=0",
)
"""Keys of a run in which step 13 is poisoned, and judged."""
FROM_MEMORY = ("checkpoint.memory_every=5",)
FROM_DISK = ("checkpoint.every=5", "checkpoint.keep=3")
AT = 12 * BATCH


def final(folder: Path) -> dict[str, np.ndarray]:
    return contents(next((folder / "checkpoints").glob("step-00000024.h5")))


def assert_same_end(world: World, folder: Path, name: str, other: str) -> None:
    """Two runs beside the deck have the same losses in their rows, and at the end the same bits."""
    rows = [read_metrics(folder / each / "metrics.jsonl") for each in (name, other)]
    assert [row["step"] for row in rows[0]] == list(range(1, 25)), world.rank
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    ends = [final(folder / each) for each in (name, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(np.array_equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_poisoned_batch_does_no_harm_where_it_is_treated(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = make_deck(world, mpi_tmp_path)
    _, clean = train(world, deck, "clean")
    losses = {}
    for tokens in (True, False):
        with monkeypatch.context() as patch:
            Poison(patch, [60 * BATCH], rank=1 if tokens else None, tokens=tokens)
            _, rows = train(world, deck, f"off-{tokens}")
            losses["off", tokens] = rows[-1]["validation_loss"]
            _, rows = train(world, deck, f"back-{tokens}", *BACK, "checkpoint.memory_every=10")
            losses["rollback", tokens] = rows[-1]["validation_loss"]
            assert [row["step"] for row in rows] == list(range(1, 121))
            if tokens:  # else it is the next step's loss that tells, when the harm is done
                _, rows = train(world, deck, "skip", *SKIP)
                losses["skip", tokens] = rows[-1]["validation_loss"]
                assert [row["step"] for row in rows if "spike" in row] == [61]
    away = {key: loss / clean[-1]["validation_loss"] - 1 for key, loss in losses.items()}
    assert all((share > 0.01) == (key[0] == "off") and share > -0.01 for key, share in away.items()), away


CASES: Mapping[str, tuple[str, ...]] = {
    "data": FROM_MEMORY,
    "disk": FROM_DISK,
    "background": (*FROM_DISK, "checkpoint.mode=background", "checkpoint.every=1", "checkpoint.keep=9"),
    "zero-3": (*FROM_MEMORY, "layout.zero=3", "precision.compute=bf16", "memory.recompute=full"),
    "zero-1": (*FROM_DISK, "layout.zero=1"),
    "pipeline": (*FROM_MEMORY, "layout.pipeline=2", "layout.schedule=zb-h1"),
    "tensor": (*FROM_MEMORY, "layout.tensor=2", "layout.sequence_parallel=true"),
    "replicas": (
        *FROM_MEMORY,
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=3",
        "layout.local_steps.outer=diloco",
    ),
    "fp16": (*FROM_MEMORY, "precision.compute=fp16"),
    "compressed": (*FROM_MEMORY, "communication.compress=topk"),
    "schedule-free": (*FROM_MEMORY, "optimizer.name=schedule-free", "learning_rate.decay=constant"),
    "experts": (*FROM_MEMORY, "model.experts.count=4", "model.experts.balance=bias", "layout.expert=2"),
    "disk offload": (*FROM_MEMORY, "memory.optimizer=disk"),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_the_run_goes_on_from_an_earlier_step_with_later_samples(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    # On one data rank alone: the others see nothing but what all ranks agree on.
    deck, keys = make_deck(world, mpi_tmp_path), (*BACK, *SHORT, *CASES[case])
    back_to = 9 if case == "background" else 5
    with monkeypatch.context() as patch:
        Poison(patch, [AT], rank=0 if case in {"pipeline", "tensor"} else 1, loud=True)
        code, rows = train(world, deck, "went-back", *keys)
    assert code == 0
    told = [row["went_back"] for row in rows if "went_back" in row]
    assert [(each["step"], each["back_to"], each["samples"]) for each in told] == [
        (13, back_to, (13 - back_to) * BATCH)
    ]
    with monkeypatch.context() as patch:
        Jump(patch, [(back_to, 13 * BATCH)])
        train(world, deck, "reference", *keys)
    assert_same_end(world, mpi_tmp_path, "went-back", "reference")
    stored = read_state(mpi_tmp_path / "went-back" / "checkpoints" / "step-00000024.h5", world.everyone)
    assert [(spike.step, spike.back_to) for spike in recorded_spikes(stored)] == [(13, back_to)]


@pytest.mark.mpi(max_size=1)
def test_twice_in_a_row_and_in_the_first_steps(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck, keys = make_deck(world, mpi_tmp_path), (*BACK, *SHORT, "batch.ramp_from=8", "batch.ramp_steps=6")
    # Nothing is 50 steps old: the run begins anew, each time with later samples.
    keys = (*keys, "checkpoint.memory_every=60", "stability.spike_back=50")
    first = 6 * 8 + 6 * BATCH  # of step 13
    second = first + BATCH + first  # of step 13 again, which is the next one that is judged
    with monkeypatch.context() as patch:
        poison = Poison(patch, [first, second], loud=True)
        code, rows = train(world, deck, "went-back", *keys)
    assert code == 0
    assert poison.met == [12, 12]
    told = [row["went_back"] for row in rows if "went_back" in row]
    assert [(each["back_to"], each["first_sample"]) for each in told] == [(0, first + BATCH)]
    with monkeypatch.context() as patch:
        Jump(patch, [(0, second + BATCH)])
        train(world, deck, "reference", *keys)
    assert_same_end(world, mpi_tmp_path, "went-back", "reference")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("where", [FROM_MEMORY, FROM_DISK])
def test_across_a_resume(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]
) -> None:
    """Stopped by the limit of spikes, before the way back of the second one; the third is left to it."""
    deck, keys = make_deck(world, mpi_tmp_path), (*BACK, *SHORT, *where)
    folder = mpi_tmp_path / "went-back"
    with monkeypatch.context() as patch:
        poison = Poison(patch, [AT, 21 * BATCH], loud=True)
        code, rows = train(world, deck, "went-back", *keys, "stability.spike_most=1")
        assert code == 2
        assert rows[-1]["skipped"]
        if world.rank == 0:
            status = json.loads((folder / "status.json").read_text())
            assert "more than stability.spike_most = 1" in status["reason"]
        stopped = rows[-1]["step"]
        assert stopped == 14
        world.everyone.barrier()
        assert resume(world, folder, ["stability.spike_most=3"]) == 0
        assert poison.met == [12, 13]
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 25))
    state = read_state(folder / "checkpoints" / "step-00000024.h5", world.everyone)
    assert [(spike.step, spike.back_to) for spike in recorded_spikes(state)] == [(13, 5), (14, None)]
    assert state["spikes"]["count"] == 2
    assert len(state["history"]) == 3


@pytest.mark.mpi(max_size=1)
def test_without_anything_to_go_back_to_the_update_is_left_out(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = make_deck(world, mpi_tmp_path)
    keys = (*SHORT, "stability.spike_back=20")
    disk = ("checkpoint.every=20", "checkpoint.keep=2")
    with monkeypatch.context() as patch:
        Poison(patch, [AT], loud=True)
        train(world, deck, "skip", "stability.spike=skip", *SHORT)
        train(world, deck, "back", "stability.spike=rollback", *keys, *disk)
    rows = [read_metrics(mpi_tmp_path / name / "metrics.jsonl") for name in ("skip", "back")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert [row["step"] for row in rows[0] if row["skipped"]] == [13]
    assert "no earlier state is left, update skipped" in (mpi_tmp_path / "back" / "log.txt").read_text()


@pytest.mark.mpi(max_size=1)
def test_watching_for_spikes_changes_nothing(world: World, mpi_tmp_path: Path) -> None:
    deck = make_deck(world, mpi_tmp_path)
    train(world, deck, "plain", *[key for key in SHORT if "spike" not in key])
    train(world, deck, "watched", *BACK, *SHORT, *FROM_MEMORY)
    assert_same_end(world, mpi_tmp_path, "watched", "plain")


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("zero", [0, 3])
def test_copies_take_the_memory_that_is_planned(world: World, mpi_tmp_path: Path, zero: int) -> None:
    if zero and world.size == 1:
        pytest.skip("nothing to cut")
    keys = (*BACK, *SHORT, *FROM_MEMORY, f"layout.zero={zero}", "precision.compute=bf16")
    deck = read_deck(make_deck(world, mpi_tmp_path), [*keys, f"run.dir={mpi_tmp_path}/run"], world.size)
    run = open_run(world, deck)
    for _ in range(10):
        run.checkpoints.keep_snapshot(run.trainer.state)
        run.trainer.train_step()
    taken = [values.nbytes for held in run.checkpoints.snapshots.all for values in held._values]
    assert sum(taken) == rollback_copy_bytes(deck, run.trainer.engine.stage)
    run.trainer.engine.close()


@pytest.mark.mpi(max_size=1)
def test_what_a_run_left_behind_is_not_taken_for_its_own(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of step 12, to which it went back, and behind which it went back again."""
    deck, folder = make_deck(world, mpi_tmp_path), mpi_tmp_path / "went-back"
    disk = ("checkpoint.memory_every=4", "checkpoint.every=10", "checkpoint.keep=20")
    with monkeypatch.context() as patch:
        poison = Poison(patch, [16 * BATCH, 20 * BATCH], loud=True)
        train(world, deck, "went-back", *BACK, *SHORT, *disk, "stability.spike_back=5")
    assert poison.met == [16, 15]
    left = folder / "checkpoints" / "step-00000012.h5"
    os.utime(left)  # times do not tell
    run = load_run(world, folder)
    assert sorted(run.stored) == [10, 20, 24]
    assert [run.next_rollback(step) for step in (0, 9, 10)] == [10, 10, None]
    said: list[str] = []
    with pytest.raises(HpctrainError, match="the run returned to step 10 after it had written this"):
        replay(world, left, 3, [], None, said.append)
    assert replay(world, left.with_name("step-00000010.h5"), 3, [], None, said.append) == 0
