"""Weights that are gathered in 8 bits: the training of a run that gathers 16, bit for bit, in fewer bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.parallel.fp8.formats import E4M3
from hpctrain.parallel.fp8.quantization_loss import count_losses, loss_metrics
from hpctrain.parallel.fp8.quantized_matmul import TRANSPOSED_WEIGHTS, WEIGHTS
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.eight_bit_gather import UNIT, EightBitBucket
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.step import StepResult
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.parallel.fp8.scales import delayed_products

KEYS = ("precision.compute=fp8", "layout.zero=3", "batch.sequence=16")
GATHER = "precision.fp8_gather=true"
ODD = (
    *("model.hidden=15", "model.heads=3", "model.mlp=21"),
    'precision.fp8_exclude=["blocks.1.attention.output.*"]',
)
"""Matrices whose elements are no multiple of UNIT; one that is not in 8 bits lies on two ranks."""
RAGGED = ("optimizer.name=muon", *LLAMA)
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "recompute": ("memory.recompute=full", *LLAMA, 'precision.fp8_exclude=["blocks.1.feed_forward.*"]'),
        "tied, kept": ("model.tied=true", "memory.keep_gathered=1"),
        "frozen": ('model.frozen=["embedding.*", "blocks.0.*"]', "memory.accumulate=sliced"),
        "owned": RAGGED,
        "shown": ("optimizer.name=schedule-free", "batch.micro_size=4"),
        "in files": ("memory.optimizer=disk", "memory.parameters=disk", "batch.micro_size=4"),
    },
    4: {
        "split backward": ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=full"),
        "hybrid": ("layout.zero_group=2", "layout.context=2"),
        "tensor": ("layout.tensor=2", "layout.sequence_parallel=true", *RAGGED),
        "replicas": ("layout.local_steps.replicas=2", "layout.local_steps.steps=2"),
    },
}
RECIPES = ("tensor", "delayed")
ALONE = {
    "tied, kept": "delayed",
    "frozen": "delayed",
    "shown": "tensor",
    "in files": "tensor",
    "hybrid": "delayed",
    "replicas": "tensor",
}
"""With which recipe these are tried; the others with both."""


def layouts(world: World, recipe: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, keys in LAYOUTS.get(world.size, {}).items():
        if ALONE.get(name, recipe) == recipe:
            yield name, (*KEYS, f"precision.fp8={recipe}", *keys)


def told(steps: list[StepResult]) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in steps]


def saved(run: Trainer) -> Path:
    """Save a checkpoint of the current state."""
    checkpoints = Checkpoints(run.deck, run.engine, {})
    checkpoints.save(run.state)
    assert checkpoints.newest is not None
    return checkpoints.newest


def evaluated(run: Trainer) -> dict[str, float]:
    return run.step.evaluate(run.step.batches, 4)


def eight_bit_buckets(run: Trainer) -> list[EightBitBucket]:
    return [bucket for bucket in run.engine.stage.buckets if isinstance(bucket, EightBitBucket)]


def assert_same_maxima(one: Trainer, other: Trainer) -> None:
    for each, again in zip(
        one.engine.stage.module_state.state(), other.engine.stage.module_state.state(), strict=True
    ):
        assert torch.equal(each.values, again.values), (each.kind, each.shard.name)


def matrices(bucket: EightBitBucket) -> list[Parameter]:
    return [weight for product in bucket.products for weight in product.weights]


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathering_in_8_bits_changes_no_bit(world: World, recipe: str, mpi_tmp_path: Path) -> None:
    for name, keys in layouts(world, recipe):
        folders = [f"memory.offload_dir={mpi_tmp_path}/{number}" for number in range(2)]
        more = ([], [GATHER]) if name != "in files" else ([folders[0]], [folders[1], GATHER])
        plain, run = runs = [trainer(world, small_deck(*keys, *each)) for each in more]
        assert eight_bit_buckets(run) and not eight_bit_buckets(plain)
        assert told(run.train(2)) == told(plain.train(2)), name
        assert evaluated(run) == evaluated(plain), name
        for each in runs:
            each.engine.stage.layer_context.statistics.detailed_step = True
        expected, found = (each.train_step() for each in runs)
        assert told([found]) == told([expected]), name
        row = loss_metrics(found.statistics)
        assert row is not None and row == loss_metrics(expected.statistics), name
        parameters = plain.parameters()
        for each, values in run.parameters().items():
            assert torch.equal(values, parameters[each]), (name, each)
        assert_same_maxima(plain, run)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_resumes_with_the_maxima_of_slices(world: World, mpi_tmp_path: Path) -> None:
    """Use maxima that are known from the start, and are recorded from slices alone."""
    deck = small_deck(*KEYS, "precision.fp8_history=1", f"run.dir={mpi_tmp_path}")
    plain = trainer(world, deck)
    plain.train(2)
    path = saved(plain)
    expected = told(plain.train(2))
    run = trainer(world, deck.with_keys(precision={"fp8_gather": True}))
    run.state = Checkpoints(run.deck, run.engine, {}).restore(path)
    assert all(product.weight_maxima is not None for b in eight_bit_buckets(run) for product in b.products)
    assert told(run.train(2)) == expected
    assert_same_maxima(plain, run)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_bucket_is_gathered_in_its_own_format_until_all_scales_are_known(world: World) -> None:
    """One matrix has only had zero gradients, so that it has no scale."""
    keys = (*KEYS, "precision.fp8=delayed")
    plain, run = runs = [trainer(world, small_deck(*keys, *more)) for more in ((), (GATHER,))]
    for each in runs:
        each.train(2)
        product = next(iter(delayed_products(each)))
        product.histories["gradients"].maxima.zero_()
        product._scales_exist.clear()
        assert not product.has_all_scales
    assert told(run.train(2)) == told(plain.train(2))
    assert_same_maxima(plain, run)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("more", [LLAMA, RAGGED], ids=["even", "ragged"])
def test_matrices_are_gathered_in_half_the_bytes(
    world: World, recipe: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (*KEYS, f"precision.fp8={recipe}", *more)
    counted: Counter[int] = Counter()
    start = EightBitBucket.start_gather

    def counting(bucket: EightBitBucket) -> Work[Tensor]:
        counted[id(bucket)] += 1
        return start(bucket)

    monkeypatch.setattr(EightBitBucket, "start_gather", counting)
    gathers = []
    for deck in (small_deck(*keys), small_deck(*keys, GATHER)):
        run = trainer(world, deck)
        run.train(1)  # of which delayed scaling gathers 16 bits
        world.ledger.reset()
        counted.clear()
        run.train(1)
        rows = world.ledger.rows()
        gathers.append(sum(row.bytes for row in rows if row.operation == "all_gather"))
    spared = 0
    for bucket in eight_bit_buckets(run):
        elements = sum(weight.numel() for weight in matrices(bucket))
        assert all(weight.numel() % UNIT == 0 for weight in matrices(bucket))
        assert counted[id(bucket)] >= 2
        padding = bucket.length - bucket.layout.used_length
        spared += counted[id(bucket)] * (elements + 2 * padding)
    assert spared and gathers[0] - gathers[1] == spared


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("more", [ODD, RAGGED], ids=["even", "ragged"])
def test_gathered_codes_are_those_of_the_product(world: World, more: tuple[str, ...]) -> None:
    """Test numbers that saturate and underflow, in both passes, with the same statistics of loss."""
    cut = 0
    run = trainer(world, small_deck(*KEYS, "precision.fp8=tensor", GATHER, *more))
    run.engine.stage.layer_context.statistics.detailed_step = True
    for bucket in eight_bit_buckets(run):
        whole = bucket.gather_owned(bucket.owned_values)
        assert isinstance(bucket.owned_values, Tensor)
        for product in bucket.products:
            product.set_weight_maxima(WEIGHTS, torch.full((1, 1), 2.0**-4))
        bucket.set_values(bucket.start_gather().wait())
        there = {id(parameter): segment for segment in bucket.segments for parameter in [segment.parameter]}
        for product in bucket.products:
            found = product._weights(WEIGHTS), product._weights(TRANSPOSED_WEIGHTS)
            assert product._prequantized is not None and product._prequantized.counts is not None
            counts = bucket.sharding.group.all_reduce(product._prequantized.counts)
            product.set_prequantized(None)
            for weight in product.weights:
                weight.data = there[id(weight)].view(whole)
            expected = product._weights(WEIGHTS), product._weights(TRANSPOSED_WEIGHTS)
            assert found[0].values.storage_offset() % UNIT == 0
            for one, other in zip(found, expected, strict=True):
                assert one.values.shape == other.values.shape and one.blocks == other.blocks
                assert torch.equal(one.scales, other.scales)
                assert torch.equal(one.values.float(), other.values.float())
            assert expected[0].values.float().abs().amax() == E4M3.largest
            assert torch.equal(counts, count_losses(product.weight(), expected[0])) and counts[0] > 0
        of_products = set(matrices(bucket))
        rest = [segment for segment in bucket.segments if segment.parameter not in of_products]
        assert rest
        for segment in rest:
            assert torch.equal(segment.parameter.data, segment.view(whole))
            inside = range(segment.start + 1, segment.start + segment.length)
            cut += bucket.layout.borders[1] in inside
        bucket.release_values()
        assert all(product._prequantized is None for product in bucket.products)
    assert cut or more == RAGGED
