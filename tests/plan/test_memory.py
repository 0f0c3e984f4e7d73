"""Plans of memory: equal to the byte to what runs hold, and to the closed forms of ZeRO's paper."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.plan.memory import MemoryPlan, plan_memory
from hpctrain.sharding.accounts import storage_bytes
from tests.engines import LLAMA, Trainer, small_deck, trainer

VOCABULARY = 61


SLICED = ("memory.accumulate=sliced",)
MORE = {2: (SLICED,), 3: (SLICED, ("memory.keep_gathered=1",), ("memory.recompute=sqrt", "model.layers=4"))}
DUAL = ("layout.pipeline=2", "layout.schedule=dualpipe-v", "model.layers=4")
CHANGED = (DUAL,)


def plan(ranks: int, *overrides: str) -> MemoryPlan:
    return plan_memory(small_deck(*overrides), ranks, VOCABULARY)


def layouts(ranks: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    if ranks >= 2:
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


def held(training: Trainer) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, optimizer state and turns of a rank between two steps."""
    buckets, moments = training.engine.buckets, training.engine.optimizer.moments
    values = [bucket.own_values if bucket.sharding.stage == 3 else bucket.values for bucket in buckets]
    gradients = [bucket.own_gradients for bucket in buckets]
    lookups = [segment.parameter.lookups for bucket in buckets for segment in bucket.segments]
    optimizer = [tensor for m in moments for tensor in (m.exp_avg, m.exp_avg_sq)]
    if values[0] is not None and values[0].dtype != torch.float32:
        optimizer += [m.master for m in moments]
    return (
        storage_bytes(values),
        storage_bytes([*gradients, *lookups]),
        storage_bytes(optimizer),
        buckets[0].pool.bytes,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_and_turns_are_those_of_a_run(world: World, stage: int) -> None:
    for layout in layouts(world.size):
        for more in ((), *MORE.get(stage, ())):
            if (more and layout and layout not in CHANGED) or (
                stage == 0 and "layout.zero_group=2" in layout
            ):
                continue
            deck = small_deck(*layout, *more, f"layout.zero={stage}")
            training = trainer(world, deck)
            training.train(2)
            planned = plan_memory(deck, world.size, VOCABULARY)
            here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
            found = (here.parameter, here.gradient, here.optimizer)
            assert found == held(training)[:3], (layout, more)
            messages = here.buffer - held(training)[3]
            assert messages == (0 if len(planned.stages) == 1 else 3 * hidden_bytes(deck)), (layout, more)


def hidden_bytes(deck: Deck) -> int:
    return deck.batch.sequence * deck.batch.micro_size * deck.model.hidden * 4
