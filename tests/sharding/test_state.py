"""State of those who are no optimizer: stored, brought back on any layout, and counted, whoever keeps it.

Tests of sharding/state.py and checkpoint/state_entries.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import Mock
from zlib import crc32

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import state_bytes
from hpctrain.costs.reduction_bytes import reduction_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.registry import RecordedStatistics
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages import gradients
from hpctrain.engine.stages.stage import build_stage
from hpctrain.memory.scratch import fill_pieces, read_pieces
from hpctrain.model.construction import build_model
from hpctrain.parallel.fp8 import matmul_choice
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import ExactReduction
from hpctrain.sharding.state import ModuleState, StateTensor, state_of_ranks
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.memory_ledger import MemoryLedger
from tests.engines import LLAMA, Trainer, record_statistics, small_deck, trainer

HISTORY, WIDTH = 4, 2
KINDS = {"reducer/residual", "product/history", "product/rows"}


class Rounding:
    """Reduction that rounds what a rank sends, with error feedback."""

    def __init__(self, _: Deck, bucket: Bucket) -> None:
        self.bucket, self.inner = bucket, ExactReduction(bucket)
        self.residual = torch.zeros(bucket.length, device=bucket.sharding.group.device)

    def begin(self, updates: int) -> None:
        """Do nothing."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        self.residual.add_(gradients)
        gradients.copy_(self.residual.bfloat16())
        self.residual.sub_(gradients)
        return self.inner.start(gradients, sums)

    def end_step(self, updated: bool, scale_ratio: float) -> None:
        """Discard the residual if the step was skipped, as its gradients are discarded, too."""
        self.residual.mul_(scale_ratio) if updated else self.residual.zero_()

    def state(self) -> Iterator[StateTensor]:
        yield from state_of_ranks("reducer/residual", self.residual, self.bucket)


@reduction_bytes.register
def _rounding_bytes(reduction: Rounding) -> int:
    return reduction_bytes(reduction.inner)


class Remembering(Matmul):
    """Product that stores, for each weight, a history and two numbers for each row."""

    history: tuple[Tensor, ...] = ()
    rows: tuple[Tensor, ...] = ()

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        self.note("inputs", inputs)
        return super().forward(inputs, bias)

    def logits(self, inputs: Tensor) -> Tensor:
        self.note("inputs", inputs)
        return super().logits(inputs)

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        self.note("gradients", output_gradient)
        return super().input_gradient(output_gradient, out)

    def note(self, what: str, values: Tensor) -> None:
        self.layer_context.statistics.record_max(
            f"{self.weights[0].shard.name}/{what}", values.abs().amax().float().reshape(1)
        )

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        first_name = self.weights[0].shard.name
        for weight, history, rows in zip(self.weights, self.history, self.rows, strict=True):
            history.copy_(history.roll(WIDTH))
            for column, what in enumerate(("inputs", "gradients")):
                history[column] = statistics[f"{first_name}/{what}"][0]
            first = WIDTH * weight.shard.start[0]
            rows.copy_(torch.arange(first, first + len(rows)) + crc32(weight.shard.name.encode()) % 97)
            rows[WIDTH * weight.shard.extent[0] :] = 0  # padding

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        if not self.history:
            device = self.weights[0].device
            self.history = tuple(torch.zeros(HISTORY, device=device) for _ in self.weights)
            self.rows = tuple(torch.zeros(WIDTH * weight.shape[0], device=device) for weight in self.weights)
        for weight, history, rows in zip(self.weights, self.history, self.rows, strict=True):
            yield "product/history", Shard.replicated(weight.shard.name, (HISTORY,)), history
            yield "product/rows", rows_shard(weight), rows


def rows_shard(weight: Parameter) -> Shard:
    """Return the shard of a matrix [n, WIDTH] that is split like the rows of a weight."""
    of = weight.shard
    cut = of.split if of.local[0] != of.shape[0] else frozenset()
    local, start = (of.local[0], WIDTH), (of.start[0], 0)
    return Shard(
        of.name, (of.shape[0], WIDTH), start, local, cut, holder_counts=of.holder_counts if cut else ()
    )


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all reductions and products keep state."""
    monkeypatch.setattr(gradients, "make_reduction", Rounding)
    monkeypatch.setattr(matmul_choice, "Matmul", Remembering)
    monkeypatch.setattr(RecordedStatistics, "attach", record_statistics)


DECK = ("model.layers=4", "batch.global_size=8", "run.steps=3", "model.tied=false")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "zero-0": ("precision.compute=bf16",),
    "zero-1": ("layout.zero=1",),
    "zero-2": ("layout.zero=2", "precision.compute=bf16"),
    "zero-3": ("layout.zero=3", "memory.optimizer=disk"),
    "tensor": ("layout.tensor=2",),
    "pipeline": ("layout.pipeline=2", "model.tied=true"),
}


CUTS = {"layout.tensor=2", "layout.pipeline=2", "layout.zero=3"}


def made(world: World, folder: Path, *keys: str) -> tuple[Trainer, Checkpoints]:
    deck = small_deck(*DECK, *LLAMA, *keys, f"run.dir={folder}", "checkpoint.buffer=20000")
    training = trainer(world, deck)
    checkpoints = Checkpoints(deck, training.engine, {})
    training.hooks.append(checkpoints)
    return training, checkpoints


def written(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint."""
    found: dict[str, np.ndarray] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and "/" in name:
            found[name] = item[()]

    with h5py.File(path_of(folder, step)) as file:
        file.visititems(visit)
    return found


