"""Checkpoints of mixtures hold whole tensors, and every layout of experts goes on from any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.train.test_any_layout import tensors

KEYS = (
    *LLAMA,
    "model.experts.count=4",
    "model.experts.mlp=24",
    "model.experts.shared=1",
    "model.experts.balance=bias",
    "model.experts.balance_loss=0.01",
    "model.experts.balance_over=step",
    "model.experts.balance_rate=0.01",
    "learning_rate.warmup=0",
    "learning_rate.peak=2e-3",
    "learning_rate.decay=constant",
)
STEPS, MORE = 20, 5
TOLERANCE = 5e-6  # of losses; rounding explains so much

# The first one trains, the others go on.
LAYOUTS = {
    2: (
        "layout.expert=2",
        "layout.expert=1 layout.zero=2",
        "layout.expert=2 layout.zero=3",
        "layout.tensor=2 layout.expert_tensor=2 layout.zero=1",
        "layout.tensor=2 layout.expert=2 layout.sequence_parallel=true",
        "layout.pipeline=2",
    ),
    4: (
        "layout.expert=4",
        "layout.expert=2 layout.expert_tensor=2 layout.zero=1",
        "layout.tensor=2 layout.expert=2 layout.zero=3",
        "layout.pipeline=2 layout.expert=2 layout.zero=1",
        "layout.context=2 layout.expert=4",
    ),
}


def begun(world: World, folder: Path, layout: str) -> tuple[Trainer, Checkpoints]:
    """A run of a layout at its start, and what writes its checkpoints."""
    deck = small_deck(*KEYS, *layout.split(), f"run.dir={folder}")
    training = trainer(world, deck)
    return training, Checkpoints(deck, training.engine, {})


def saved(training: Trainer, checkpoints: Checkpoints, folder: Path) -> Path:
    """The checkpoint of a run as it is."""
    checkpoints.save(training.state)
    checkpoints.finish()
    return folder / f"checkpoints/step-{training.state.step:08}.h5"


@pytest.mark.mpi(min_size=2, max_size=4)
def test_runs_go_on_as_undisturbed_on_other_layouts_of_experts(world: World, mpi_tmp_path: Path) -> None:
    first, *others = LAYOUTS[world.size]
    training, checkpoints = begun(world, mpi_tmp_path, first)
    training.train(STEPS)
    path = saved(training, checkpoints, mpi_tmp_path)
    expected = [step.loss for step in training.train(MORE)]
    for number, layout in enumerate(others):
        resumed, beside = begun(world, mpi_tmp_path / str(number), layout)
        resumed.state = beside.restore(path)
        assert resumed.state.step == STEPS
        losses = [step.loss for step in resumed.train(MORE)]
        assert losses == pytest.approx(expected, rel=TOLERANCE), layout


@pytest.mark.mpi(min_size=2, max_size=2)
def test_checkpoints_hold_whole_tensors_whatever_the_layout(world: World, mpi_tmp_path: Path) -> None:
    source, written = mpi_tmp_path / "first", []
    training, checkpoints = begun(world, source, "layout.expert=2 layout.zero=3")
    training.train(2)
    path = saved(training, checkpoints, source)
    for number, layout in enumerate(LAYOUTS[2]):
        folder = mpi_tmp_path / str(number)
        other, beside = begun(world, folder, layout)
        other.state = beside.restore(path)
        written.append(saved(other, beside, folder))
    world.everyone.barrier()
    if world.rank == 0:
        expected = tensors(path)
        shapes = {name: values.shape for name, values in expected.items() if "feed_forward" in name}
        gate_up = [shape for name, shape in shapes.items() if "experts.gate_up" in name]
        down = [shape for name, shape in shapes.items() if "experts.down" in name]
        assert set(gate_up) == {(4, 2, 24, 32)}
        assert set(down) == {(4, 32, 24)}
        assert len(gate_up) == len(down) == 2 * 3  # of two blocks: weights and both moments
        biases = [values for name, values in expected.items() if "router/bias" in name]
        assert [values.shape for values in biases] == [(4,), (4,)]
        assert all((values != 0).any() for values in biases)
        for layout, other_path in zip(LAYOUTS[2], written, strict=True):
            found = tensors(other_path)
            assert found.keys() == expected.keys(), layout
            for name, values in expected.items():
                assert values.tobytes() == found[name].tobytes(), (layout, name)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_differs_between_resumed_runs_is_rounding_alone(world: World, mpi_tmp_path: Path) -> None:
    """One expert of what was read is lost: the losses that go on are others."""
    training, checkpoints = begun(world, mpi_tmp_path, "layout.expert=2")
    training.train(2)
    path = saved(training, checkpoints, mpi_tmp_path)
    expected = training.train(1)[0].loss
    resumed, beside = begun(world, mpi_tmp_path / "resumed", "layout.tensor=2 layout.expert=2")
    resumed.state = beside.restore(path)
    for name, values in resumed.parameters().items():
        if name == "blocks.0.feed_forward.experts.down.weight" and world.rank == 0:
            with torch.no_grad():
                values[0].zero_()
    assert resumed.train(1)[0].loss != pytest.approx(expected, rel=TOLERANCE)


ANEW = "part of its router/{} does not fit this run and is initialized"
BALANCES = {
    "model.experts.balance_loss=0 model.experts.balance_over=micro_batch": (["bias"], []),
    "model.experts.balance=loss model.experts.balance_rate=0.001": (
        ["shares"],
        ["its router/bias is dropped: "],
    ),
    "model.experts.balance=none model.experts.balance_loss=0 "
    "model.experts.balance_rate=0.001 model.experts.balance_over=micro_batch": (
        [],
        ["its router/bias is dropped: "],
    ),
}


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("keys", BALANCES)
def test_runs_go_on_with_another_balance_and_back(world: World, mpi_tmp_path: Path, keys: str) -> None:
    """What routers remember goes on where it is still asked for, and is told of where it is not."""
    kinds, told = BALANCES[keys]
    training, checkpoints = begun(world, mpi_tmp_path / "first", "")
    training.train(3)
    path = saved(training, checkpoints, mpi_tmp_path / "first")
    before = remembered(training)
    other, beside = begun(world, mpi_tmp_path / "other", keys)
    other.state = beside.restore(path)
    assert [any(each in sentence for each in told) for sentence in beside.notes] == [True] * len(told)
    found = remembered(other)
    assert {kind for kind, _ in found} == {f"router/{kind}" for kind in kinds}
    assert all(torch.equal(values, before[key]) and bool(values.any()) for key, values in found.items())
    other.train(1)
    path = saved(other, beside, mpi_tmp_path / "other")
    back, beside = begun(world, mpi_tmp_path / "back", "")
    back.state = beside.restore(path)
    missing = sorted({"bias", "shares"} - {*kinds})
    assert [sentence.removeprefix(f"{path}: ") for sentence in beside.notes] == list(
        map(ANEW.format, missing)
    )
    after = remembered(back)
    expected = remembered(other)
    assert len(after) == 4
    for key, values in after.items():
        assert torch.equal(values, expected.get(key, torch.zeros(4))), key
    back.train(1)


def remembered(training: Trainer) -> dict[tuple[str, str], torch.Tensor]:
    """What routers keep, by kind and name."""
    return {
        (tensor.kind, tensor.shard.name): tensor.values.clone()
        for tensor in training.engine.state()
        if tensor.kind.startswith("router/") and isinstance(tensor.values, torch.Tensor)
    }
