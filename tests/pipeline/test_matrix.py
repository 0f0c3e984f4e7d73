"""Comparison of every schedule and number of micro-batches, with tensor and data ranks, with one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.pipeline import v_schedule
from hpctrain.pipeline.generate import ONE_CHUNK_SCHEDULES, SCHEDULE_NAMES
from hpctrain.train.step import StepResult, TrainState
from tests.engines import Trainer, by_rank_0, reference, small_deck, trainer

MODEL = ("model.layers=8", "model.dropout=0.1", "batch.sequence=16")
# Stages, tensor ranks, data ranks.
LAYOUTS = {
    2: [(2, 1, 1)],
    4: [(4, 1, 1), (2, 2, 1), (2, 1, 2)],
    8: [(2, 2, 2)],
}
COUNTS = {2: (1, 2, 3, 4, 5, 8), 4: (1, 3, 4, 8)}
SOME = {1, 4}
"""Numbers of micro-batches beside tensor and data ranks: orders of actions are the stages' alone."""


def first_step(run: Trainer, batch: int) -> tuple[StepResult, dict[str, Tensor]]:
    """Return metrics and gradients of a first step at `batch`; the parameters do not change."""
    result = run.step(TrainState(), batch)
    return result, {name: gradient.clone() for name, gradient in run.gradients().items()}


def frozen(run: Trainer) -> Trainer:
    run.engine.stage.optimizer.step = lambda *_: None
    return run


def alone(
    world: World, model: Sequence[str], unit: int, counts: Sequence[int]
) -> dict[int, tuple[StepResult, dict[str, Tensor]]]:
    """Return the first step of one rank, by number of micro-batches."""
    single = frozen(reference(world, small_deck(*model)))
    return {count: first_step(single, unit * count) for count in counts}


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_all_schedules_have_the_same_bits_and_the_losses_of_one_rank(
    world: World, monkeypatch: pytest.MonkeyPatch, tied: str
) -> None:
    """Tied embeddings are on two stages or, with V-shaped schedules, in two chunks of one stage.

    On four ranks there are fewer numbers of micro-batches: below, at and above the number of stages.
    """
    if world.size not in LAYOUTS or world.size == 8:
        pytest.skip(f"has no layout of {world.size} ranks")
    demand_equality(world, monkeypatch, tied, COUNTS[world.size] if tied == "false" else (1, 4))


@pytest.mark.eight
@pytest.mark.mpi(min_size=8)
def test_eight_ranks_compute_what_one_rank_computes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.size != 8:
        pytest.skip(f"has no layout of {world.size} ranks")
    demand_equality(world, monkeypatch, "false", (1, 4, 8))


def demand_equality(
    world: World, monkeypatch: pytest.MonkeyPatch, tied: str, all_counts: Sequence[int]
) -> None:
    """Compare all layouts of the world's size, all schedules, and these numbers of micro-batches."""
    model = (*MODEL, f"model.tied={tied}")
    monkeypatch.setattr(v_schedule, "_MAX_CANDIDATES", 12)  # any order will do, and not only a quick one
    for stages, tensor, data in LAYOUTS[world.size]:
        counts = [count for count in all_counts if tensor * data == 1 or count in SOME]
        unit = 2 * data
        expected = by_rank_0(world, lambda counts=counts, unit=unit: alone(world, model, unit, counts))
        first: dict[tuple[int, str], Tensor] = {}
        for name in SCHEDULE_NAMES:
            deck = small_deck(
                *model,
                f"layout.pipeline={stages}",
                f"layout.tensor={tensor}",
                f"layout.schedule={name}",
                f"batch.global_size={unit * 4}",
            )
            run = frozen(trainer(world, deck))
            shards = {
                s.parameter.shard.name: s.parameter.shard
                for b in run.engine.stage.buckets
                for s in b.segments
            }
            tried = []
            for count in counts:
                if not can_be_had(run.engine.placement.schedule_of, count):
                    continue
                tried.append(count)
                case = f"{name}, {stages} stages, tensor {tensor}, data {data}, {count} micro-batches"
                result, gradients = first_step(run, unit * count)
                single_result, whole = expected[count]
                assert result.loss == pytest.approx(single_result.loss, rel=1e-6), case
                assert result.grad_norm == pytest.approx(single_result.grad_norm, rel=1e-5), case
                for key, gradient in gradients.items():
                    scale = whole[key.replace(".key.bias", ".query.bias")].abs().max()
                    difference = (gradient - shards[key].take(whole[key])).abs().max()
                    assert difference <= 1e-5 * scale, (case, key)
                    assert torch.equal(gradient, first.setdefault((count, key), gradient)), (case, key)
            assert tried == [c for c in counts if name != "interleaved" or c % stages == 0]
            assert len(run.engine.stage.models) == (1 if name in ONE_CHUNK_SCHEDULES else 2)


def can_be_had(schedule: Callable[[int], object], micro_batches: int) -> bool:
    try:
        schedule(micro_batches)
    except HpctrainError:
        return False
    return True