def path_of(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step-{step:08d}.h5"


def contents(training: Trainer) -> dict[tuple[str, str], Tensor]:
    """Return this rank's state by kind and name."""
    return {
        (tensor.kind, tensor.shard.name): torch.cat(
            [piece.clone() for _, piece in read_pieces(tensor.values)]
        )
        for tensor in training.engine.state()
        if tensor.values.numel()
    }


def ruin(training: Trainer, all_kinds: bool = True) -> None:
    """Ignore residuals, which another number of ranks may give to other ranks."""
    for tensor in training.engine.state():
        for _, piece in fill_pieces(tensor.values):
            piece.fill_(float("nan") if all_kinds or tensor.kind != "reducer/residual" else 0.0)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_restored_on_any_layout(world: World, mpi_tmp_path: Path, layout: str) -> None:
    keys = LAYOUTS[layout]
    if world.size == 1 and CUTS & set(keys):
        pytest.skip("needs two ranks")
    training, checkpoints = made(world, mpi_tmp_path / "a", *keys, "checkpoint.mode=background")
    training.train(2)
    before = contents(training)
    assert {kind for kind, _ in before} >= KINDS
    assert all(bool(values.any()) for (kind, _), values in before.items() if kind.startswith("product"))
    checkpoints.save(training.state)
    losses = [step.loss for step in training.train(2)]
    checkpoints.finish()
    training.engine.close()
    expected = written(mpi_tmp_path / "a", 2)
    source = path_of(mpi_tmp_path / "a", 2)
    assert {"/".join(name.split("/")[:2]) for name in expected} >= KINDS

    again, checkpoints = made(world, mpi_tmp_path / "b", *keys)
    ruin(again)
    again.state = checkpoints.restore(source)
    after = contents(again)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [step.loss for step in again.train(2)] == losses
    again.engine.close()

    if world.size == 1:
        engine = again.engine
        stage = build_stage(
            again.deck,
            engine.stage.layer_context,
            [build_model(engine.shape, engine.stage.layer_context)],
            engine.stage.replications,
        )
        load_parameters(source, stage, world.everyone)
        kept = {(each.kind, each.shard.name): each.values for each in stage.module_state.state()}
        assert len(kept) > 20 and all(torch.equal(values, before[key]) for key, values in kept.items())

    tied = [key for key in keys if key.startswith(("model.tied", "precision"))]
    if world.size > 1:
        cut = layout in {"zero-0", "zero-1", "tensor"}
        other = ("layout.zero=3",) if cut else ("layout.zero=0", "memory.optimizer=disk")
        expect_same(world, mpi_tmp_path / "c", source, expected, (*other, *tied))
    alone = world.single_rank_world()
    with world.agreement():
        if world.rank == 0:
            expect_same(alone, mpi_tmp_path / "d", source, expected, ("layout.zero=1", *tied))


def expect_same(
    world: World, folder: Path, source: Path, expected: dict[str, np.ndarray], keys: tuple[str, ...]
) -> None:
    """Another layout reads and writes the same state, and the same sum of what each rank has of its own."""
    training, checkpoints = made(world, folder, *keys)
    ruin(training, all_kinds=False)
    training.state = checkpoints.restore(source)
    checkpoints.save(training.state)
    found, expected = written(folder, 2), dict(expected)
    assert found.keys() == expected.keys()
    for name in expected:
        if name.startswith("reducer/"):
            expected[name], found[name] = expected[name].sum(0), found[name].sum(0)
            assert expected[name].any()
    differing = [name for name, values in expected.items() if values.tobytes() != found[name].tobytes()]
    assert not differing
    training.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.usefixtures("keeping")
def test_planned_state_bytes_are_the_measured_ones(world: World, tmp_path: Path) -> None:
    for keys in LAYOUTS.values():
        if world.size == 1 and CUTS & set(keys):
            continue
        deck = small_deck(*DECK, *LLAMA, *keys, f"memory.offload_dir={tmp_path / 'offload'}")
        training = trainer(world, deck)
        training.train(1)
        planned = plan_memory(deck, world.size, 61)
        engine = training.engine
        here = planned.stages[engine.mesh.coordinate("pipeline")].memory
        held = MemoryLedger(training, planned, tmp_path).measure()
        assert held.optimizer == here.optimizer, keys
        own = {id(state): state for state in engine.stage.state_owners if isinstance(state, Rounding)}
        residuals = sum(each.residual.nbytes for each in own.values())
        of_products = [t for t in engine.state() if t.kind.startswith("product/")]
        assert len(of_products) > 4
        others = [tensor for tensor in engine.state() if tensor.kind not in KINDS]
        beside = residuals + sum(tensor.values.nbytes for tensor in of_products)
        assert here.optimizer == state_bytes(others, engine.stage.buckets) + beside, keys
        engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_state_that_a_file_lacks_is_initialized(
    world: World, mpi_tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Resume a run with compression turned on, and one with compression turned off."""
    plain, checkpoints = made(world, mpi_tmp_path / "plain")
    plain.train(2)
    checkpoints.save(plain.state)
    request.getfixturevalue("keeping")
    training, checkpoints = made(world, mpi_tmp_path / "keeping")
    training.state = checkpoints.restore(path_of(mpi_tmp_path / "plain", 2))
    said = [sentence.split("part of its ")[1].split(" does not fit")[0] for sentence in checkpoints.notes]
    assert said == sorted(KINDS)
    found = contents(training)
    assert not any(bool(values.any()) for (kind, _), values in found.items() if kind in KINDS)
    expected = contents(plain)
    assert all(torch.equal(found[key], values) for key, values in expected.items())
    training.train(1)
    checkpoints.save(training.state)
    request.getfixturevalue("monkeypatch").undo()
    plain.state = Checkpoints(plain.deck, plain.engine, {}).restore(path_of(mpi_tmp_path / "keeping", 3))
    assert plain.state.step == 3


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("keeping")
def test_residuals_survive_skipped_steps(world: World, mpi_tmp_path: Path) -> None:
    """Start with a loss scale that is too large. Residuals have the scale of the next step or run."""
    keys = ("precision.compute=fp16", "precision.initial_loss_scale=16777216", "run.steps=20")
    training = trainer(world, small_deck(*DECK, *LLAMA, *keys, f"run.dir={mpi_tmp_path / 'fp16'}"))
    skipped = [result.skipped for result in training.train(12)]
    assert skipped[0] and not all(skipped[-2:]), skipped
    scale = training.engine.control.loss_scale.value
    carried = max(float(t.values.abs().max()) for t in training.engine.state() if "residual" in t.kind)
    assert 0 < carried / scale < 1e-2
    checkpoints = Checkpoints(training.deck, training.engine, {})
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    other, others = made(world, mpi_tmp_path / "other", "precision.compute=bf16")
    other.state = others.restore(checkpoints.newest)
    before = contents(training)
    for key, values in contents(other).items():
        if key[0] == "reducer/residual":
            assert torch.equal(values * scale, before[key]), key


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("keeping")
def test_only_state_of_another_shape_is_initialized(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume a run with longer histories."""
    training, checkpoints = made(world, mpi_tmp_path / "a")
    training.train(1)
    checkpoints.save(training.state)
    before = contents(training)
    monkeypatch.setattr("tests.sharding.test_state.HISTORY", 2 * HISTORY)
    longer, others = made(world, mpi_tmp_path / "b")
    longer.state = others.restore(path_of(mpi_tmp_path / "a", 1))
    for key, values in contents(longer).items():
        if key[0] == "product/history":
            assert len(values) == 2 * len(before[key]) and not values.any()
        else:
            assert torch.equal(values, before[key]), key

    every = Remembering.state
    only = "product/history"
    monkeypatch.setattr(Remembering, "state", lambda self: (each for each in every(self) if each[0] == only))
    without, others = made(world, mpi_tmp_path / "c")
    without.state = others.restore(path_of(mpi_tmp_path / "a", 1))
    assert without.state.step == 1


class Learns(torch.nn.Module):
    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", [torch.nn.Identity, Learns])
def test_an_attribute_named_state_is_not_state(kind: type[torch.nn.Module]) -> None:
    module = kind()
    module.state = torch.ones(3)
    found = ModuleState([module], Mock())
    assert list(found.state()) == []
    assert found.statistics_users == [module] * (kind is Learns)
