"""Plans of memory: equal to the byte to what runs hold, and to the closed forms of ZeRO's paper.

Tests of plan/memory_plan.py, plan/stages_on_meta.py, plan/step_on_meta.py and plan/activation_memory.py, and
of train/memory_ledger.py beside them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import pool_bytes
from hpctrain.costs.reduction_bytes import synchronizer_bytes
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import storage_bytes
from hpctrain.plan import memory_plan
from hpctrain.plan.memory_plan import MemoryPlan, plan_memory
from hpctrain.plan.plan_text import KINDS
from hpctrain.plan.savings import find_savings
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.state import MASTER
from hpctrain.train.control import StepDecision
from hpctrain.train.memory_ledger import MemoryLedger
from hpctrain.units import format_bytes
from tests.engines import LLAMA, Trainer, small_deck, trainer

VOCABULARY = 61


SLICED = ("memory.accumulate=sliced",)
MORE = {2: (SLICED,), 3: (SLICED, ("memory.keep_gathered=1",), ("memory.recompute=sqrt", "model.layers=4"))}
DUAL = ("layout.pipeline=2", "layout.schedule=dualpipe-v", "model.layers=4")


STATES = {"optimizer": 8, "gradient": 4, "parameter": 4}


def plan(ranks: int, *overrides: str) -> MemoryPlan:
    return plan_memory(small_deck(*overrides), ranks, VOCABULARY)


def layouts(ranks: int) -> list[tuple[str, ...]]:
    """What so many ranks can be the first to try, and for ZeRO the layout of data ranks alone."""
    found: list[tuple[str, ...]] = [()]
    if ranks in {2, 3}:
        found += [
            ("layout.pipeline=2",),
            DUAL,
            ("layout.tensor=2", *LLAMA),
        ]
    if ranks >= 4:
        found += [
            ("layout.tensor=2", "layout.sequence_parallel=true"),
            ("layout.tensor=4", *LLAMA, "model.tied=true"),
            ("layout.context=2", "precision.compute=bf16"),
            ("layout.pipeline=2", "layout.schedule=zb-h1"),
            ("layout.zero_group=2",),
        ]
    return found


def part_of_node(bucket: Bucket) -> int:
    """Bytes of a bucket's parameters in memory, divided by the ranks of its group for which that is one."""
    group, values = bucket.sharding.group, bucket.owned_values
    assert isinstance(values, Tensor)
    storage = values.untyped_storage()
    place = None
    if isinstance(group.host, SharedTransport):
        begin = values.storage_offset() * values.element_size()
        found = group.host.memory.find(values)
        place = found and (found.owner, found.offset - begin)
    everybody = group.all_gather_object(place)
    return storage.nbytes() // (everybody.count(everybody[group.rank]) if place else 1)


