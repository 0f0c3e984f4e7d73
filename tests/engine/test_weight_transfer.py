"""Weights from training layouts to those that generate: the bits of a checkpoint that is saved and loaded.

Tests of engine/weight_transfer.py and engine/generation.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.comm.world import World
from hpctrain.deck.generation_deck import generation_deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.generation import generation_stage
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages.stage import Stage, build_stage
from hpctrain.engine.stages.zero_groups import make_replications
from hpctrain.engine.weight_transfer import (
    Box,
    TransferMessage,
    WeightTransfer,
    _divide_into_rounds,
    _messages,
)
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import build_model
from hpctrain.model.part import logits_of
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=16", "model.experts.balance=bias")
UNTIED = ("model.tied=false", "model.vocabulary=59")
CUT = ("layout.expert=2", "layout.expert_tensor=2")

LAYOUTS = {
    "zero 0": (),
    "zero 1": ("layout.zero=1",),
    "mixture": MIXTURE,
}
"""On any number of ranks."""

ON_TWO = {
    "zero 2": ("layout.zero=2", "precision.compute=bf16"),
    "zero 3": ("layout.zero=3", "precision.compute=bf16"),
    "zero 3 llama": ("layout.zero=3", *LLAMA),
    "schedule-free": ("layout.zero=1", "optimizer.name=schedule-free"),
    "muon": ("layout.zero=3", "optimizer.name=muon", *UNTIED),
    "experts": ("layout.zero=3", *MIXTURE),
    "files": ("layout.zero=3", "memory.parameters=disk", "memory.optimizer=disk"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "heads shared": ("layout.tensor=2", *LLAMA, "model.key_value_heads=1"),
    "uneven heads": (
        "layout.tensor=2",
        *LLAMA,
        "model.heads=3",
        "model.key_value_heads=3",
        "model.head_size=8",
    ),
    "context": ("layout.context=2", "layout.zero=1"),
    "pipeline": ("layout.pipeline=2",),
    "untied pipeline": ("layout.pipeline=2", *UNTIED, "precision.compute=bf16"),
    "interleaved": ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
    "ends on one stage": ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4"),
    "spread experts": ("layout.expert=2", *MIXTURE),
}

ON_FOUR = {
    "zero 3 tensor": ("layout.zero=3", "layout.tensor=2", "precision.compute=bf16"),
    "zero 3 pipeline": ("layout.zero=3", "layout.pipeline=2"),
    "zero 1 pipeline": ("layout.zero=1", "layout.pipeline=2", "layout.zero_group=1"),
    "both": ("layout.pipeline=2", "layout.tensor=2", *LLAMA),
    "cut experts": (*MIXTURE, "layout.zero=3", "layout.tensor=2", *CUT),
    "groups": ("layout.zero=3", "layout.zero_group=2"),
}


def trained(world: World, *keys: str) -> Trainer:
    """A step from rough weights."""
    training = trainer(world, small_deck(*keys))
    training.train(1)
    return training


def targets(world: World, keys: tuple[str, ...]) -> list[tuple[int, int]]:
    """(tensor, pipeline) of layouts that generate."""
    blocks = 4 if "model.layers=4" in keys else 2
    both = {(1, 1), (world.size, 1), (1, min(blocks, world.size)), (2, 2)}
    return sorted(each for each in both if each[0] * each[1] <= world.size)


def values_of(stage: Stage) -> dict[str, Tensor]:
    """Parameters, and what modules keep, by name."""
    parameters = {s.parameter.shard.name: s.parameter for b in stage.buckets for s in b.segments}
    kept = {f"{each.kind}/{each.shard.name}": each.values for each in stage.module_state.state()}
    return {name: each.detach().clone() for name, each in (parameters | kept).items()}  # type: ignore[union-attr]


def sent_bytes(transfer: WeightTransfer) -> int:
    """Return the bytes of the messages that this rank sends in each transfer."""
    rounds = ((each.dtype.itemsize, each.sent_messages) for each in transfer._rounds)
    return sum(itemsize * message.box.elements for itemsize, messages in rounds for message in messages)


def compared(world: World, path: Path, *keys: str) -> None:
    """Transfers in small rounds have the bits of a file, anew after another step."""
    training = trained(world, *keys)
    engine = training.engine
    for tensor, pipeline in targets(world, keys):
        _, target = generation_stage(training.deck, world, tensor, pipeline)
        _, expected = generation_stage(training.deck, world, tensor, pipeline)
        transfer = WeightTransfer(world, engine.stage, target, bytes_at_a_time=3000)
        for step in range(2):
            file = path / f"{tensor}-{pipeline}-{step}.h5"
            save(file, world.everyone, training_entries(engine.state(), writing=True), {})
            load_parameters(file, expected, world.everyone)
            with engine.stage.optimizer.evaluation_weights():
                begun = world.ledger.bytes
                transfer.move()
                assert world.ledger.bytes - begun == sent_bytes(transfer)
            found, right = values_of(target), values_of(expected)
            assert found.keys() == right.keys()
            for name, values in right.items():
                assert values.abs().max() > 0 or "router" in name, name
                assert torch.equal(found[name], values), (name, tensor, pipeline, step)
            training.train(1)
    engine.close()


@pytest.mark.mpi(min_size=1, max_size=4)
@pytest.mark.parametrize("keys", LAYOUTS.values(), ids=LAYOUTS)
def test_the_bits_of_a_file(world: World, mpi_tmp_path: Path, keys: tuple[str, ...]) -> None:
    compared(world, mpi_tmp_path, *keys)


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("keys", ON_TWO.values(), ids=ON_TWO)
def test_the_bits_of_a_file_on_two_or_more(world: World, mpi_tmp_path: Path, keys: tuple[str, ...]) -> None:
    compared(world, mpi_tmp_path, *keys)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("keys", ON_FOUR.values(), ids=ON_FOUR)
def test_the_bits_of_a_file_on_four(world: World, mpi_tmp_path: Path, keys: tuple[str, ...]) -> None:
    compared(world, mpi_tmp_path, *keys)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_target_may_be_cut_as_well(world: World, zero: int) -> None:
    # Of messages, not of memory in common, which is refreshed by itself.
    engine = trained(world, "layout.zero=2", "communication.transport=mpi").engine
    deck = small_deck(f"layout.zero={zero}")
    layer_context = make_layer_context(deck, engine.mesh, SavedPolicy(), world.device)
    model = build_model(engine.shape, layer_context)
    target = build_stage(deck, layer_context, [model], make_replications(deck, engine.mesh))
    WeightTransfer(world, engine.stage, target).move()
    tokens = torch.arange(64).view(2, 32) % 61
    with target.residency.step("frozen"):
        assert torch.equal(logits_of(model, tokens), logits_of(engine.model, tokens))


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_the_model_computes_as_on_one_rank(world: World, family: tuple[str, ...]) -> None:
    keys = (*family, f"layout.zero={3 if world.size > 1 else 0}")
    training = trained(world, *keys)
    model, target = generation_stage(training.deck, world, world.size)
    WeightTransfer(world, training.engine.stage, target).move()
    alone = reference(world, training.deck)
    alone.train(1)
    tokens = torch.arange(64).view(2, 32) % 61
    with torch.no_grad():
        expected = logits_of(alone.engine.model, tokens)
    assert torch.allclose(logits_of(model, tokens), expected, atol=1e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_replicas_apart_have_no_model_in_common(world: World) -> None:
    keys = ("layout.local_steps.replicas=2", "layout.local_steps.outer=diloco", "layout.local_steps.steps=2")
    engine = trainer(world, small_deck(*keys)).engine
    _, target = generation_stage(small_deck(), world, 1)
    with pytest.raises(HpctrainError, match="weights cannot be transferred from replicas that diverge"):
        WeightTransfer(world, engine.stage, target)


def test_ranks_that_do_not_split_a_model_are_refused() -> None:
    with pytest.raises(HpctrainError, match="3 ranks: the model is split over all of them, and their number"):
        generation_deck(small_deck(), 3)
    with pytest.raises(HpctrainError, match="requires 3 layers or more"):
        generation_deck(small_deck(), 1, 5)


WHOLE = Box((0, 0), (4, 6))
ROWS = [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]


def told(*boxes: Box) -> dict[str, tuple[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    return {"/model/w": ("float32", [(box.start, box.shape) for box in boxes])}


def test_what_a_rank_has_stays_there_and_the_rest_comes_from_its_node() -> None:
    having = [told(ROWS[0]), told(ROWS[1]), told(ROWS[0]), told(ROWS[1])]
    messages = _messages(having, [told(WHOLE)] * 4, nodes=[0, 0, 1, 1])
    senders = {(each.receiver, each.box): each.sender for each in messages}
    assert len(messages) == len(senders) == 8
    assert senders == {
        (rank, row): rank if rank % 2 == number else rank ^ 1
        for rank in range(4)
        for number, row in enumerate(ROWS)
    }


def test_replicas_take_turns() -> None:
    having = [told(WHOLE), told(WHOLE), told(WHOLE), *[told()] * 6]
    messages = _messages(having, [*[told()] * 3, *[told(WHOLE)] * 6], nodes=[0] * 9)
    assert sorted(each.sender for each in messages) == [0, 0, 1, 1, 2, 2]


def test_boxes_are_cut_where_they_meet() -> None:
    columns = [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]
    messages = _messages([told(ROWS[0]), told(ROWS[1])], [told(columns[0]), told(columns[1])], [0, 0])
    assert set(messages) == {
        TransferMessage(sender, receiver, "/model/w", Box((2 * sender, 3 * receiver), (2, 3)))
        for sender in range(2)
        for receiver in range(2)
    }


def test_rounds_are_bounded_and_few() -> None:
    messages = [
        TransferMessage(sender, receiver, f"{number}", Box((0, 0), (7 + number, 11)))
        for number in range(12)
        for sender in range(4)
        for receiver in range(4)
        if sender != receiver
    ]
    limit = 200
    rounds = _divide_into_rounds(messages, 4, limit)
    total = sum(each.box.elements for each in messages)
    assert sum(each.box.elements for around in rounds for each in around) == total
    for around in rounds:
        for rank in range(4):
            assert sum(each.box.elements for each in around if each.sender == rank) < 1.25 * limit
            assert sum(each.box.elements for each in around if each.receiver == rank) < 1.25 * limit
    assert len(rounds) < 1.3 * total / 4 / limit
