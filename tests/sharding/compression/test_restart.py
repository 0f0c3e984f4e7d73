"""Resume runs with compressed sums, on the same layout bit by bit, on others with equal residuals.

Tests of sharding/compression/methods.py and costs/reduction_bytes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.costs.reduction_bytes import synchronizer_bytes
from hpctrain.deck.sections.communication import Communication
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.memory.scratch import fill_pieces, read_pieces
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import accumulation
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, Trainer, small_deck, trainer

LIKE_SIGN = {"bf16", "int8"}
KNOWN = get_args(Communication.model_fields["compress"].annotation)
NAMES = [each for each in KNOWN if each not in {"none", *LIKE_SIGN}]
NEEDED = {"onebit": ("communication.warmup=1", "optimizer.clip=0")}
FORMS = {name: (f"communication.compress={name}", *NEEDED.get(name, ())) for name in NAMES}
"""Keys of all methods that differ, with those that they require."""

SGD = ("optimizer.name=sgd", "optimizer.sgd.momentum=0.9")
RESIDUAL = "reducer/residual"
BETWEEN = ("communication.compress=powersgd", "communication.powersgd.between=nodes")
LAYOUTS: dict[str, tuple[str, ...]] = {
    **FORMS,
    "slices": ("communication.compress=powersgd", "layout.zero=1", "precision.compute=bf16"),
    "between": (*BETWEEN, "layout.zero=1"),
    "replicas": (*FORMS["powersgd"], "layout.local_steps.replicas=2", "layout.local_steps.steps=2"),
}


def made(world: World, folder: Path, *keys: str) -> tuple[Trainer, Checkpoints]:
    deck = small_deck("batch.global_size=16", "run.steps=6", f"run.dir={folder}", *keys)
    training = trainer(world, deck)
    checkpoints = Checkpoints(deck, training.engine, {})
    training.hooks.append(checkpoints)
    return training, checkpoints


def contents(training: Trainer) -> dict[tuple[str, str, tuple[int, ...]], Tensor]:
    """Return this rank's state by kind, name and place."""
    return {
        (tensor.kind, tensor.shard.name, tuple(tensor.shard.start)): torch.cat(
            [piece.clone() for _, piece in read_pieces(tensor.values)]
        )
        for tensor in training.engine.state()
        if tensor.values.numel()
    }


def saved(training: Trainer, checkpoints: Checkpoints) -> Path:
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    return checkpoints.newest


