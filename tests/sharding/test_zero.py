"""ZeRO stages: the same training bit for bit, and the traffic and memory of the paper's closed forms.

Tests of sharding/bucket.py, sharding/bucket_layout.py, sharding/gather.py and sharding/reducer.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.model.count import count
from hpctrain.model.part import blocks_of
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import ALIGNMENT
from hpctrain.sharding.pool import BufferPool
from tests.device_double import LateStream, on_gpu
from tests.engines import LLAMA, Trainer, by_rank_0, reference, small_deck, trainer

STEPS = 5
MODELS = {"gpt2": (), "llama": LLAMA}


def layouts(ranks: int) -> list[tuple[str, ...]]:
    """Return layouts with data ranks only, and with tensor, context and pipeline ranks."""
    found: list[tuple[str, ...]] = [()]
    if ranks >= 4:
        found += [
            ("layout.tensor=2", "layout.sequence_parallel=true"),
            ("layout.context=2",),
            ("layout.pipeline=2", "layout.schedule=zb-h1"),
            ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4"),
        ]
    return found


def run(world: World, deck: Deck, steps: int = STEPS) -> tuple[Trainer, list[float]]:
    training = trainer(world, deck)
    return training, [step.loss for step in training.train(steps)]


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_all_stages_give_the_same_bits(world: World, model: str, compute: str) -> None:
    if world.size > 2 and (model, compute) not in {("gpt2", "bf16"), ("llama", "fp32")}:
        pytest.skip("proven on two ranks; on more, each model and each format with every layout")
    steps = STEPS if world.size == 2 else 2
    for layout in layouts(world.size):
        # Two micro-batches a data rank at least.
        sizes = ("batch.global_size=16",) if world.size > 2 else ()
        deck = (*MODELS[model], *layout, *sizes, f"precision.compute={compute}", "optimizer.clip=0.5")
        plain, losses = run(world, small_deck(*deck), steps)
        parameters = plain.parameters()
        for stage in (1, 2, 3):
            cut, cut_losses = run(world, small_deck(*deck, f"layout.zero={stage}"), steps)
            assert cut_losses == losses, (layout, stage)
            for name, values in cut.parameters().items():
                assert torch.equal(values, parameters[name]), (layout, stage, name)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_stages_have_the_same_bits_with_gradients_in_half_precision(
    world: World,
) -> None:
    deck = ("precision.compute=bf16", "batch.global_size=16", "precision.gradients=compute")
    _, expected = run(world, small_deck(*deck[:2]))
    plain, losses = run(world, small_deck(*deck))
    assert losses == pytest.approx(expected, rel=5e-3)
    for stage in (1, 2, 3):
        world.ledger.reset()
        cut, cut_losses = run(world, small_deck(*deck, f"layout.zero={stage}"))
        assert cut_losses == losses
        for name, values in cut.parameters().items():
            assert torch.equal(values, plain.parameters()[name]), (stage, name)
        reduced = sum(row.bytes for row in world.ledger.rows() if row.operation == "reduce_scatter")
        assert reduced == STEPS * 2 * sum(bucket.length for bucket in cut.engine.stage.buckets)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_trains_like_one_rank(world: World, stage: int) -> None:
    deck = small_deck("model.dropout=0.1", f"layout.zero={stage}")
    expected = by_rank_0(world, lambda: [step.loss for step in reference(world, deck).train(STEPS)])
    _, losses = run(world, deck)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.mpi(min_size=4)
def test_hybrid_groups_train_the_same_model(world: World) -> None:
    sizes = ("batch.global_size=16",)
    _, losses = run(world, small_deck(*sizes))
    first: dict[str, torch.Tensor] = {}
    for stage in (1, 2, 3):
        deck = small_deck(*sizes, f"layout.zero={stage}", "layout.zero_group=2")
        hybrid, hybrid_losses = run(world, deck)
        sharding = hybrid.engine.stage.buckets[0].sharding
        assert (sharding.group.size, sharding.replicas.size) == (2, world.size // 2)
        assert hybrid_losses == pytest.approx(losses, rel=1e-5)
        parameters = hybrid.parameters()
        for name, values in parameters.items():
            assert torch.equal(values, first.get(name, values)), (stage, name)
        assert_same_gradients(world, deck, small_deck(*sizes))
        first = first or parameters


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_may_be_summed_after_every_micro_batch(world: World, stage: int) -> None:
    sizes = ("batch.global_size=16", "model.layers=6")
    _, losses = run(world, small_deck(*sizes))
    deck = small_deck(*sizes, f"layout.zero={stage}", "memory.accumulate=sliced")
    cut, cut_losses = run(world, deck)
    assert cut_losses == pytest.approx(losses, rel=1e-5)
    assert_same_gradients(world, deck, small_deck(*sizes))
    # What backward fills, what is being summed, and the table, which is tied and so open all the time; in
    # stage 3 the values of two blocks and the table, too.
    block, table = 4 * 14 * 32 * 32, 4 * 32 * (61 + 32 + ALIGNMENT * world.size)
    assert cut.engine.stage.buckets[0].sharding.pool.bytes < (2 * block + table) * (1 if stage == 2 else 2)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_blocks_that_stay_gathered_change_only_the_traffic(world: World) -> None:
    deck = ("layout.zero=3", "batch.global_size=16", "batch.micro_size=2")
    free, losses = run(world, small_deck(*deck))
    world.ledger.reset()
    free.train(1)
    freed = gathered_bytes(world)
    kept, kept_losses = run(world, small_deck(*deck, "memory.keep_gathered=2"))
    world.ledger.reset()
    kept.train(1)
    assert kept_losses == losses
    block = sum(bucket.length for bucket in kept.engine.stage.buckets if "blocks" in names_of(bucket))
    micro_batches = 16 // 2 // world.size
    assert freed - gathered_bytes(world) == 4 * block * (2 * micro_batches - 1)


@pytest.mark.mpi(min_size=2)
def test_a_block_needed_twice_in_a_row_is_gathered_once(world: World) -> None:
    """From the second step of a kind, whose order is known, there are three gathers instead of four."""
    engine = trainer(world, small_deck("layout.zero=3")).engine
    first, second = (block.gather_keys[0] for block in blocks_of(engine.model))
    moved = []
    for _ in range(2):
        world.ledger.reset()
        with engine.stage.residency.step("twice"):
            for parameter in (first, second, second, first):
                with engine.stage.residency.in_memory(parameter):
                    pass
        moved.append(gathered_bytes(world))
    assert 0 < 4 * moved[1] == 3 * moved[0]


def assert_same_gradients(world: World, one: Deck, other: Deck) -> None:
    """Compare the first step, to rounding. The gradient of a bias of keys is only a rounding error."""
    measured, expected = trainer(world, one), trainer(world, other)
    measured.train(1), expected.train(1)
    gradients = expected.gradients()
    for name, values in measured.gradients().items():
        largest = gradients[name.replace("key.bias", "query.bias")].abs().max()
        assert (values - gradients[name]).abs().max() <= 1e-5 * largest, name


def names_of(bucket: Bucket) -> str:
    return " ".join(segment.parameter.shard.name for segment in bucket.segments)


def gathered_bytes(world: World) -> int:
    return sum(
        row.bytes
        for row in world.ledger.rows()
        if row.operation == "all_gather" and row.axis == "data x context"
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_traffic_is_that_of_the_closed_forms(world: World, compute: str) -> None:
    """Stages 0 to 2 send 2 Phi elements, the blocks of stage 3 send 3 Phi, without padding."""
    size = {"fp32": 4, "bf16": 2}[compute]
    for stage in range(4):
        deck = small_deck(
            f"layout.zero={stage}",
            f"precision.compute={compute}",
            "batch.micro_size=1",
            f"batch.global_size={world.size}",
        )
        training = trainer(world, deck)
        training.train(2)
        world.ledger.reset()
        training.train(1)
        moved: Counter[str] = Counter()
        for row in world.ledger.rows():
            if row.axis == "data x context":
                moved[row.operation] += row.bytes
        buckets = training.engine.stage.buckets
        padding = sum(bucket.length - bucket.layout.used_length for bucket in buckets)
        parameters = count(training.engine.shape).parameters
        assert sum(bucket.layout.used_length for bucket in buckets) == parameters
        assert 0 < padding <= len(buckets) * ALIGNMENT * (world.size + 1)
        whole = parameters + padding
        if stage == 0:
            assert moved == {"all_reduce": 2 * 4 * whole}
        elif stage < 3:
            assert moved == {"reduce_scatter": 4 * whole, "all_gather": size * whole}
        else:
            # Blocks and final norm are gathered forward and backward, and so is the table, which is tied:
            # once to embed and once to predict. Neither needs it in backward.
            assert moved == {"reduce_scatter": 4 * whole, "all_gather": 2 * size * whole}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_model_states_take_the_bytes_of_the_closed_forms(world: World, compute: str) -> None:
    """Parameter by parameter: 2 + 4 + 12 bytes in half precision with fp32 gradients, 4 + 4 + 8 in fp32, of
    which stage 1 cuts the last, stage 2 the second too, and stage 3 all; padding apart.
    """
    size, state = {"fp32": (4, 8), "bf16": (2, 12)}[compute]
    for stage in range(4):
        training = trainer(world, small_deck(f"layout.zero={stage}", f"precision.compute={compute}"))
        engine = training.engine
        for bucket, moment in zip(engine.stage.buckets, engine.stage.optimizer.states, strict=True):
            held = {
                "values": bucket.owned_values if stage == 3 else bucket.values,
                "gradients": bucket.owned_gradients if stage > 1 else bucket.gradients,
            }
            cut = bucket.length // world.size
            assert held["values"].nbytes == size * (cut if stage == 3 else bucket.length)
            assert held["gradients"].nbytes == 4 * (cut if stage > 1 else bucket.length)
            states = {t.data_ptr(): t.nbytes for t in moment.values()}
            if compute == "fp32":
                del states[bucket.owned_values.data_ptr()]
            assert sum(states.values()) == state * (cut if stage > 0 else bucket.length)
            if stage == 3:
                assert bucket.values is None
                assert all(s.parameter.untyped_storage().nbytes() <= 8 for s in bucket.segments)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_slices_of_the_host_come_to_a_gpu_and_are_gathered_beside_its_stream(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delay the copy and the gather as long as possible. Both are on the stream of the uploads."""
    layout = trainer(world, small_deck("layout.zero=3")).engine.stage.buckets[1].layout
    sharding, stream = replace(layout.sharding), LateStream()
    monkeypatch.setattr(sharding.group, "accelerator", sharding.group.host)
    made = BufferPool(lambda shape, dtype: on_gpu(torch.full(tuple(shape), torch.nan, dtype=dtype)))
    sharding.__dict__.update(pool=made, uploads=stream)
    layout = replace(layout, sharding=sharding)
    bucket = Bucket(layout, torch.float32, allocate=lambda length, dtype: torch.ones(length, dtype=dtype))
    assert isinstance(bucket.owned_values, Tensor)
    bucket.owned_values += world.rank
    work = bucket.start_gather()
    assert len(stream.started) == 1 and not stream.started[0].test()
    whole = work.wait().as_subclass(Tensor)
    shares = [
        torch.full((stop - start,), rank + 1.0) for rank, (start, stop) in enumerate(pairwise(layout.borders))
    ]
    assert torch.equal(whole, torch.cat(shares))
