"""Compression in training: exact first updates, resumed state, layouts, loss scale, plan and ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from math import ceil
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.memory.compress import BLOCK
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.memory_ledger import MemoryLedger
from tests.engines import LLAMA, Trainer, small_deck, trainer

WARMUP = 2
FORMS: dict[str, tuple[str, ...]] = {
    "bf16": ("communication.compress=bf16",),
    "int8": ("communication.compress=int8",),
    "sign": ("communication.compress=sign",),
    "vote": ("communication.compress=sign", "communication.sign.error_feedback=false"),
    "onebit": ("communication.compress=onebit",),
    "topk": ("communication.compress=topk", "communication.topk.ratio=0.1"),
    "dgc": (
        "communication.compress=topk",
        "communication.topk.ratio=0.1",
        "optimizer.name=sgd",
        "optimizer.sgd.momentum=0.9",
    ),
}


def deck_of(form: str, *keys: str, warmup: int = WARMUP) -> list[str]:
    return [*FORMS[form], *([f"communication.warmup={warmup}"] if warmup else []), *keys]


def exact_of(form: str, *keys: str) -> list[str]:
    return [key for key in (*FORMS[form], *keys) if not key.startswith("communication.")]


def made(world: World, keys: Sequence[str]) -> Trainer:
    return trainer(world, small_deck(*keys))


def same(one: Trainer, other: Trainer) -> bool:
    others = other.parameters()
    return all(torch.equal(values, others[name]) for name, values in one.parameters().items())


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_elements_are_the_exact_sum(world: World) -> None:
    for more in ((), ("optimizer.name=sgd", "optimizer.sgd.momentum=0.9")):
        exact = made(world, more)
        every = made(world, [*more, "communication.compress=topk", "communication.topk.ratio=1.0"])
        assert [step.loss for step in every.train(3)] == [step.loss for step in exact.train(3)]
        assert same(exact, every)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("form", "zero"), list(zip(FORMS, cycle((0, 1)))))
def test_first_updates_are_exact_and_later_ones_send_fewer_bytes(world: World, form: str, zero: int) -> None:
    keys = (f"layout.zero={zero}", *(("learning_rate.peak=3e-2",) if form == "dgc" else ()))
    exact, compressed = made(world, exact_of(form, *keys)), made(world, deck_of(form, *keys))
    losses = [step.loss for step in exact.train(WARMUP)]
    assert [step.loss for step in compressed.train(WARMUP)] == losses
    assert same(exact, compressed)
    expected, found = ([step.loss for step in each.train(13)] for each in (exact, compressed))
    assert not same(exact, compressed)
    assert found[-1] < found[0]
    assert found[-1] < 1.1 * expected[-1]
    check_replicas(compressed.engine.stage.buckets, world.everyone)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("form", "zero"), [("int8", 0), ("sign", 1), ("onebit", 1), ("dgc", 0)])
def test_a_run_goes_on_bit_for_bit(world: World, mpi_tmp_path: Path, form: str, zero: int) -> None:
    keys = deck_of(form, f"layout.zero={zero}", f"run.dir={mpi_tmp_path}")
    training = made(world, keys)
    training.train(WARMUP + 2)
    checkpoints = Checkpoints(training.deck, training.engine, {})
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    losses = [step.loss for step in training.train(2)]
    again = made(world, keys)
    for tensor in again.engine.state():
        tensor.values.fill_(float("nan"))  # type: ignore[union-attr]
    for bucket in again.engine.stage.buckets:
        for gap in bucket.layout.gaps:
            bucket.owned_values[gap.start : gap.stop] = 0
    again.state = Checkpoints(again.deck, again.engine, {}).restore(checkpoints.newest)
    assert [step.loss for step in again.train(2)] == losses
    assert same(again, training)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("form", ["vote", "onebit", "dgc"])
def test_zero_has_slices_of_the_same_sums(world: World, form: str) -> None:
    """Compare bits if sums are returned in full, or are encoded without loss."""
    whole, cut = made(world, deck_of(form)), made(world, deck_of(form, "layout.zero=1"))
    assert [step.loss for step in cut.train(5)] == [step.loss for step in whole.train(5)]
    assert same(whole, cut)


LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pipeline": (("layout.pipeline=2",), ("sign", "topk")),
    "pipeline, cut": (("layout.pipeline=2", "layout.zero=1"), ("int8", "onebit")),
    "tensor": (("layout.tensor=2", "layout.zero=1"), ("sign", "vote")),
    "context": (("layout.context=2",), ("onebit",)),
    "experts": ((*LLAMA, "model.experts.count=4", "layout.expert=2", "layout.zero=1"), ("int8", "dgc")),
    "frozen, halves": (
        ('model.frozen=["blocks.0.*"]', "precision.compute=bf16", "precision.gradients=compute"),
        ("bf16", "vote", "onebit", "dgc"),
    ),
}


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_stay_equal_on_any_layout(world: World, layout: str) -> None:
    """Padding of the vocabulary and after parameters remains zero, too."""
    keys, forms = LAYOUTS[layout]
    for form in forms:
        training = made(world, deck_of(form, *keys, warmup=3))
        before = {name: values.clone() for name, values in training.parameters().items()}
        losses = [step.loss for step in training.train(6)]
        engine = training.engine
        check_replicas(engine.stage.buckets, world.everyone)
        assert losses[-1] < losses[0], (form, losses)
        after = training.parameters()
        for bucket in engine.stage.buckets:
            assert not any(bucket.values[gap].any() for gap in bucket.layout.gaps)  # type: ignore[index]
            for segment in bucket.segments:
                shard = segment.parameter.shard
                trained = segment.parameter.requires_grad
                if not shard.name.endswith("key.bias"):  # which the loss does not depend on
                    assert trained != torch.equal(after[shard.name], before[shard.name]), shard.name
                assert not after[shard.name][shard.extent[0] :].any(), (form, shard.name)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("form", ["sign", "onebit", "dgc"])
def test_residuals_follow_the_loss_scale(world: World, form: str) -> None:
    """Steps that overflow leave finite state. Later steps are like those in single precision."""
    keys = (
        "precision.compute=fp16",
        "precision.initial_loss_scale=16777216",
        "precision.loss_scale_window=4",
    )
    training = made(world, deck_of(form, *keys))
    skipped = [step.skipped for step in training.train(14)]
    assert skipped[0] and not all(skipped[-4:]), skipped
    plain = made(world, deck_of(form))
    plain.train(14 - sum(skipped))
    kept, expected = (
        sum(float(t.values.double().norm()) for t in each.engine.state() if t.kind.startswith("reducer/"))  # type: ignore[union-attr]
        for each in (training, plain)
    )
    assert 0.2 < kept / training.engine.control.loss_scale.value / expected < 5


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("form", "zero"), list(zip(FORMS, cycle((1, 0)))))
def test_planned_state_is_the_measured_one(world: World, form: str, zero: int) -> None:
    training = made(world, deck_of(form, f"layout.zero={zero}"))
    planned = plan_memory(training.deck, world.size, 61).stages[0].memory
    ledger = MemoryLedger(training, plan_memory(training.deck, 2, 61), Path())
    held = ledger.measure().optimizer
    less = (
        BLOCK * 4 * len(training.engine.stage.buckets)
    )  # where blocks cannot be shared evenly, the first has more
    assert held == planned.optimizer or (world.rank and planned.optimizer - less <= held < planned.optimizer)
    without = plan_memory(small_deck(*exact_of(form, f"layout.zero={zero}")), world.size, 61).stages[0].memory
    states = [t for t in training.engine.state() if t.kind.startswith("reducer/")]
    assert (planned.optimizer > without.optimizer) == bool(states) == (form != "vote")
    assert planned.buffer > without.buffer


def moved(world: World, keys: Sequence[str]) -> tuple[Trainer, dict[str, int]]:
    """Return the bytes of a compressed step by operation of the data ranks."""
    training = made(world, keys)
    world.ledger.reset()
    training.train(1)
    bytes_of: dict[str, int] = defaultdict(int)
    for row in world.ledger.rows():
        if row.axis == "data x context":
            bytes_of[row.operation] += row.bytes
    return training, dict(bytes_of)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("form", "bits", "scale"), [("bf16", 16, 0), ("int8", 8, 4), ("sign", 1, 4)])
def test_bytes_are_those_of_the_closed_form(world: World, form: str, bits: int, scale: int) -> None:
    training, bytes_of = moved(world, deck_of(form, warmup=0))
    lengths = [s.length for bucket in training.engine.stage.buckets for s in bucket.segments]
    # No parameter of this model ends within a byte.
    every = sum(length * bits // 8 + scale * -(-length // BLOCK) for length in lengths)
    of_ranks = sum(int(n) for n in world.everyone.all_gather(torch.tensor([bytes_of["all_to_all"]])))
    assert of_ranks == every * (world.size - 1)
    assert bytes_of["all_gather"] == every
    assert set(bytes_of) == {"all_to_all", "all_gather"}


@pytest.mark.mpi(min_size=2)
def test_top_k_sends_elements_and_indices(world: World) -> None:
    training, bytes_of = moved(world, deck_of("topk", warmup=0))
    lengths = [s.length for bucket in training.engine.stage.buckets for s in bucket.segments]
    assert bytes_of == {"all_gather": 8 * world.size * sum(ceil(0.1 * length) for length in lengths)}
