"""Runs that train adapters alone: from a model's weights, on again on another layout, and from their own.

Reward models train their head beside them. Tests of train/start.py and checkpoint/exchange/source.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import HpctrainError
from hpctrain.parallel.adapter import is_adapter
from hpctrain.parallel.scalar_head import NAME as SCORE
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from tests.engines import LLAMA, by_rank_0, small_deck
from tests.train.test_reward import KEYS, make_trainer
from tests.train.test_run import contents, write_deck

LORA = ("model.adapters.rank=3", "run.steps=4", "checkpoint.every=2", "learning_rate.peak=1e-2")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_heads_of_scores_are_trained_beside_them(world: World) -> None:
    keys = (*LLAMA, *KEYS, "model.adapters.rank=3", "learning_rate.peak=1e-2")

    def steps(where: World, deck: Deck) -> list[tuple[float, float]]:
        trainer = make_trainer(where, deck)
        before = dict(_held(trainer.engine))
        done = [trainer.train_step() for _ in range(3)]
        for name, values in _held(trainer.engine):
            trained = is_adapter(name) or name == SCORE
            assert torch.equal(values, before[name]) != trained, name
        return [(each.loss, each.grad_norm) for each in done]

    right = by_rank_0(world, lambda: steps(world.single_rank_world(), on_one_rank(small_deck(*keys))))
    split = "layout.tensor=2", "layout.sequence_parallel=true"
    for layout in (split, ("layout.zero=3",), ("layout.pipeline=2",)):
        for found, expected in zip(steps(world, small_deck(*keys, *layout)), right, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), layout


def _held(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's own elements of every parameter."""
    for bucket in engine.stage.buckets:
        for segment, values, _ in bucket.owned_segments(bucket.owned_values):
            if values.numel():
                assert isinstance(values, torch.Tensor)
                yield segment.parameter.shard.name, values.clone()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_of_adapters_goes_on_on_any_layout(world: World, mpi_tmp_path: Path, compute: str) -> None:
    deck, folder = write_deck(world, mpi_tmp_path), mpi_tmp_path
    base, form = folder / "base/checkpoints/step-00000001.h5", f"precision.compute={compute}"
    assert run_deck(world, deck, [f"run.dir={folder}/base", "run.steps=1", form]) == 0
    keys = [*LORA, form, f"model.from={base}"]
    assert run_deck(world, deck, [*keys, f"run.dir={folder}/run", "layout.zero=3"]) == 0
    half = folder / "run/checkpoints/step-00000002.h5"
    before, whole = contents(base), contents(folder / "run/checkpoints/step-00000004.h5")
    weights = {name: values for name, values in before.items() if name.startswith("model/")}
    assert all(np.array_equal(whole[name], values) for name, values in weights.items())
    trained = {name.partition("/")[2] for name in whole} - {name.partition("/")[2] for name in weights}
    kinds = {"optimizer/exp_avg", "optimizer/exp_avg_sq"} | ({"master"} if compute == "bf16" else set())
    assert {name.rpartition("/")[::2] for name in whole if not name.startswith("model/")} == {
        (kind, name.rpartition("/")[2]) for name in trained for kind in kinds
    }
    assert resume(world, half, [f"run.dir={folder}/same"]) == 0
    again = contents(folder / "same/checkpoints/step-00000004.h5")
    assert again.keys() == whole.keys()
    assert all(np.array_equal(again[name], values) for name, values in whole.items())
    assert resume(world, half, [f"run.dir={folder}/other", "layout.zero=0", "layout.tensor=2"]) == 0
    rounding = 1e-5 if compute == "fp32" else 2.0**-8
    assert losses(folder / "other") == pytest.approx(losses(folder / "run")[2:], rel=rounding)

    assert run_deck(world, deck, [*keys, f"run.dir={folder}/on", f"model.from={half}", "run.steps=1"]) == 0
    assert losses(folder / "on")[0] != losses(folder / "run")[0]
    for folder_name, how in (("run", "with new adapters"), ("on", "with its adapters")):
        if world.rank == 0:
            assert how in (folder / folder_name / "log.txt").read_text()
    others = {
        "model.adapters.rank=2": "has adapters of rank 3, alpha 16, .*, but this run has adapters of rank 2",
        "model.adapters=": "has adapters of rank 3, .*, but this run has none",
    }
    for other, told in others.items():
        with pytest.raises(HpctrainError, match=told):
            run_deck(world, deck, [*keys, other, f"run.dir={folder}/no", f"model.from={half}"])
    with pytest.raises(HpctrainError, match=r"--set model.adapters.rank=2: .* was trained with"):
        resume(world, half, [f"run.dir={folder}/no", "model.adapters.rank=2"])
