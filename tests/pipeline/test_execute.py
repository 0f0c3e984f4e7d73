"""Executor: every schedule computes what one rank computes, and sends only what it must.

Also tests of pipeline/deck_schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schedules import V_SHAPED
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.execute import BoundaryMessage, forward_only, messages_between
from hpctrain.pipeline.generate import ONE_CHUNK_SCHEDULES, generate_schedule
from hpctrain.pipeline.split import even_split, layer_ranges
from hpctrain.train.layout_verification import verify_layout
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer


def pipelined(world: World, name: str, micro_batches: int, *overrides: str) -> Deck | None:
    """Return a deck with one stage per rank; None if the schedule does not allow the micro-batches."""
    chunks = 1 if name in ONE_CHUNK_SCHEDULES else 2
    try:
        generate_schedule(name, world.size, micro_batches, chunks=chunks)
        return small_deck(
            "model.layers=8",
            f"layout.pipeline={world.size}",
            f"layout.schedule={name}",
            f"batch.global_size={2 * micro_batches}",
            *overrides,
        )
    except HpctrainError:
        return None


def expected(world: World, micro_batches: int, *overrides: str) -> Trainer:
    deck = small_deck("model.layers=8", f"batch.global_size={2 * micro_batches}", *overrides)
    return reference(world, deck)


def schedules(world: World, micro_batches: int, *overrides: str) -> Iterator[tuple[str, Deck]]:
    for name in (*ONE_CHUNK_SCHEDULES, "interleaved", *V_SHAPED):
        deck = pipelined(world, name, micro_batches, *overrides)
        if deck is not None:
            yield name, deck


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("micro_batches", [3, 4])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_schedule_computes_what_one_rank_computes(world: World, micro_batches: int, tied: str) -> None:
    """Without tied embeddings all sums have the same order, so every bit is equal.

    test_matrix.py has other numbers of micro-batches, and larger bounds.
    """
    overrides = (f"model.tied={tied}", "model.dropout=0.1")
    single = expected(world, micro_batches, *overrides)
    result, gradients = single.train(1)[0], single.gradients()
    first: dict[tuple[str, str], torch.Tensor] = {}
    tried = 0
    for name, deck in schedules(world, micro_batches, *overrides):
        run = trainer(world, deck)
        measured = run.train(1)[0]
        tried += 1
        assert measured.loss == pytest.approx(result.loss, rel=1e-12), name
        assert measured.grad_norm == pytest.approx(result.grad_norm, rel=1e-6), name
        for tensor, gradient in run.gradients().items():
            if tied == "false":
                close = (gradient - gradients[tensor]).abs().max() <= 1e-7 * gradients[tensor].abs().max()
                assert close, (name, tensor)
            else:
                scale = gradients[tensor.replace(".key.bias", ".query.bias")].abs().max()
                assert (gradient - gradients[tensor]).abs().max() <= 1e-5 * scale, (name, tensor)
            same = first.setdefault((deck.layout.chunks * "x", tensor), gradient.clone())
            if tied == "false":
                assert torch.equal(gradient, same), (name, tensor)
    assert tried >= len(ONE_CHUNK_SCHEDULES)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=2",),
        (),
    ],
    ids=str,
)
def test_schedules_with_other_mesh_axes(
    world: World, family: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    for name in ("1f1b", "zb-h1", "interleaved"):
        deck = small_deck(
            *family,
            "model.layers=4",
            "layout.pipeline=2",
            f"layout.schedule={name}",
            "model.dropout=0.1",
            *layout,
        )
        assert "agree with one rank" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2)
def test_tied_embeddings_stay_equal_on_both_stages(world: World) -> None:
    deck = pipelined(world, "1f1b", 4)
    assert deck is not None
    run = trainer(world, deck)
    run.train(3)
    name = "embedding.tokens.weight"
    held = run.parameters().get(name)
    assert (held is not None) == (world.rank in {0, world.size - 1})
    table = torch.zeros(61, 32) if held is None else held.clone()
    every = world.everyone.all_gather(table.unsqueeze(0))
    assert torch.equal(every[0], every[-1])


@pytest.mark.mpi(min_size=2)
def test_bytes_are_b_s_h_per_boundary_micro_batch_and_direction(world: World) -> None:
    for name, deck in schedules(world, 4, "model.tied=false"):
        run = trainer(world, deck)
        world.ledger.reset()
        run.train(1)
        moved = {(e.axis, e.operation, e.phase): e.bytes for e in world.ledger.rows()}
        size = 2 * 32 * 32 * 4
        schedule = run.engine.placement.schedule_of(4)
        stage = world.rank
        crossings = {"forward": 0, "backward": 0}
        for chunk in range(schedule.chunks):
            part = schedule.part(stage, chunk)
            for phase, to in (("forward", part + 1), ("backward", part - 1)):
                if 0 <= to < schedule.parts and schedule.stage_and_chunk(to)[0] != stage:
                    crossings[phase] += 1
        for phase, count in crossings.items():
            assert moved.get(("pipeline", "send", phase), 0) == 4 * count * size, (name, phase)


@pytest.mark.mpi(min_size=2)
def test_evaluation_runs_forward_only(world: World) -> None:
    source = SyntheticSource(32, 61, count=7, seed=9, masked=0.3)
    single = expected(world, 4)
    loss = single.step.evaluate(Batches(source, 0), 7)
    for name in ("1f1b", "interleaved"):
        deck = pipelined(world, name, 4)
        assert deck is not None
        run = trainer(world, deck)
        assert run.step.evaluate(Batches(source, 0), 7) == pytest.approx(loss, rel=1e-12), name


def test_even_split() -> None:
    assert even_split(8, 4) == [2, 2, 2, 2]
    assert even_split(9, 4) == [2, 2, 3, 2]
    assert even_split(10, 4) == [2, 3, 3, 2]
    assert even_split(11, 4) == [2, 3, 3, 3]
    for layers in range(1, 30):
        for parts in range(1, layers + 1):
            counts = even_split(layers, parts)
            assert sum(counts) == layers
            assert max(counts) - min(counts) <= 1
            assert min(counts) >= 1
    assert [even_split(layers, 4) for layers in (2, 3)] == [[0, 1, 1, 0], [1, 1, 1, 0]]
    assert even_split(1, 2) == [1, 0]


def test_parts_know_their_blocks_and_whether_they_are_first_or_last() -> None:
    schedule = generate_schedule("interleaved", 2, 2, chunks=2)
    first, second = layer_ranges(schedule, [1, 2, 3, 4], 0), layer_ranges(schedule, [1, 2, 3, 4], 1)
    assert [(part.first, part.last) for part in first] == [(0, 1), (3, 6)]
    assert [(part.first, part.last) for part in second] == [(1, 3), (6, 10)]
    assert (first[0].has_embedding, first[0].tied_stage, first[0].tied_stages) == (True, 0, 2)
    assert (second[1].has_head, second[1].tied_stage, second[1].tied_stages) == (True, 1, 2)
    assert not (first[1].has_embedding or first[1].has_head or second[0].has_embedding or second[0].has_head)


def test_messages_follow_the_order_of_actions() -> None:
    schedule = Schedule.parse("F0 F1 B0 B1\nF0 B0 F1 B1")
    assert list(messages_between(schedule, 0, 1)) == [BoundaryMessage("F", 0, 0), BoundaryMessage("F", 1, 0)]
    assert list(messages_between(schedule, 1, 0)) == [BoundaryMessage("B", 0, 0), BoundaryMessage("B", 1, 0)]
    assert str(forward_only(schedule, 3)).splitlines()[1:] == ["F0 F1 F2"] * 2
