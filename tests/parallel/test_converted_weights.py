"""Matrices that are converted once a step: when, what they take, and that no result is another one."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.linear_bytes import planned_converted_bytes
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.part import converted_bytes, matmuls_of
from hpctrain.parallel.kernels.matmul_kernels import Fp32Kernel
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.memory_plan import plan_memory
from tests.engines import LLAMA, Trainer, small_deck, trainer

THROUGH = ("precision.compute=bf16", "machine.products=fp32")


def evaluated(training: Trainer) -> float:
    source = SyntheticSource(training.deck.batch.sequence, 61)
    return training.step.evaluate(Batches(source, 3), 4)["loss"]


@pytest.mark.parametrize("more", [(), LLAMA, ("optimizer.name=schedule-free",), ("memory.recompute=full",)])
@pytest.mark.mpi(max_size=1)
def test_what_is_kept_is_what_is_stored(
    world: World, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = []
    copy = torch.Tensor.copy_

    def noting(into: torch.Tensor, values: torch.Tensor, *rest: object) -> torch.Tensor:
        if into.dtype == torch.float32 and values.dtype == torch.bfloat16 and into.dim() == 2:
            converted.append(tuple(into.shape))
        return copy(into, values, *rest)

    found = []
    for keeps in (True, False):
        training = trainer(world.single_rank_world(), small_deck(*THROUGH, *more))
        kernels = training.engine.stage.layer_context.products.kernels
        assert kernels.reuse_converted
        kernels.reuse_converted = keeps
        losses = [step.loss for step in training.train(2)]
        assert converted_bytes(training.engine.model.layers) == (
            planned_converted_bytes(training.engine.model.layers) if keeps else 0
        )
        losses += [evaluated(training), *(step.loss for step in training.train(1))]
        if keeps:
            monkeypatch.setattr(torch.Tensor, "copy_", noting)
            training.train(1)
            monkeypatch.undo()
            # Four micro-batches, and every matrix once.
            shapes = [product.shape for product in matmuls_of(training.engine.model.layers)]
            assert sorted(converted) == sorted(shapes)
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_matrices_that_come_and_go_are_not_kept(world: World) -> None:
    for keys in (("layout.zero=3",), ("batch.micro_size=4",), ("machine.products=library",)):
        training = trainer(world, small_deck(*THROUGH, *keys))
        training.train(1)
        assert converted_bytes(training.engine.model.layers) == 0
        assert planned_converted_bytes(training.engine.model.layers) == 0


@pytest.mark.mpi(max_size=1)
def test_they_are_planned(world: World) -> None:
    deck = small_deck(*THROUGH)
    one, mesh = world.single_rank_world(), make_mesh(deck, world.single_rank_world())
    engine, plan = build_within_memory(deck, one, mesh)
    elements = sum(h * w for h, w in (product.shape for product in matmuls_of(engine.model.layers)))
    without = plan_memory(small_deck(THROUGH[0]), 1, 61)
    difference = plan.largest.memory.parameter - without.largest.memory.parameter
    assert difference == 4 * elements == planned_converted_bytes(engine.model.layers)
    assert plan_memory(deck, 1, 61).largest.memory.parameter == plan.largest.memory.parameter
    assert isinstance(engine.stage.layer_context.products.kernels.default, Fp32Kernel)
