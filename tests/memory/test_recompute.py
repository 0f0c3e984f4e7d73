"""Recomputation: training is the same bit for bit, and saves the predicted bytes.

Tests of costs/layer_bytes/attention_bytes.py, costs/layer_bytes/block_bytes.py and the other modules there.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.costs.live_activations import LiveActivations
from hpctrain.costs.part_bytes import part_bytes
from hpctrain.deck.schema import Deck
from tests.engines import LLAMA, Trainer, small_deck, trainer

STEPS = 2
SETTINGS = ("full", "selective", "sqrt", "3")
MODELS = {"gpt2": ("model.dropout=0.1",), "llama": LLAMA}


def layouts(ranks: int) -> list[tuple[str, ...]]:
    """Return layouts; those with data ranks alone are as on one rank."""
    found: list[tuple[str, ...]] = [()]
    if ranks >= 2:
        found = [
            ("layout.zero=3",),
            ("layout.tensor=2",),
            ("layout.tensor=2", "layout.sequence_parallel=true"),
            ("layout.context=2",),
            ("layout.context=2", "layout.context_form=all_to_all"),
            ("layout.pipeline=2", "layout.schedule=zb-h1"),
        ]
    if ranks >= 4:
        found = [
            ("layout.pipeline=2", "layout.schedule=zb-v", "layout.zero=3", "layout.chunks=2"),
            ("layout.tensor=2", "layout.sequence_parallel=true", "layout.zero=3", "memory.keep_gathered=1"),
            ("layout.context=2", "layout.pipeline=2", "layout.schedule=zb-h1", "layout.zero=2"),
        ]
    return found


def run(world: World, deck: Deck) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = trainer(world, deck)
    return [step.loss for step in training.train(STEPS)], training.parameters()


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_recomputation_gives_the_same_bits(world: World, model: str, compute: str) -> None:
    if world.size > 1 and (model == "gpt2") != (compute == "bf16"):
        pytest.skip("one rank has tried every pair")
    for layout in layouts(world.size):
        sizes = ("batch.global_size=8",)
        deck = (*sizes, *MODELS[model], *layout, "model.layers=5", f"precision.compute={compute}")
        losses, parameters = run(world, small_deck(*deck))
        for setting in SETTINGS:
            if setting == "sqrt" and world.size > 1:
                continue  # a number of blocks, as the next one is
            recompute = setting
            if recompute == "3" and "layout.schedule=zb-v" in layout:
                recompute = "2"  # blocks of a part
            again_losses, again = run(world, small_deck(*deck, f"memory.recompute={recompute}"))
            assert again_losses == losses, (layout, recompute)
            for name, values in again.items():
                assert torch.equal(values, parameters[name]), (layout, recompute, name)


def saved_bytes(training: Trainer) -> list[int]:
    """Return what autograd saves of one micro-batch in each part of the model on this rank."""
    engine, micro = training.engine, training.deck.batch.micro_size
    micro_batch = next(training.step.batches.step(0, micro, 0, 1, micro))
    one = torch.ones(())
    source = training.step.dropout_source(training.state, 0)
    batch = training.step.prepare(micro_batch, one, source)
    parameters = [bucket.values for bucket in engine.stage.buckets if bucket.values is not None]
    found = []
    for model in engine.stage.models:
        hidden = None
        if not model.span.has_embedding:
            dtype = next(model.parameters()).dtype
            hidden = torch.randn(model.hidden_shape(micro)).to(dtype).requires_grad_()
        with LiveActivations(lambda: parameters) as saved:
            last = model(batch.inputs, hidden)
            if model.span.has_head:
                model.predict(last, batch.losses)
        found.append(saved.peak)
    return found


def predicted(training: Trainer) -> list[int]:
    """Return the bytes that are predicted for it."""
    deck, models = training.deck, training.engine.stage.models
    return [part.total_bytes for part in part_bytes(deck, models, False, deck.memory.recompute)]


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-dropout", "llama", "llama-dropout"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_saved_bytes_are_those_predicted(world: World, model: str, compute: str) -> None:
    family, _, dropout = model.partition("-")
    if world.size > 1 and bool(dropout) != (compute == "bf16"):
        pytest.skip("one rank has tried every pair")
    sizes = LLAMA if family == "llama" else ()
    sizes = (*sizes, "model.dropout=0.1") if dropout else sizes
    for layout in layouts(world.size):
        if "layout.zero=3" in layout:
            continue  # what is gathered counts as a parameter wherever it lies
        for recompute in ("none", *SETTINGS):
            if recompute == "sqrt" and world.size > 1:
                continue  # as above
            deck = small_deck(
                *sizes,
                *layout,
                "model.layers=5",
                f"precision.compute={compute}",
                f"memory.recompute={recompute}",
            )
            training = trainer(world, deck)
            measured, expected = saved_bytes(training), predicted(training)
            assert measured == expected, (layout, recompute, measured, expected)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_blocks_of_two_kinds_save_what_is_predicted(
    world: World, two_kinds: None, family: tuple[str, ...]
) -> None:
    for layout in layouts(world.size):
        if "layout.zero=3" in layout:
            continue  # as above
        for recompute in ("none", "selective", "full", "sqrt", "2"):
            if recompute == "sqrt" and world.size > 1:
                continue  # as above
            deck = small_deck(*family, *layout, "model.layers=5", f"memory.recompute={recompute}")
            training = trainer(world, deck)
            assert saved_bytes(training) == predicted(training), (layout, recompute)
