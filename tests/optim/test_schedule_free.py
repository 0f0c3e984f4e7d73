"""Compare Schedule-Free AdamW with its authors' formulas in NumPy, resume it, and store it."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.engine.stage_values import load_parameters
from hpctrain.errors import HpctrainError
from hpctrain.optim import optimizer as optimizer_module
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.optim.schedule_free import ITERATE_OFFSET, SQUARE, ScheduleFree
from hpctrain.sharding.state import MASTER
from hpctrain.train.run import resume, run_deck
from tests.engines import DECK, LLAMA, small_deck, trainer
from tests.optim.test_adamw import master, setup
from tests.optim.test_every_optimizer import restored
from tests.train.test_replay import replayed, run_dir, step_file  # noqa: F401
from tests.train.test_run import contents

NAME = "optimizer.name=schedule-free"
KEYS = (NAME, *LLAMA, "optimizer.weight_decay=0.5")
VOCABULARY = 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_updates_are_those_of_the_authors(
    world: World, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form of their AdamWScheduleFree, which keeps y and z: y goes towards z, and with the step;
    x is beyond y as seen from z. Pieces are shorter than tensors.
    """
    monkeypatch.setattr(optimizer_module, "PIECE", 8)
    beta1, beta2, epsilon, decay = 0.8, 0.95, 1e-4, 0.3
    parameters, buckets = setup(world, dtype)
    ours = ResidentOptimizer(ScheduleFree((beta1, beta2), epsilon, decay), buckets)
    y = {name: p.detach().float().numpy().astype(np.float64) for name, p in parameters.items()}
    z = {name: each.copy() for name, each in y.items()}
    squares = {name: np.zeros_like(each) for name, each in y.items()}
    draw = np.random.default_rng(7)
    weights = largest = 0.0
    for step in range(10):
        rate = 0.01 * min(step + 1, 4) * (1.0 if step < 8 else 0.5)
        largest = max(largest, rate)
        weights += largest**2
        share = largest**2 / weights
        unmoved = float(master(ours, parameters["norm.weight"])[0])
        for name, parameter in parameters.items():
            gradient = draw.normal(0, 3.0 ** draw.integers(-4, 4), parameter.shape).astype(np.float32)
            gradient[0] *= name != "norm.weight"
            parameter.gradient.copy_(torch.from_numpy(gradient * 4))
            squares[name] = beta2 * squares[name] + (1 - beta2) * gradient.astype(np.float64) ** 2
            normal = gradient / (np.sqrt(squares[name] / (1 - beta2 ** (step + 1))) + epsilon)
            normal = normal + (decay if gradient.ndim == 2 else 0.0) * y[name]
            y[name] = y[name] + share * (z[name] - y[name]) + rate * (beta1 * (1 - share) - 1) * normal
            z[name] = z[name] - rate * normal
        ours.step(rate, 4.0)
        rounded = 1e-5 if dtype == torch.float32 else 1e-2
        for name, parameter in parameters.items():
            average = y[name] + (1 - 1 / beta1) * (z[name] - y[name])
            np.testing.assert_allclose(
                parameter.detach().float().numpy(), y[name], rtol=rounded, atol=rounded
            )
            np.testing.assert_allclose(master(ours, parameter).numpy(), average, rtol=1e-5, atol=1e-5)
        assert master(ours, parameters["norm.weight"])[0] == unmoved  # never had a gradient
        with ours.evaluation_weights():
            for parameter in parameters.values():
                assert torch.equal(parameter.detach(), master(ours, parameter).to(dtype))
    assert ours.updates == 10
    assert ours.totals["largest_rate"] == largest
    assert ours.totals["weights"] * largest**2 == pytest.approx(weights, rel=1e-12)
    assert all(set(state) == {MASTER, ITERATE_OFFSET, SQUARE} for state in ours.states)