def held(training: Trainer) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, optimizer state and turns of a rank between two steps, these with what
    sums of gradients receive. Collective.
    """
    buckets, moments = training.engine.stage.buckets, training.engine.stage.optimizer.states
    values = [bucket.owned_values for bucket in buckets]
    gradients = [bucket.owned_gradients for bucket in buckets]
    segments = [segment for bucket in buckets for segment in bucket.segments]
    lookups = [each for segment in segments for each in segment.parameter.lookup_gradients]
    optimizer = [tensor for m in moments for name, tensor in m.items() if name != MASTER]
    if values[0].dtype != torch.float32:
        optimizer += [m[MASTER] for bucket, m in zip(buckets, moments, strict=True) if bucket.trained]
    return (
        sum(map(part_of_node, buckets)),
        storage_bytes([*gradients, *lookups]),
        storage_bytes(optimizer),
        pool_bytes(buckets) + synchronizer_bytes(training.engine.stage.synchronizer),
    )


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_and_turns_are_those_of_a_run(world: World, stage: int) -> None:
    for layout in layouts(world.size):
        for more in ((), *MORE.get(stage, ())):
            if more and (layout not in {(), DUAL} or world.size > 2):
                continue
            if stage == 0 and "layout.zero_group=2" in layout:
                continue
            model_ranks = {"layout.tensor=4": 4, "layout.tensor=2": 2, "layout.pipeline=2": 2}
            if stage == 3 and world.size == model_ranks.get((*layout, "")[0], 1):
                continue  # no ranks to cut over
            deck = small_deck(*layout, *more, f"layout.zero={stage}")
            training = trainer(world, deck)
            training.train(2)
            planned = plan_memory(deck, world.size, VOCABULARY)
            here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
            found = (here.parameter, here.gradient, here.optimizer)
            ours = held(training)
            assert found == ours[:3], (layout, more)
            messages = here.buffer - ours[3]
            assert messages == (0 if len(planned.stages) == 1 else 3 * hidden_bytes(deck)), (layout, more)


def hidden_bytes(deck: Deck) -> int:
    return deck.batch.sequence * deck.batch.micro_size * deck.model.hidden * 4


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "sqrt"])
def test_activations_are_those_that_are_kept(world: World, recompute: str) -> None:
    for layout in layouts(world.size):
        if "layout.zero_group=2" in layout:
            continue  # groups of ZeRO keep no activations
        expect_activations(world, small_deck(*layout, f"memory.recompute={recompute}", "model.dropout=0.1"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("activation", ["geglu", "relu2"])
def test_activations_of_other_feed_forwards_are_those_that_are_kept(
    world: World, family: tuple[str, ...], activation: str
) -> None:
    keys = (*family, f"model.activation={activation}", "machine.compile=true")
    for recompute in ("none", "full"):
        expect_activations(world, small_deck(*keys, f"memory.recompute={recompute}"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("normed", ["none", "head"])
def test_activations_of_windows_caps_and_sinks_are_those_that_are_kept(
    world: World, compiled: str, normed: str
) -> None:
    bounds = ("model.windows=[5, 0]", "model.attention_cap=2", "model.attention_sinks=true")
    keys = (*LLAMA, *bounds, f"machine.compile={compiled}", f"model.query_key_norm={normed}")
    for recompute in ("none", "selective"):
        expect_activations(world, small_deck(*keys, f"memory.recompute={recompute}"))


def expect_activations(world: World, deck: Deck) -> None:
    """Plan and count of what a rank keeps agree to 1%."""
    training = trainer(world, deck)
    engine = training.engine
    planned = plan_memory(deck, world.size, VOCABULARY, schedule=engine.schedule)
    training.train(1)
    here = planned.stages[engine.mesh.coordinate("pipeline")].memory
    engine.close()
    assert training.activations.bytes == pytest.approx(here.activation, rel=0.01), deck.layout


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_activations_of_split_backward_are_those_that_are_kept(world: World, family: tuple[str, ...]) -> None:
    """What waits for W is kept by the queue of weight gradients, not by autograd."""
    for schedule in ("zb-h1", "zb-h2", "zb-v"):
        for more in (
            (),
            ("memory.recompute=full",),
            ("memory.recompute=selective",),
            ("memory.recompute=selective", "model.dropout=0.1"),
            ("model.tied=false", "batch.global_size=32"),
        ):
            layout = ("layout.pipeline=2", f"layout.schedule={schedule}", "model.layers=4")
            expect_activations(world, small_deck(*family, *layout, *more))


@pytest.mark.sampled(2)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "sqrt", "2"])
def test_activations_of_blocks_of_two_kinds_are_those_that_are_kept(
    world: World, two_kinds: None, recompute: str
) -> None:
    layouts: list[tuple[str, ...]] = [("model.layers=12",), ("model.layers=12", *LLAMA)]
    if world.size > 1:
        schedules = ("1f1b", "zb-h1", "zb-v")
        layouts = [("model.layers=8", "layout.pipeline=2", f"layout.schedule={each}") for each in schedules]
    for layout in layouts:
        expect_activations(world, small_deck(*layout, f"memory.recompute={recompute}"))


def test_stages_of_as_many_blocks_hold_what_their_kinds_do(two_kinds: None) -> None:
    _, wide, narrow, _ = plan(4, "layout.pipeline=4", "model.layers=4", "layout.schedule=gpipe").stages
    assert (wide.blocks, narrow.blocks) == (1, 1)
    assert wide.parameters > narrow.parameters
    assert wide.memory.activation > narrow.memory.activation
    assert wide.memory.other > narrow.memory.other


def test_malloc_keeps_freed_memory_between_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with_heap = plan(1).stages[0].memory
    monkeypatch.setattr(memory_plan, "can_build_tensor_heap", lambda: False)
    with_malloc = plan(1).stages[0].memory
    assert with_malloc == replace(with_heap, other=with_heap.other + with_heap.activation // 4)


@pytest.mark.parametrize(("hidden", "staged"), [(64, 2 * (4 << 20)), (16, 0)])
def test_tensor_ranks_of_a_node_copy_sums_through_shared_memory(hidden: int, staged: int) -> None:
    """Two rounds of 4 MB, where a sum of 2,048 tokens has at least 256 KB."""
    keys = (*LLAMA, "layout.tensor=2", f"model.hidden={hidden}", "batch.sequence=512", "batch.micro_size=4")
    together, apart = (
        plan_memory(small_deck(*keys), 2, VOCABULARY, ranks_per_node=count).stages[0].memory
        for count in (2, 1)
    )
    assert together.other - apart.other == staged


ONE_BUCKET = ("communication.bucket_bytes=10 MB",)
HALF = ("precision.compute=bf16", "precision.gradients=compute")
WIDE = ("precision.compute=bf16", "model.hidden=64", "batch.micro_size=8")
SUMS = {
    2: {
        "MPI's own": (*ONE_BUCKET,),
        "slices": (*ONE_BUCKET, "layout.zero=1"),
        "slices of MPI's own": (*ONE_BUCKET, "layout.zero=2", "model.layers=1"),
        "16 bits": (*ONE_BUCKET, *HALF),
        "little of 16 bits": (*ONE_BUCKET, *HALF, "model.hidden=8"),
        "of input gradients": ("layout.tensor=2", *WIDE),
        "of their slices": ("layout.tensor=2", "layout.sequence_parallel=true", *WIDE),
        "looked at": (*ONE_BUCKET, "stability.corruption=full"),
    },
    4: {
        "whole": (*ONE_BUCKET,),
        "slices": (*ONE_BUCKET, "layout.zero=2"),
        "of input gradients": ("layout.tensor=4", *WIDE),
    },
}


@pytest.mark.mpi(min_size=2, max_size=4)
def test_what_sums_receive_is_planned(world: World, tmp_path: Path) -> None:
    """Of models so small that of some MPI's own sums are quicker, which need nothing."""
    found = {}
    for name, keys in SUMS[world.size].items():
        deck = small_deck(*keys)
        training, planned = trainer(world, deck), plan_memory(deck, world.size, VOCABULARY)
        scratch = world.groups.scratch
        scratch._free.clear()
        scratch.bytes = scratch.peak_bytes = 0
        training.train(1)
        held = MemoryLedger(training, planned, tmp_path).measure()
        assert held.buffer == planned.stages[0].memory.buffer, name
        found[name] = world.buffer_bytes
    none = {"MPI's own", "slices of MPI's own", "little of 16 bits"}
    assert {name for name, size in found.items() if not size} == none & {*found}


