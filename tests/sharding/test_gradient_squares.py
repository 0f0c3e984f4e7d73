"""The gradient noise scale of a step, on any layout that can measure it, against gradients of each data rank
that one rank computes by itself. Tests of Step.noise_scale too.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.sharding.gradient_squares import FirstMicroBatchNorm
from hpctrain.train.batch_size import batch_at
from hpctrain.train.step import Step
from tests.engines import LLAMA, Trainer, by_rank_0, reference, small_deck, trainer

STEPS, WINDOW = 2, 4
ON = f"run.noise_scale_steps={WINDOW}"
NAMES = {"noise_scale", "noise_scale_tokens", "gradient_signal", "gradient_noise"}

LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "tied": ("model.dropout=0.1", "optimizer.clip=0.1", "layout.zero=2"),
        "split backward": (*LLAMA, "layout.schedule=zb-h1", "memory.recompute=full"),
    },
    2: {
        "stage 0": ("model.dropout=0.1", "optimizer.clip=0.1"),
        "stage 1": ("layout.zero=1", *LLAMA, "batch.ramp_from=4", "batch.ramp_steps=2"),
        "stage 2": ("layout.zero=2", "model.frozen=['embedding.*', 'blocks.0.*']"),
        "stage 3": ("layout.zero=3", "precision.compute=fp16", "precision.initial_loss_scale=1024.0"),
        "int8": ("communication.compress=int8", "communication.warmup=1"),
        "experts": (*LLAMA, "model.experts.count=4", "model.experts.balance=none"),
    },
    4: {
        "hybrid": ("layout.zero=2", "layout.zero_group=2"),
        "tensor": (
            "layout.tensor=2",
            "layout.sequence_parallel=true",
            *LLAMA,
            "model.key_value_heads=1",
            "layout.zero=3",
        ),
        "tied ends": ("layout.pipeline=2", "layout.zero=1"),
        "v-schedule": ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4", *LLAMA),
    },
}
ROUGH = {"stage 3": 2e-2, "int8": 2e-3}
"""Of the square norm, where it is not that of one rank to rounding."""


def expected(alone: Trainer, parts: int, micro_batches: bool) -> list[tuple[float, float]]:
    """Averages of |G|^2 and S after each step, from the gradients of all parts one by one: data ranks, or
    `micro_batches`, of which the first alone is compared with all.
    """
    found, signal, noise, weight = [], 0.0, 0.0, 0.0
    for _ in range(STEPS):
        batch = batch_at(alone.deck.batch, alone.state.step)
        means, tokens = zip(*(mean_gradient(alone, rank, parts, batch) for rank in range(parts)), strict=True)
        shares = torch.tensor(tokens, dtype=torch.float64) / sum(tokens)
        big = float((shares @ torch.stack(means)).square().sum())
        small = float(shares @ torch.stack([mean.square().sum() for mean in means]))
        small_batch = batch / parts
        if micro_batches:
            small, small_batch = float(means[0].square().sum()), batch * float(shares[0])
        new = (batch * big - small_batch * small) / (batch - small_batch)
        signal = (1 - 1 / WINDOW) * signal + new / WINDOW
        noise = (1 - 1 / WINDOW) * noise + (small - big) / (1 / small_batch - 1 / batch) / WINDOW
        weight = (1 - 1 / WINDOW) * weight + 1 / WINDOW
        found.append((signal / weight, noise / weight))
        assert alone.train_step().batch == batch
    return found


def mean_gradient(alone: Trainer, rank: int, ranks: int, batch: int) -> tuple[Tensor, int]:
    """Return the mean gradient over the tokens of one data rank, [elements] in fp64, and their number."""
    with patch.object(Step, "share", (rank, ranks)):
        _, read = alone.step.accumulate(alone.state, batch)
        tokens = read.predicted
    trained = {
        segment.parameter.shard.name
        for bucket in alone.engine.stage.buckets
        for segment in bucket.segments
        if segment.parameter.requires_grad
    }
    pieces = [piece.double().flatten() for name, piece in alone.gradients().items() if name in trained]
    return torch.cat(pieces) / alone.engine.control.loss_scale.value, tokens


def deck_of(ranks: int, name: str) -> Deck:
    sizes = ("batch.micro_size=1", "optimizer.epsilon=1e-3")
    return small_deck(ON, *sizes, *LAYOUTS[ranks][name])


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=4)
@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_the_estimates_are_those_of_each_data_ranks_own_gradients(world: World, name: str) -> None:
    if name not in LAYOUTS.get(world.size, {}):
        pytest.skip("for another number of ranks")
    deck = deck_of(world.size, name)
    run = trainer(world, deck)
    parts = run.engine.mesh.size("data")
    if parts == 1:
        parts = deck.batch.global_size
    wanted = by_rank_0(world, lambda: expected(reference(world, deck), parts, world.size == 1))
    for signal, noise in wanted:
        result = run.train_step()
        figures, batch = result.metrics, result.batch
        scale = (abs(signal) + noise / batch) * ROUGH.get(name, 1e-5)
        assert figures["gradient_signal"] == pytest.approx(signal, abs=scale)
        assert figures["gradient_noise"] / batch == pytest.approx(noise / batch, abs=scale)
        if signal > 0:
            ratio = figures["gradient_noise"] / figures["gradient_signal"]
            assert figures["noise_scale"] == pytest.approx(ratio)
            assert figures["noise_scale_tokens"] == pytest.approx(ratio * result.tokens / batch)
        else:
            assert "noise_scale" not in figures


@pytest.mark.mpi(min_size=1, max_size=4)
def test_measuring_changes_no_bit_of_a_step(world: World) -> None:
    for name in LAYOUTS.get(world.size, {}):
        deck = deck_of(world.size, name)
        runs = trainer(world, deck), trainer(world, deck.with_keys(run={"noise_scale_steps": 0}))
        for _ in range(STEPS):
            measured, plain = (run.train_step() for run in runs)
            assert {*measured.metrics} - {*plain.metrics} <= NAMES
            assert {*measured.metrics} & NAMES
            kept = {key: measured.metrics[key] for key in plain.metrics}
            assert (kept, measured.grad_norm) == (plain.metrics, plain.grad_norm), name
        for tensors in zip(*(run.parameters().items() for run in runs), strict=True):
            assert torch.equal(*(values for _, values in tensors)), name


def test_a_table_with_two_buffers_counts_once_as_their_sum() -> None:
    """Count it after both additions of the first micro-batch, and before those of the next one."""
    table = Parameter(Shard.replicated("table", (2500, 3)))
    table.uses, table.gradient, table.lookup_gradients = 2, torch.randn(2500, 3), (torch.randn(2500, 3),)
    expected = float((table.gradient + table.lookup_gradients[0]).double().square().sum())
    first = FirstMicroBatchNorm(torch.device("cpu"))
    for _ in range(2):
        first.begin()
        found = []
        for _ in range(4):
            first.count_addition(table)
            found.append(float(first.squares))
        assert found == [0.0, *[pytest.approx(expected)] * 3]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_skipped_steps_and_steps_of_a_single_rank_are_not_counted(world: World) -> None:
    """Test a loss scale that overflows, and a step in which one rank has all samples."""
    run = trainer(world, small_deck(ON, "precision.compute=fp16", "precision.initial_loss_scale=16777216.0"))
    average = run.engine.control.noise_scale
    while run.train_step().skipped:
        assert (average.weight, average.metrics(1)) == (0.0, {})
    assert average.weight == 1 / WINDOW
    before = average.state()
    tokens = run.step(run.state, run.deck.batch.micro_size).tokens
    assert tokens and average.state() == before