def residuals(path: Path) -> dict[str, np.ndarray]:
    """Return the sum of all ranks' residuals by parameter."""
    found: dict[str, np.ndarray] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and name.startswith(f"{RESIDUAL}/"):
            found[name] = item[()].sum(0, dtype=np.float32)

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def two_nodes(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    half = max(1, world.size // 2)
    monkeypatch.setattr(Mesh, "nodes", lambda _, group: [rank // half for rank in group.ranks])


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_resumes_bit_by_bit(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    if (world.size > 2) != (layout in {"between", "replicas"}):
        pytest.skip("proven on two ranks; nodes and replicas on four")
    two_nodes(monkeypatch, world)
    training, checkpoints = made(world, mpi_tmp_path / "a", *LAYOUTS[layout])
    training.train(2)
    before, path = contents(training), saved(training, checkpoints)
    losses = [step.loss for step in training.train(3)]
    again, checkpoints = made(world, mpi_tmp_path / "b", *LAYOUTS[layout])
    for tensor in again.engine.state():
        for _, piece in fill_pieces(tensor.values):
            piece.fill_(7.0)
    again.state = checkpoints.restore(path)
    after = contents(again)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert world.rank or any(kind == RESIDUAL for kind, *_ in before)
    assert [step.loss for step in again.train(3)] == losses


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("form", [*FORMS, "between"])
def test_another_number_of_ranks_has_the_same_residuals(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Change from four data ranks to two and back, and from two nodes to one rank per node."""
    keys = {**FORMS, "between": BETWEEN}[form]
    two_nodes(monkeypatch, world)
    training, checkpoints = made(world, mpi_tmp_path / "four", *keys)
    training.train(2)
    first = saved(training, checkpoints)
    owed = residuals(first)
    two = World(world.communicator.Split(world.rank % 2, world.rank))
    two_nodes(monkeypatch, two)
    fewer, checkpoints = made(two, mpi_tmp_path / f"two{world.rank % 2}", *keys)
    fewer.state = checkpoints.restore(first)
    second = saved(fewer, checkpoints)
    found = residuals(second)
    assert found.keys() == owed.keys()
    assert all(np.allclose(found[name], owed[name], rtol=1e-5, atol=1e-7) for name in owed)
    assert any(values.any() for values in owed.values())
    assert fewer.train_step().loss > 0
    second = world.everyone.broadcast_object(str(second))
    two_nodes(monkeypatch, world)
    back, checkpoints = made(world, mpi_tmp_path / "back", *keys)
    back.state = checkpoints.restore(Path(second))
    found = residuals(saved(back, checkpoints))
    assert all(np.allclose(found[name], owed[name], rtol=1e-5, atol=1e-7) for name in owed)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("form", ["sign", "int8"])
def test_another_stage_of_zero_has_the_same_residuals(world: World, mpi_tmp_path: Path, form: str) -> None:
    """Keep also the residuals of owners, which do not exist with ZeRO."""
    keys = f"communication.compress={form}"
    training, checkpoints = made(world, mpi_tmp_path / "whole", keys)
    training.train(2)
    path = saved(training, checkpoints)
    owed = residuals(path)
    with h5py.File(path) as file:
        assert any(file[name][world.size].any() for name in owed)
    for folder, zero in (("cut", 1), ("whole again", 0)):
        training, checkpoints = made(world, mpi_tmp_path / folder, keys, f"layout.zero={zero}")
        training.state = checkpoints.restore(path)
        path = saved(training, checkpoints)
        found = residuals(path)
        assert found.keys() == owed.keys()
        assert all(np.allclose(found[name], owed[name], rtol=1e-5, atol=1e-7) for name in owed)
    assert training.train_step().loss > 0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_another_method_adds_the_residuals(world: World, mpi_tmp_path: Path) -> None:
    """Add also residuals of vectors, which PowerSGD never has, to the first sums."""
    training, checkpoints = made(world, mpi_tmp_path / "a", *FORMS["sign"])
    training.train(2)
    path = saved(training, checkpoints)
    owed = residuals(path)
    assert all(values.any() for values in owed.values())
    other, checkpoints = made(world, mpi_tmp_path / "b", *FORMS["powersgd"])
    other.state = checkpoints.restore(path)
    found = residuals(saved(other, checkpoints))
    assert found.keys() == owed.keys()
    assert all(np.allclose(found[name], owed[name], rtol=1e-5, atol=1e-7) for name in owed)
    other.train(1)
    paid = {name for name, values in residuals(saved(other, checkpoints)).items() if not values.any()}
    assert paid == {name for name in owed if name.endswith(("bias", "norm.weight"))}
    training, checkpoints = made(world, mpi_tmp_path / "c", *FORMS["sign"])
    training.state = checkpoints.restore(mpi_tmp_path / "b/checkpoints/step-00000003.h5")
    assert training.train_step().loss > 0


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("model", [(), LLAMA], ids=["gpt2", "llama"])
def test_another_tensor_size_resumes(world: World, mpi_tmp_path: Path, model: tuple[str, ...]) -> None:
    """Pieces are other matrices then, so their factors start again. Residuals remain."""
    keys = ("communication.compress=powersgd", *model)
    training, checkpoints = made(world, mpi_tmp_path / "a", *keys)
    training.train(2)
    path = saved(training, checkpoints)
    cut, checkpoints = made(world, mpi_tmp_path / "b", *keys, "layout.tensor=2")
    cut.state = checkpoints.restore(path)
    owed, found = residuals(path), residuals(saved(cut, checkpoints))
    assert found.keys() == owed.keys()
    assert all(np.allclose(found[name], owed[name], rtol=1e-5, atol=1e-7) for name in owed)
    loss = training.train_step().loss
    assert cut.train_step().loss == pytest.approx(loss, rel=1e-4)
    check_replicas(cut.engine.stage.buckets, world.everyone)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", ["layout.zero=0", "layout.zero=1"])
@pytest.mark.parametrize(
    ("before", "after", "kept", "kind"),
    [
        ((), FORMS["onebit"], "optimizer/exp_avg", "reducer/mean"),
        (SGD, (*SGD, *FORMS["topk"]), "optimizer/momentum", "reducer/momentum"),
    ],
    ids=["onebit", "topk"],
)
def test_exact_runs_resume_with_their_momentum(
    world: World,
    mpi_tmp_path: Path,
    zero: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    kept: str,
    kind: str,
) -> None:
    """The parts of all ranks add up to the momentum."""
    exact, checkpoints = made(world, mpi_tmp_path, zero, *before)
    exact.train(3)
    path = saved(exact, checkpoints)
    momentum: dict[str, np.ndarray] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            momentum[name] = item[()]

    with h5py.File(path) as file:
        file[kept].visititems(visit)
    assert len(momentum) == len(exact.parameters())
    training, checkpoints = made(world, mpi_tmp_path, zero, *after)
    training.state = checkpoints.restore(path)
    with h5py.File(saved(training, checkpoints)) as file:
        for name, values in momentum.items():
            assert np.array_equal(file[f"{kind}/{name}"][()].sum(0), values) and values.any(), name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", KNOWN)
def test_a_plan_predicts_the_memory_of_a_method(world: World, name: str) -> None:
    """Predict the bytes from shapes alone. A GPU encodes larger pieces at a time."""
    wide = ("model.vocabulary=8191", "model.hidden=64", "batch.global_size=16")
    deck = small_deck(f"communication.compress={name}", *NEEDED.get(name, ()), *wide)
    engine = trainer(world, deck).engine
    shape, schedule = ModelShape.of(deck, 8191), accumulation(1)
    scratch = []
    for device, transport in (("cpu", "auto"), ("cpu", "mpi"), ("cuda", "mpi")):
        place = torch.device(device)
        mesh = PlannedMesh(axis_sizes(deck, 2), 0, 2, device=place, transport=transport)
        stage = plan_stage(
            deck, shape, mesh, PipelinePosition(schedule, [deck.model.layers], 0), torch.device("cpu")
        )
        scratch.append(synchronizer_bytes(stage.synchronizer))
    assert scratch[0] == max(world.everyone.all_gather_object(synchronizer_bytes(engine.stage.synchronizer)))
    assert (scratch[1] < scratch[2]) == (name in {"bf16", "int8", "sign", "onebit", "powersgd"})