@pytest.mark.mpi(min_size=2, max_size=4)
def test_the_table_after_a_run_is_of_one_stage(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that which holds most, whichever interpreter happens to be larger."""
    deck = small_deck("layout.pipeline=2", "layout.schedule=1f1b", "model.layers=4", "model.tied=false")
    training, planned = trainer(world, deck), plan_memory(deck, world.size, VOCABULARY)
    training.train(1)
    ledger = MemoryLedger(training, planned, mpi_tmp_path)
    own, fullest = ledger.measure(), planned.largest
    by_chance = 0 if training.stage == fullest.stage else 1 << 40
    monkeypatch.setattr(ledger, "measure", lambda: replace(own, other=by_chance))
    ledger.at_end(StepDecision())
    head, *rows = (line.split("  ") for line in ledger.table())
    assert head[0] == f"memory of a rank of stage {fullest.stage}"
    for kind in ("parameter", "gradient", "optimizer", "activation"):
        sizes = [stage.memory.kinds()[kind] for stage in planned.stages]
        (told,) = ([cell.strip() for cell in row if cell] for row in rows if row[0] == KINDS[kind])
        assert told[1:3] == [format_bytes(sizes[fullest.stage])] * 2 and len({*sizes}) == 2, kind


FROZEN = {
    "first blocks": 'model.frozen=["embedding.*", "blocks.0.*", "blocks.1.*"]',
    "middle": 'model.frozen=["blocks.1.*", "final_norm.*"]',
    "all blocks": 'model.frozen=["embedding.*", "blocks.*"]',
    "embedding": 'model.frozen=["embedding.*"]',
    "all but adapters": "model.adapters.rank=3",
    "all but adapters of the last block": 'model.adapters.targets=["blocks.3.*"]',
}


@pytest.mark.sampled(2)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_models_are_planned_as_they_are(world: World, which: str) -> None:
    layouts: list[tuple[str, ...]] = [("layout.zero=0",), ("layout.zero=1", "memory.recompute=2")]
    if world.size > 1:
        layouts += [("layout.zero=3",), ("layout.zero=3", "memory.recompute=full")]
        layouts += [
            ("layout.pipeline=2", "layout.schedule=1f1b"),
            ("layout.pipeline=2", "layout.schedule=zb-h1"),
        ]
    for layout in layouts:
        deck = small_deck(*layout, FROZEN[which], "model.layers=4", "model.tied=false")
        training = trainer(world, deck)
        training.train(2)
        planned = plan_memory(deck, world.size, VOCABULARY)
        here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
        messages = 0 if len(planned.stages) == 1 else 3 * hidden_bytes(deck)
        found = (here.parameter, here.gradient, here.optimizer, here.buffer - messages)
        assert found == held(training), layout
        expect_activations(world, deck)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
def test_what_is_gathered_in_8_bits_is_planned_as_it_is(world: World, recipe: str) -> None:
    """Delayed scaling gathers 16 bits in its first step, and keeps their memory."""
    wide = ("model.hidden=64", "layout.zero=3", "precision.compute=fp8", f"precision.fp8={recipe}")
    wide += ("communication.transport=mpi",)  # in the memory of a node nothing else has to be gathered
    taken = []
    for more in ((), ("precision.fp8_gather=true",)):
        deck = small_deck(*wide, *more)
        training = trainer(world, deck)
        training.train(2)
        here = plan_memory(deck, world.size, VOCABULARY).stages[0].memory
        parameters, *_, turns = held(training)
        assert (here.parameter, here.buffer) == (parameters, turns)
        taken.append(turns)
    block = max(bucket.layout.used_length for bucket in training.engine.stage.buckets)
    # Of a block and of the next one a byte of two.
    assert taken[0] - taken[1] == pytest.approx(2 * block if recipe == "tensor" else 0, rel=0.1)


@pytest.mark.parametrize(
    ("model", "ranks", "gigabytes"),
    [
        ("gpt-7.5b", 64, (31.4, 16.6, 1.88)),
        ("gpt-128b", 64, (536, 284, 32)),
        ("gpt-1t", 64, (4187, 2218, 250)),
        ("gpt-1t", 1024, (None, None, 15.6)),
    ],
)
def test_model_states_are_those_of_the_zero_paper(
    model: str, ranks: int, gigabytes: tuple[float | None, ...]
) -> None:
    """Table 1 of arXiv 1910.02054, to its last digit."""
    for stage, published in enumerate(gigabytes, 1):
        if published is not None:
            deck = read_deck(f"inputs/plan/{model}.toml", [f"layout.zero={stage}"], ranks)
            memory = plan_memory(deck, ranks, deck.model.vocabulary).stages[0].memory
            states = (memory.parameter + memory.gradient + memory.optimizer) / 1e9
            assert f"{states:.{decimals(published)}f}" == str(published), (model, stage)


def decimals(number: float) -> int:
    return len(str(number).partition(".")[2])


def test_states_of_fp32_are_16_bytes_a_parameter() -> None:
    for stage, cut in enumerate([(), ("optimizer",), ("optimizer", "gradient"), (*STATES,)]):
        sizes = (f"layout.zero={stage}", "communication.bucket_bytes=1 GB")
        planned = plan(4, *sizes, "communication.transport=mpi")
        (only,) = planned.stages
        assert only.parameters == planned.parameters_total
        for kind, each in STATES.items():
            expected = only.parameters * each / (4 if kind in cut else 1)
            assert only.memory.kinds()[kind] == pytest.approx(expected, rel=0.05), (stage, kind)
        (once,) = plan(4, *sizes).stages
        whole = only.parameters * STATES["parameter"] / (4 if stage else 1)
        assert once.memory.parameter == pytest.approx(whole, rel=0.05), stage
        assert once.sharers == (4 if stage else 1) and only.sharers == 1


@pytest.mark.parametrize(
    ("ranks", "per_node", "keys", "sharers"),
    [
        (4, 2, ("layout.zero=2", "layout.zero_group=2"), 2),
        (4, 3, ("layout.zero=2", "layout.zero_group=2"), 1),
        (6, 4, ("layout.zero=2", "layout.zero_group=3", "batch.global_size=12"), 1),
        (4, 3, ("layout.zero=1", "layout.local_steps.replicas=2"), 1),
        (4, 3, ("layout.zero=2", "layout.tensor=2"), 1),
        (6, 3, ("layout.zero=3", "layout.pipeline=3"), 1),
    ],
)
def test_who_has_parameters_in_common_with_fewest_is_planned(
    ranks: int, per_node: int, keys: tuple[str, ...], sharers: int
) -> None:
    """Where nodes cut groups unevenly others have fewer in common than the first rank, and hold more."""
    wide = (*keys, "model.hidden=256", "communication.bucket_bytes=1000000")
    planned = plan_memory(small_deck(*wide), ranks, VOCABULARY, ranks_per_node=per_node)
    alone = plan_memory(
        small_deck(*wide, "communication.transport=mpi"), ranks, VOCABULARY, ranks_per_node=per_node
    )
    most, of_one = (max(stage.memory.parameter for stage in each.stages) for each in (planned, alone))
    assert most == of_one // sharers


def test_stages_of_a_pipeline_hold_their_part() -> None:
    planned = plan(4, "layout.pipeline=4", "model.layers=8", "layout.schedule=1f1b", "model.tied=false")
    assert [stage.blocks for stage in planned.stages] == [2, 2, 2, 2]
    assert sum(stage.parameters for stage in planned.stages) == planned.parameters_total
    first, last = planned.stages[1].memory.activation, planned.stages[2].memory.activation
    assert first / last == pytest.approx(3 / 2)  # 1F1B holds 4, 3, 2 and 1 micro-batches


def test_checkpoints_in_the_background_take_memory_of_what_they_copy() -> None:
    deck = ("checkpoint.mode=background", "checkpoint.every=5", "checkpoint.buffer=2 MB")
    plain, copied = plan(2).stages[0], plan(2, *deck).stages[0]
    assert copied.memory.other - plain.memory.other == 12 * (plain.parameters // 2)
    large = plan(2, *deck, "model.hidden=512").stages[0].memory.other
    assert large - plan(2, "model.hidden=512").stages[0].memory.other == 2_000_000
    assert plan(2, *deck, "checkpoint.every=0").stages[0].memory.other == plain.memory.other


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_gradients_in_the_format_of_products_take_none_beside_their_sum(compute: str) -> None:
    half = (f"precision.compute={compute}", "model.hidden=512", "model.heads=8")
    summed, direct = (
        plan(1, *half, f"precision.gradients={kind}").stages[0].memory for kind in ("fp32", "compute")
    )
    assert direct.gradient == summed.gradient // 2
    # Of a block's widest matrix, and converted before it is added.
    assert summed.other - direct.other == (2 + 4) * 4 * 512 * 512
    assert replace(direct, gradient=summed.gradient, other=summed.other) == summed


def test_slices_within_nodes_need_to_know_nodes() -> None:
    deck = small_deck("layout.zero=1", "layout.zero_group=node", "batch.global_size=16")
    with pytest.raises(HpctrainError, match="--ranks-per-node"):
        plan_memory(deck, 8, VOCABULARY)
    assert plan_memory(deck, 8, VOCABULARY, ranks_per_node=4).zero_group == 4
    assert plan_memory(deck, 8, VOCABULARY, ranks_per_node=8).zero_group == 8
    keys = ("communication.compress=powersgd", "communication.powersgd.between=nodes")
    deck = small_deck("batch.global_size=16", *keys)
    with pytest.raises(HpctrainError, match="--ranks-per-node"):
        plan_memory(deck, 8, VOCABULARY)
    apart, together = (plan_memory(deck, 8, VOCABULARY, ranks_per_node=ranks) for ranks in (4, 8))
    assert apart.largest.memory.optimizer > together.largest.memory.optimizer


def test_scales_that_are_known_at_once_are_told_to_save_memory() -> None:
    sizes = ("model.hidden=256", "model.layers=8", "batch.sequence=1024", "batch.micro_size=8")

    def changed(*changes: str) -> Deck:
        return small_deck(*sizes, "precision.compute=fp8", *changes)

    def planned(deck: Deck) -> MemoryPlan:
        return plan_memory(deck, 1, VOCABULARY)

    found = find_savings(changed(), planned(changed()), changed, planned)
    (told,) = (each for each in found if "precision" in each.change)
    assert told.change == "precision.fp8=tensor"
    # Of norms' outputs and the feed-forward part's, a byte of an element less, and no scale of four bytes.
    inputs = 8 * (8 * 1024 * (2 * 256 + 4 * 256) - 3 * 4)
    activations = (planned(deck).largest.memory.activation for deck in (changed(), changed(told.change)))
    assert next(activations) - next(activations) == inputs
