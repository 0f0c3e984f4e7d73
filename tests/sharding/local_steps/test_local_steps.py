"""Compare replicas with local steps with runs of one rank and with formulas.

Tests of sharding/local_steps/local_steps.py, and of what steps, plans, checks and checkpoints know of
replicas.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import state_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.memory.scratch import storage_bytes
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.sharding.local_steps.local_steps import LocalSteps
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import LayoutError, verify_layout
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.sharding.local_steps.replicas import Expected, outer_of, singles

REPLICAS = "layout.local_steps.replicas=2"
CLIP = "optimizer.clip=0.1"
DILOCO = ("layout.local_steps.outer=diloco", REPLICAS, CLIP)
CALM = "optimizer.epsilon=1e-3"
"""With a smaller epsilon, AdamW makes steps with gradients that are mostly rounding errors."""


def keys(**values: object) -> tuple[str, ...]:
    """Return keys of [communication]."""
    return tuple(f"communication.{name}={value}" for name, value in values.items())


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    """Return parameters without the biases of keys, whose gradients are rounding errors only."""
    for name, values in found.items():
        if name.endswith("attention.key.bias"):
            continue
        torch.testing.assert_close(values, expected[name], rtol=rtol, atol=rtol, msg=name)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, values in found.items() if not torch.equal(values, expected[name])] == []


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("blend", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1])
def test_delayed_and_blended_fragments_are_as_expected(world: World, delay: int, blend: float) -> None:
    """Test streaming DiLoCo with two fragments, each in every third step, one step after the other."""
    deck = small_deck(*DILOCO, CALM, *keys(local_steps=3, fragments=2, delay=delay, blend=blend))
    training = trainer(world, deck, masked=0.0)
    expected = Expected(deck, singles(world, deck, training.step.batches, 2))
    for step in range(8):
        training.train_step()
        expected.train_step()
        assert_close(training.parameters(), expected.runs[world.rank].parameters(), 1e-6)
        if step in {4, 7}:
            assert_close(outer_of(training), expected.outer, 1e-6)
            assert_close(training.parameters(), expected.runs[world.rank].parameters(), 1e-6)
    mine, theirs = (run.parameters() for run in expected.runs)
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_local_sgd_is_the_mean_of_runs_of_one_rank(world: World, zero: int) -> None:
    """Until the first synchronization, replicas have the bits of runs of one rank."""
    deck = small_deck(REPLICAS, CLIP, CALM, f"layout.zero={zero}", *keys(local_steps=3))
    training = trainer(world, deck, masked=0.0)
    expected = Expected(deck, singles(world, deck, training.step.batches, 2))
    for step in range(1, 5):
        figures = training.train_step().metrics
        expected.train_step()
        if step < 3:
            assert_equal(training.parameters(), expected.runs[world.rank].parameters())
            assert "replica_distance" not in figures
        elif step == 3:
            assert_close(training.parameters(), expected.outer, 1e-6)
            assert figures["replica_distance"] > 0 < figures["outer_gradient_norm"]


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    "layout",
    ["layout.tensor=2", "layout.pipeline=2", "layout.context=2", *(f"layout.zero={n}" for n in (0, 1, 2, 3))],
)
def test_replicas_of_two_ranks_train_as_those_of_one(world: World, layout: str) -> None:
    streaming = keys(local_steps=2, fragments=2, delay=1, blend=0.25)
    deck = small_deck(*DILOCO, *streaming, layout, "batch.global_size=16")
    training = trainer(world, deck, masked=0.0)
    expected = Expected(deck, singles(world, deck, training.step.batches, 2))
    for _ in range(5):
        training.train_step()
        expected.train_step()
    shards = {
        s.parameter.shard.name: s.parameter.shard for b in training.engine.stage.buckets for s in b.segments
    }
    whole = {name: shard.take(expected.outer[name]) for name, shard in shards.items()}
    assert_close(outer_of(training), whole, 2e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_one_local_step_of_sgd_is_data_parallel(world: World) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.clip=0")
    one = keys(outer="diloco", outer_learning_rate=1.0, outer_momentum=0.0)
    apart = trainer(world, small_deck(*sgd, *one, REPLICAS))
    plain = trainer(world, small_deck(*sgd))
    for _ in range(4):
        assert apart.train_step().loss == pytest.approx(plain.train_step().loss, rel=1e-5)
    assert_close(apart.parameters(), plain.parameters(), 1e-5)


@pytest.mark.mpi(min_size=1, max_size=1)
def test_one_replica_with_outer_rate_1_trains_as_without_replicas(world: World) -> None:
    one = keys(outer="diloco", outer_learning_rate=1.0, outer_momentum=0.0, local_steps=2)
    apart, plain = trainer(world, small_deck(*one)), trainer(world, small_deck())
    assert isinstance(apart.engine.stage.replica_sync, LocalSteps) and isinstance(
        plain.engine.stage.replica_sync, SyncEveryStep
    )
    for _ in range(6):
        assert apart.train_step().loss == pytest.approx(plain.train_step().loss, rel=1e-5)
    assert_close(apart.parameters(), plain.parameters(), 1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_replicas_are_data_parallel_in_the_warm_up(world: World) -> None:
    """In the warm-up of post-local SGD all replicas have the same bits; afterwards they diverge."""
    plain = trainer(world, small_deck(CLIP))
    apart = trainer(world, small_deck(*DILOCO, *keys(local_steps=2, warmup=3)))
    for _ in range(3):
        assert apart.train_step() == plain.train_step()
        assert_equal(apart.parameters(), plain.parameters())
        assert_equal(outer_of(apart), plain.parameters())
    apart.engine.world.ledger.reset()
    apart.train_step()  # the fourth one: a step by itself, and the first outer one
    assert sent(apart) == 2 * 4 * elements(apart)


def sent(training: Trainer) -> int:
    """Return the bytes between replicas since the ledger was reset."""
    return sum(row.bytes for row in training.engine.world.ledger.rows() if row.axis == "replicas")


def elements(training: Trainer) -> int:
    """Return the number of elements that this rank owns, including padding."""
    return sum(bucket.owned_slice.stop - bucket.owned_slice.start for bucket in training.engine.stage.buckets)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("more", "every"),
    [((), 4.0), (("outer_format=bf16",), 2.0), (("outer_format=int8",), 1.0), (("outer_format=int4",), 0.5)],
)
def test_bytes_between_replicas(world: World, more: tuple[str, ...], every: float) -> None:
    """Every H steps 2 N b in fp32. Codes pass twice, but for those that a rank sums itself, with 4 bytes for
    each 256 values of a parameter.
    """
    several = keys(local_steps=3, bucket_bytes=1000000)
    deck = small_deck(*DILOCO, *several, *(f"communication.{key}" for key in more))
    training = trainer(world, deck)
    training.engine.world.ledger.reset()
    training.train(6)
    syncs, ranks = 2, 2
    total = sum(world.everyone.all_gather_object(sent(training)))
    if every == 4:
        assert total == syncs * ranks * 2 * 4 * elements(training)
        return
    replica_sync = training.engine.stage.replica_sync
    assert isinstance(replica_sync, LocalSteps)
    lengths = [each for pieces in replica_sync.fragments for piece in pieces for each in piece.lengths]
    assert sum(lengths) == elements(training)
    scales = [4 * -(-length // 256) if every < 2 else 0 for length in lengths]
    assert total == syncs * (2 * ranks - 1) * (every * sum(lengths) + sum(scales))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_formats_with_fewer_bits_train_nearly_the_same(world: World, form: str) -> None:
    """All replicas have the same outer model, which differs from that of exact sums."""
    exact = trainer(world, small_deck(*DILOCO, *keys(local_steps=2, delay=1)))
    short = trainer(world, small_deck(*DILOCO, *keys(local_steps=2, delay=1, outer_format=form)))
    losses = [step.loss for step in exact.train(7)]
    assert [step.loss for step in short.train(7)] == pytest.approx(losses, rel=0.02)
    found = outer_of(short)
    assert any(not torch.equal(values, outer_of(exact)[name]) for name, values in found.items())
    for name, values in found.items():
        one, other = world.everyone.all_gather(values[None])
        assert torch.equal(one, other), name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_evaluation_uses_the_outer_model(world: World, compute: str) -> None:
    deck = small_deck(*DILOCO, *keys(local_steps=4), f"precision.compute={compute}")
    training = trainer(world, deck)
    training.train(2)
    outer, before = outer_of(training), training.parameters()
    before = {name: values.clone() for name, values in before.items()}
    assert any(not torch.equal(values, outer[name]) for name, values in before.items())
    found = training.evaluate(training.step.batches, 8)["loss"]
    assert_equal(training.parameters(), before)
    plain = trainer(world, small_deck(f"precision.compute={compute}"))
    for name, values in plain.parameters().items():
        values.copy_(outer[name])
    assert found == plain.evaluate(plain.step.batches, 8)["loss"]


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("layout", [(), ("layout.zero=2",), ("layout.tensor=2",)])
def test_a_replica_has_the_same_samples_on_any_layout(world: World, layout: tuple[str, ...]) -> None:
    """Micro-batches are distributed in turn, for any number of ranks of a replica."""
    if world.size == 2 and "layout.tensor=2" in layout:
        pytest.skip("no two replicas of these")
    deck = small_deck(*DILOCO, *keys(local_steps=2), *layout, "batch.micro_size=2", "batch.global_size=16")
    training = trainer(world, deck)
    step, state, read = training.step, training.state, []
    for number, micro in enumerate(step.batches.step(state.samples, 16, *step.share, 2)):
        first = step.first_sample(state, number)
        read += list(range(first, first + len(micro.tokens)))
    everyone = world.everyone.all_gather_object((training.engine.stage.replica[0], read))
    for replica in range(2):
        samples = {sample for of, theirs in everyone for sample in theirs if of == replica}
        assert samples == {sample for sample in range(16) if sample // 2 % 2 == replica}


def saved(deck: Deck, training: Trainer) -> Path:
    checkpoints = Checkpoints(deck, training.engine, {})
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    return checkpoints.newest


def restored(world: World, deck: Deck, path: Path) -> Trainer:
    training = trainer(world, deck)
    training.state = Checkpoints(deck, training.engine, {}).restore(path)
    return training


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "before", [(), keys(local_steps=4, delay=1), keys(local_steps=4, fragments=2, delay=2)]
)
def test_unsent_fragments_have_no_effect(world: World, mpi_tmp_path: Path, before: tuple[str, ...]) -> None:
    """After 5 steps, resume with a delay of 3: a fragment sent after step 4 would be due after step 7."""
    folder = f"run.dir={mpi_tmp_path}"
    first = trainer(world, small_deck(*(DILOCO if before else ()), *before, folder))
    first.train(5)
    path = saved(small_deck(*(DILOCO if before else ()), *before, folder), first)
    losses = []
    for delay in (0, 3):
        deck = small_deck(*DILOCO, *keys(local_steps=4, delay=delay), folder)
        training = restored(world, deck, path)
        losses.append([each.loss for each in training.train(3)])
        assert training.engine.stage.replica_sync.in_flight == ({"0/1": 8} if delay else {})
    assert losses[0] == losses[1]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("steps", "form"), [(1, "fp32"), (2, "int8"), (3, "fp32"), (4, "int8")])
def test_a_run_goes_on_bit_for_bit(world: World, mpi_tmp_path: Path, steps: int, form: str) -> None:
    """Resume between synchronizations, and with one in flight."""
    timing = keys(local_steps=4, fragments=2, delay=2, outer_format=form)
    deck = small_deck(*DILOCO, *timing, f"run.dir={mpi_tmp_path}", "layout.zero=1")
    training = trainer(world, deck)
    training.train(steps)
    path = saved(deck, training)
    # A block's synchronization begins after 2 or 4 steps, and is over 2 steps later.
    begun = {"blocks.1": steps in {2, 3}, "blocks.0": steps == 4}
    for tensor in training.engine.state():
        block = ".".join(tensor.shard.name.split(".")[:2])
        if tensor.kind == "streaming/outer_gradient" and block in begun:
            assert begun[block] or not tensor.values.any(), tensor.shard.name
            some = tensor.values.numel() and tensor.shard.name.endswith(".value.weight")
            assert not (begun[block] and some) or tensor.values.any(), tensor.shard.name
    again = restored(world, deck, path)
    assert_equal(again.parameters(), training.parameters())
    assert again.train(5) == training.train(5)
    assert_equal(again.parameters(), training.parameters())
    assert_equal(outer_of(again), outer_of(training))


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("form", ["int8", "powersgd"])
def test_replicas_compress_their_own_sums(world: World, mpi_tmp_path: Path, form: str) -> None:
    """Each replica has residuals of its ranks and of its sums, and sends none to others."""
    more = (*DILOCO, *keys(local_steps=3), "batch.global_size=16", f"run.dir={mpi_tmp_path}")
    exact = trainer(world, small_deck(*more))
    deck = small_deck(*more, f"communication.compress={form}")
    training = trainer(world, deck)
    losses = [step.loss for step in exact.train(4)]
    assert [step.loss for step in training.train(4)] == pytest.approx(losses, rel=0.05)
    again = restored(world, deck, saved(deck, training))
    training.engine.world.ledger.reset()
    assert again.train(1) == training.train(1)
    assert sent(training) == 0
    assert again.train(2) == training.train(2)
    assert_equal(again.parameters(), training.parameters())


@pytest.mark.mpi(min_size=2, max_size=2)
def test_another_number_of_replicas_starts_from_the_outer_model(world: World, mpi_tmp_path: Path) -> None:
    """A single remaining replica continues with weights, momentum and rate; so do two that follow it."""
    more = (*DILOCO, *keys(local_steps=4), f"run.dir={mpi_tmp_path}")
    two = small_deck(*more)
    one = two.with_keys(layout={"local_steps.replicas": 1})
    training = trainer(world, two)
    training.train(6)
    path, outer = saved(two, training), outer_of(training)
    momentum = velocity(training)
    assert any(bool(flat.any()) for flat in momentum)

    alone = restored(world.single_rank_world(), one, path)
    assert_equal(alone.parameters(), outer)
    assert_equal(outer_of(alone), outer)
    assert all(torch.equal(*pair) for pair in zip(velocity(alone), momentum, strict=True))
    assert alone.state.step == 6
    alone.train(1)
    outer, momentum = outer_of(alone), velocity(alone)
    later = Path(world.everyone.broadcast_object(str(saved(one, alone)) if world.rank == 0 else ""))
    world.everyone.barrier()

    joined = restored(world, two, later)
    assert_equal(joined.parameters(), outer)
    assert all(torch.equal(*pair) for pair in zip(velocity(joined), momentum, strict=True))
    rates = [joined.train_step().learning_rate, alone.train_step().learning_rate]
    assert rates[0] == rates[1]


def velocity(training: Trainer) -> list[torch.Tensor]:
    return [
        tensor.values.clone() for tensor in training.engine.state() if tensor.kind == "outer/momentum"
    ]  # of one data rank, whose state is cut nowhere


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_plans_predict_the_state_of_replicas(world: World, zero: int) -> None:
    timing = keys(local_steps=4, fragments=2, delay=1)
    for more in ((), timing):
        deck = small_deck(*DILOCO, f"layout.zero={zero}", *(more or keys(local_steps=2)))
        engine = trainer(world, deck).engine
        planned = plan_memory(deck, world.size, 61).stages[0].memory
        assert planned.optimizer == state_bytes(engine.state(), engine.stage.buckets)
        own = 4 * sum(bucket.owned_slice.stop - bucket.owned_slice.start for bucket in engine.stage.buckets)
        moments = storage_bytes(
            [flat for s in engine.stage.optimizer.states for flat in list(s.values())[1:]]
        )
        assert planned.optimizer == moments + own * (3 if more else 2)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ["layout.zero=0", "layout.zero=1"])
def test_offloaded_state_makes_the_same_steps(world: World, mpi_tmp_path: Path, layout: str) -> None:
    deck = (*DILOCO, *keys(local_steps=2, fragments=2, delay=1), "precision.compute=bf16", layout)
    plain = trainer(world, small_deck(*deck))
    disk = ("memory.optimizer=disk", "memory.offload_buffer=12000", f"memory.offload_dir={mpi_tmp_path}")
    files = trainer(world, small_deck(*deck, *disk))
    assert files.train(5) == plain.train(5)
    assert_equal(outer_of(files), outer_of(plain))
    assert_equal(files.parameters(), plain.parameters())
    files.engine.close()


@pytest.mark.mpi(min_size=2, max_size=4)
def test_layouts_with_replicas_are_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = (*LLAMA, "model.experts.count=4", "layout.expert=2", "batch.global_size=16")
    for more in (("layout.zero=1",), experts if world.size == 4 else ("layout.zero=2",)):
        deck = small_deck(*DILOCO, *keys(local_steps=5), *more)
        assert "layout check passed" in verify_layout(deck, world, make_mesh(deck, world))
    monkeypatch.setattr(SyncEveryStep, "before_update", lambda *_: None)
    with pytest.raises(LayoutError, match="gradient of"):
        verify_layout(deck, world, make_mesh(deck, world))
