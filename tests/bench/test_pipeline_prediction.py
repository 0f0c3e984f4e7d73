"""The benchmark of pipelines: its prediction, and torch's pipelines beside ours.

Tests of bench/pipeline_prediction.py, bench/training_speed.py, bench/peers/torch_model.py and
bench/peers/torch_pipeline.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.bench.pipeline_prediction import PipelinePrediction, StageProbe, stage_lines, step_time_line
from hpctrain.bench.training_speed import TrainingBenchOptions, bench_train
from hpctrain.comm.world import World
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import simulate
from hpctrain.pipeline.split import layer_ranges
from tests.engines import DECK, LLAMA, small_deck, trainer


@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_torch_has_the_same_model(family: tuple[str, ...]) -> None:
    shape = ModelShape.of(small_deck(*family, "model.layers=5", "model.tied=false"), 61)
    schedule = generate_schedule("1f1b", 4, 4)
    parts = [TorchModel(shape, *layer_ranges(schedule, [0, 2, 3, 0], stage)) for stage in range(4)]
    counted = sum(parameter.numel() for part in parts for parameter in part.parameters())
    assert counted == count(shape).parameters
    x = torch.randint(61, (2, 32))
    for part in parts:
        x = part(x)
    assert x.shape == (2, 32, 61)
    assert isinstance(parts[3].head, nn.Module)


def test_the_prediction_in_words() -> None:
    prediction = PipelinePrediction([1.0, 2.0], [3.0, 4.0], 0.25, 40.0, 10.0, 50.0, 55.0, 1.1)
    assert step_time_line(prediction).startswith("step time: predicted 50.0 ms (40.0 ms of the pipeline")
    assert step_time_line(prediction).endswith("measured 55.0 ms, 1.100 of the prediction")
    assert stage_lines(prediction) == [
        "stage  forward ms  backward ms",
        "0            1.00         3.00",
        "1            2.00         4.00",
    ]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_measuring_stages_changes_nothing(world: World, schedule: str) -> None:
    overrides = (f"layout.pipeline={world.size}", f"layout.schedule={schedule}", "model.layers=8")
    probed, plain = (trainer(world, small_deck(*overrides, "model.dropout=0.1")) for _ in range(2))
    probe = StageProbe(probed.engine, probed.step)
    for _ in range(3):
        first, second = probed.train(1)[0], plain.train(1)[0]
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
        # Stages wait for others in "synchronize", but for the last one to end.
        waited = 0.25 if world.rank == 0 else 0.75
        probe(2.0 + world.rank, {"synchronize": waited, "step": 0.5, "other": 0.125, "forward": 9.0})
    prediction = probe.prediction()
    assert len(set(world.everyone.all_gather_object(str(prediction)))) == 1
    assert prediction.rest == pytest.approx(875.0)
    assert prediction.measured == 1e3 * (1 + world.size)
    assert len(prediction.forward) == len(prediction.backward) == world.size
    assert min(prediction.forward + prediction.backward) > 0
    costs = [simulate(probed.engine.schedule, times).cost for times, _ in probe.rounds]
    assert 1e3 * min(costs) <= prediction.pipeline <= 1e3 * max(costs)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_bench_beside_torch(world: World, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        path.write_text(DECK)
    world.everyone.barrier()
    if world.size != 2:
        pytest.skip("torch's pipeline of two stages needs two ranks")
    wish = TrainingBenchOptions(1, 2, no_sync=True, against=("torch-pipeline",))
    overrides = ["layout.pipeline=2", "model.layers=5", "layout.split=balanced", "model.dropout=0"]
    bench_train(world, path, overrides, wish, output)
    if world.rank != 0:
        return
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["pipeline 2", "no-sync", "torch-pipeline"]
    assert rows["torch-pipeline"]["losses_agree"] is True
    assert rows["torch-pipeline"]["node_bytes"] > rows["torch-pipeline"]["peak_bytes"] > 50e6
    assert all(len(row["tokens_per_s"]) == 2 and min(row["tokens_per_s"]) > 0 for row in rows.values())
    pipeline = rows["pipeline 2"]["pipeline"]
    assert set(pipeline) >= {"forward", "backward", "predicted", "measured", "ratio"}
    assert rows["no-sync"]["pipeline"] is None
    shown = capsys.readouterr().out
    assert f"{pipeline['ratio']:.3f} of the prediction" in shown
    assert "stage" in shown