@pytest.mark.parametrize("rates", [(1e-300, 1e-200), (1e3, 1e3), (0.0, 0.0, 0.1)])
def test_weights_of_any_rate_are_finite(rates: tuple[float, ...]) -> None:
    rule = ScheduleFree((0.9, 0.95), 1e-8, 0.0)
    for rate in rates:
        rule.begin(rate)
    assert rule.totals["weights"] == pytest.approx(2.0 if len(set(rates)) == 1 else 1.0)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_checkpoint_has_the_average_and_a_run_resumes_from_it(
    world: World, mpi_tmp_path: Path, compute: str
) -> None:
    """Readers of the model get the weights of an evaluation. Training continues with other weights."""
    keys = (*KEYS, f"precision.compute={compute}", "optimizer.epsilon=1e-3")
    first, second, path = restored(world, mpi_tmp_path, *keys)
    assert not [name for name in contents(path) if name.startswith("master")]
    reader = trainer(world, small_deck(*LLAMA, f"precision.compute={compute}", "layout.zero=3"))
    load_parameters(path, reader.engine.stage, world.everyone)
    shown = first.evaluate(first.step.batches, 8)["loss"]
    assert reader.evaluate(reader.step.batches, 8)["loss"] == shown
    expected = [step.loss for step in first.train(2)]
    assert expected[0] != reader.train_step().loss
    rounded = 1e-5 if compute == "fp32" else 2e-2
    assert [step.loss for step in second.train(2)] == pytest.approx(expected, rel=rounded)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_resumed_and_replayed_runs_equal_the_original(
    world: World,
    run_dir: Path,  # noqa: F811
    mpi_tmp_path: Path,
) -> None:
    """This holds with and without evaluation and background saves."""
    deck, folder = run_dir.parent / "small.toml", mpi_tmp_path / "free"
    keys = [NAME, f"run.dir={folder}", "run.steps=8", "checkpoint.every=4", "optimizer.restart=false"]
    often = ["checkpoint.mode=background", "run.evaluate_every=1", "data.validation=0.2"]
    assert run_deck(world, deck, [*keys, "data.validation=0.2"]) == 0
    whole = contents(step_file(folder, 8))
    assert replayed(world, step_file(folder, 4))[1][-1].endswith("are equal to the recorded, bit for bit.")
    if world.rank == 0:
        step_file(folder, 8).unlink()
    world.everyone.barrier()
    assert resume(world, folder, often) == 0
    again = contents(step_file(folder, 8))
    assert whole.keys() == again.keys()
    assert all(np.array_equal(values, again[name]) for name, values in whole.items())
    with pytest.raises(HpctrainError, match=r'holds the state of "schedule-free" \(optimizer'):
        resume(world, step_file(folder, 4), ["optimizer.name=adamw"])
    with h5py.File(step_file(run_dir, 5)) as file:
        assert json.loads(file["state"][()])["totals"] == {}
    assert resume(world, step_file(run_dir, 5), [NAME, "optimizer.restart=true", "run.steps=12"]) == 0
    with h5py.File(step_file(run_dir, 12)) as file:
        assert json.loads(file["state"][()])["totals"]["weights"] <= 7


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ["learning_rate.decay=linear"],
            r"learning_rate.decay=linear: conflicts with optimizer.name",
        ),
        (
            ["layout.local_steps.replicas=2"],
            r"optimizer.name=schedule-free: conflicts with \[layout.local_steps\]",
        ),
        (
            ["layout.local_steps.outer=diloco"],
            r"optimizer.name=schedule-free: conflicts with \[layout.local_steps\]",
        ),
        (
            ["communication.server.mode=sync"],
            r"optimizer.name=schedule-free: conflicts with \[communication.server\]",
        ),
        (["optimizer.momentum=0.9"], "optimizer.momentum=0.9: has no effect with optimizer.name"),
    ],
)
def test_conflicting_keys_are_refused(keys: list[str], sentence: str) -> None:
    with pytest.raises(HpctrainError, match=sentence) as error:
        parse_deck(DECK, [NAME, *keys])
    assert len(error.value.problems) == 1
    assert parse_deck(DECK, [NAME]).learning_rate.decay == "constant"
