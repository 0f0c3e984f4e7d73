"""Lion against its authors' formula in numpy, on ranks and in files, in plans and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.engine.build import make_mesh
from hpctrain.memory.accounts import storage_bytes
from hpctrain.optim import lion
from hpctrain.optim.lion import MEAN, Lion
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.plan.memory import plan_memory
from hpctrain.sharding.state import MASTER
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.verify import verify_layout
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer
from tests.optim.test_adamw import master, setup
from tests.train.server.served import plain, served, served_deck, values
from tests.train.test_run import contents

NAME = "optimizer.name=lion"
KEYS = (NAME, *LLAMA, "learning_rate.peak=1e-3", "optimizer.weight_decay=0.5")
VOCABULARY = 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_updates_are_those_of_the_paper(
    world: World, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 2 of arXiv 2302.06675, with decay of matrices alone; pieces are shorter than tensors."""
    monkeypatch.setattr(lion, "_PIECE", 8)
    parameters, buckets = setup(world, dtype)
    ours = ResidentOptimizer(Lion((0.9, 0.99), 0.3), buckets)
    weights = {name: p.detach().float().numpy().astype(np.float64) for name, p in parameters.items()}
    means = {name: np.zeros_like(each) for name, each in weights.items()}
    draw = np.random.default_rng(7)
    for step in range(10):
        rate = 0.01 * (step + 1)
        for name, parameter in parameters.items():
            gradient = draw.normal(0, 3.0 ** draw.integers(-4, 4), parameter.shape).astype(np.float32)
            gradient[0] *= name != "norm.weight"
            parameter.gradient.copy_(torch.from_numpy(gradient * 4))
            decay = 0.3 if gradient.ndim == 2 else 0.0
            update = np.sign(0.9 * means[name] + 0.1 * gradient)
            weights[name] = weights[name] - rate * (update + decay * weights[name])
            means[name] = 0.99 * means[name] + 0.01 * gradient
        before = float(master(ours, parameters["norm.weight"])[0])
        ours.step(rate, 4.0)
        for name, parameter in parameters.items():
            found = master(ours, parameter)
            np.testing.assert_allclose(found.detach().numpy(), weights[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(parameter.detach(), found.to(dtype))
        assert master(ours, parameters["norm.weight"])[0] == before  # never had a gradient
    assert ours.updates == 10
    assert all(set(state) == {MASTER, MEAN} for state in ours.states)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_cut_or_in_files_the_updates_are_the_same_bits(
    world: World, mpi_tmp_path: Path, compute: str
) -> None:
    keys = (*KEYS, f"precision.compute={compute}")
    plain = trainer(world, small_deck(*keys))
    losses = [step.loss for step in plain.train(3)]
    assert losses[-1] < losses[0]
    disk = ("memory.optimizer=disk", "memory.offload_buffer=12000", f"memory.offload_dir={mpi_tmp_path}")
    for more in (("layout.zero=1",), disk, ("layout.zero=1", *disk)):
        other = trainer(world, small_deck(*keys, *more))
        assert [step.loss for step in other.train(3)] == losses, more
        expected = plain.parameters()
        assert all(torch.equal(values, expected[name]) for name, values in other.parameters().items()), more
        other.engine.close()
        world.everyone.barrier()


def held(training: Trainer) -> int:
    """Bytes of state beside parameters."""
    states = training.engine.optimizer.states
    masters = [state[MASTER] for state in states] if training.deck.precision.compute != "fp32" else []
    return storage_bytes([*masters, *(state[MEAN] for state in states)])


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_train_as_one_and_hold_what_is_planned(world: World, zero: int) -> None:
    """An element whose mean is nothing but rounding goes the other way now and then: a few of thousands."""
    deck = small_deck(*KEYS, f"layout.zero={zero}")
    training, alone = trainer(world, deck), reference(world, deck)
    losses = [step.loss for step in alone.train(4)]
    assert [step.loss for step in training.train(4)] == pytest.approx(losses, rel=1e-5)
    expected = alone.parameters()
    apart = sum(
        int(((values - expected[name]).abs() > 1e-5).sum()) for name, values in training.parameters().items()
    )
    assert apart <= 1e-3 * sum(values.numel() for values in expected.values())
    assert plan_memory(deck, world.size, VOCABULARY).largest.memory.optimizer == held(training)
    half = small_deck(*KEYS, f"layout.zero={zero}", "precision.compute=bf16")
    assert plan_memory(half, world.size, VOCABULARY).largest.memory.optimizer == held(trainer(world, half))


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_on_another_layout(world: World, mpi_tmp_path: Path) -> None:
    """Weights and means are the same bits there, and the next losses those of the layout that it left."""
    layouts = ("layout.zero=3", "layout.tensor=2") if world.size > 1 else ("layout.zero=0", "run.seed=5")
    paths = []
    decks = [small_deck(*KEYS, each, f"run.dir={mpi_tmp_path / each}") for each in layouts]
    first, second = (trainer(world, deck) for deck in decks)
    first.train(3)
    for deck, training in zip(decks, (first, second), strict=True):
        checkpoints = Checkpoints(deck, training.engine, {})
        if paths:
            training.state = checkpoints.restore(paths[0])
        checkpoints.save(training.state)
        assert checkpoints.newest is not None
        paths.append(checkpoints.newest)
    before, after = map(contents, paths)
    assert before.keys() == after.keys() and any(name.startswith("optimizer/exp_avg/") for name in before)
    assert all(values.tobytes() == after[name].tobytes() for name, values in before.items())
    expected = [step.loss for step in first.train(2)]
    assert [step.loss for step in second.train(2)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_layout_is_verified(world: World) -> None:
    """Where rounding alone would make steps of its own."""
    deck = small_deck(NAME, "layout.tensor=2")
    assert verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_server_updates_as_a_run_without_any(world: World) -> None:
    deck = served_deck("sync", 1, *KEYS)
    training, alone = served(world, deck), reference(world, plain(deck))
    for _ in range(3):
        assert training.train_step().loss == pytest.approx(alone.train_step().loss, rel=1e-5)
    found, expected = values(training), alone.parameters()
    assert found.keys() == expected.keys()
    apart = sum(int(((each - expected[name]).abs() > 1e-5).sum()) for name, each in found.items())
    assert apart <= 1e-3 * sum(each.numel() for each in expected.values())


@pytest.mark.mpi(min_size=2, max_size=2)
def test_replicas_have_means_of_their_own_and_meet(world: World) -> None:
    deck = small_deck(*KEYS, "layout.replicas=2", "communication.local_steps=2")
    training = trainer(world, deck)
    training.train(2)
    for states in training.engine.optimizer.states:
        means, weights = (world.everyone.all_gather(states[name][None]) for name in (MEAN, MASTER))
        assert not torch.equal(means[0], means[1]) and torch.equal(weights[0], weights[1])
