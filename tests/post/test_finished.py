"""Checkpoints of a policy, which hold its critic, too, and settings that leave their bits unchanged.

Tests of checkpoint/checkpoint_index.py (`auxiliary_model`), train/replay.py and cli/replay.py with runs of
policies.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.bench.training_speed import TrainingBenchOptions, bench_train
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.exchange.convert import export_model
from hpctrain.checkpoint.tensor_differences import compare as compare_tensors
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.generate.generation_model import load
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.post.task import evaluate_task
from hpctrain.report.contents import contents
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import corruption
from hpctrain.train.evaluate import EvaluationData, evaluate
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from hpctrain.train.run_comparison import compare
from tests.data.preparing import prepare
from tests.plan.policies import prepare_copying

LONG = ("run.steps=4", "checkpoint.every=2", "run.evaluate_every=4")
CLOCKS = ("seconds", "tokens_per_s", "mfu", "bytes", "time")


@pytest.fixture
def run(world: World, mpi_tmp_path: Path) -> Path:
    """A finished one of four steps, two of each rollout."""
    prepare_copying(world, mpi_tmp_path)
    assert run_deck(world, mpi_tmp_path / "deck.toml", LONG, trainer_factory=make_trainer) == 0
    return mpi_tmp_path / "run"


def told(world: World, verb: Any, *all_: Any) -> dict[str, Any]:
    """What a verb shows as JSON, on all ranks."""
    shown: list[str] = []
    verb(world, *all_, (), True, shown.append, lambda _: None)
    found: dict[str, Any] = json.loads(world.everyone.broadcast_object("".join(shown)))
    return found


@pytest.mark.mpi(max_size=2)
def test_losses_come_out_again_and_nothing_is_written(
    world: World, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(run.parent / "elsewhere"))
    before = sorted(path.name for path in run.iterdir())
    samples = (run / "samples.jsonl").read_bytes()
    lines: list[str] = []
    path = run / "checkpoints" / "step-00000002.h5"
    assert replay(world, path, None, (), None, lines.append, make_trainer) == 0
    if world.rank == 0:
        assert lines[-1] == "The 2 replayed losses are equal to the recorded, bit for bit."
    assert sorted(path.name for path in run.iterdir()) == before
    assert (run / "samples.jsonl").read_bytes() == samples
    assert not list(run.parent.glob("elsewhere/*"))


@pytest.mark.mpi(max_size=2)
def test_the_model_is_read_without_its_critic(world: World, run: Path) -> None:
    """By tasks, on text, to generate, for others, and as the beginning of a run of text."""
    folder, path = run.parent, run / "checkpoints" / "step-00000004.h5"
    structure = examine(path, world.everyone)
    own = {
        name
        for name in structure.datasets
        if name.startswith("/model/") and not structure.auxiliary_model(name)
    }
    others = {name for name in structure.datasets if structure.auxiliary_model(name) == "critic"}
    assert {name.replace("critic.", "") for name in others if name.startswith("/model/")} - own == {
        "/model/score.weight"
    }
    text = folder / "text.txt"
    if world.rank == 0:
        text.write_text("abc>abc" * 50, encoding="utf-8")
        (folder / "task.jsonl").write_text('{"prompt": "abc>", "answer": "abc"}\n', encoding="utf-8")
        prepare(world.single_rank_world(), folder / "text.h5", [str(text)])
    world.everyone.barrier()
    [task] = told(world, evaluate_task, path, [folder / "task.jsonl"])["tasks"]
    assert task["rows"] == 1
    [figures] = told(world, evaluate, path, EvaluationData([folder / "text.h5"]))["evaluations"]
    assert figures["loss"] == pytest.approx(5.5, abs=0.3)
    export_model(world, path, folder / "exported", None, 1 << 30)
    start = ("objective.kind=next-token", "objective.beta=", f"data.tokens={folder}/text.h5")
    start += ("policy.reward=", "policy.tokens=", "policy.epochs=", f"run.dir={folder}/text")
    for source in (path, folder / "exported"):
        keys = (*start, f"model.from={source}", "run.steps=1", f"run.dir={folder}/{source.name}")
        assert run_deck(world, folder / "deck.toml", keys) == 0
    losses = [read_metrics(folder / name / "metrics.jsonl")[0]["loss"] for name in (path.name, "exported")]
    assert losses[0] == losses[1] == pytest.approx(figures["loss"], abs=0.3)
    if world.size == 1:
        model = load(path)
        assert torch.isfinite(model.logits([97, 98])).all() and model.generate("abc>", tokens=2, seed=1)
        assert contents(structure)["parameters"] == sum(structure.datasets[name].elements for name in own)


@pytest.mark.mpi(max_size=1)
def test_what_is_not_for_policies_says_so(world: World, run: Path) -> None:
    deck = run.parent / "deck.toml"
    assert run_deck(world, deck, ["run.steps=2", f"run.dir={run}2"], trainer_factory=make_trainer) == 0
    with pytest.raises(HpctrainError, match=r"objective.kind = .*ppo.*`--no-replay`"):
        compare(world, (run, Path(f"{run}2")), None, True, lambda _: None)
    assert compare(world, (run, run.parent / "run2"), None, False, lambda _: None) == 0
    with pytest.raises(HpctrainError, match="is unsupported in bench train"):
        bench_train(world, deck, (), TrainingBenchOptions(1, 1), None)
    with pytest.raises(HpctrainError, match=r"memory\.optimizer=host: requires GPUs"):
        run_deck(world, deck, ["memory.optimizer=host", f"run.dir={run}3"], trainer_factory=make_trainer)


KEPT: dict[str, tuple[str, ...]] = {
    "watched": (
        "checkpoint.mode=background",
        "stability.corruption=full",
        "stability.corruption_every=1",
        "run.trace=true",
    ),
    "recomputed": ("memory.recompute=full", "memory.optimizer=disk"),
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("name", KEPT)
def test_what_changes_no_bit(world: World, run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of figures, or of the policy or its critic in a checkpoint; and a run goes on from it with the same."""
    monkeypatch.setattr(
        corruption, "COMPARISONS_PER_REPETITION", 1
    )  # also in the first step of a run that goes on
    other = run.parent / name
    keys = (*KEPT[name], f"run.dir={other}")
    assert run_deck(world, run.parent / "deck.toml", (*LONG, *keys), trainer_factory=make_trainer) == 0
    assert figures_of(other) == figures_of(run)
    for step in (2, 4):
        one, two = (
            examine(folder / "checkpoints" / f"step-0000000{step}.h5", world.everyone)
            for folder in (run, other)
        )
        assert one.datasets.keys() == two.datasets.keys()
        assert differing(one, two, world) == []
    again = run.parent / "again"
    source = other / "checkpoints" / "step-00000002.h5"
    assert resume(world, source, [f"run.dir={again}"], trainer_factory=make_trainer) == 0
    assert figures_of(again) == [row for row in figures_of(run) if row["step"] > 2]


def figures_of(folder: Path) -> list[dict[str, Any]]:
    """All that a run tells of its steps but what clocks and the system do."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not any(each in k for each in CLOCKS)} for row in rows]


def differing(one: CheckpointIndex, two: CheckpointIndex, world: World) -> list[str]:
    """Names of tensors that are not equal, bit for bit."""
    return [each.dataset for each in compare_tensors(one, two, world.everyone) if each.differing]
