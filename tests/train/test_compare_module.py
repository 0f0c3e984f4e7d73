"""Runs of a module that users bring, compared by the command: of other stages, with another rate; and what
its blocks give, on data ranks.

Of train/fingerprints.py, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.train.divergence import ROUNDING_LIMITS, StepComparison
from hpctrain.train.fingerprints import StepFingerprints, fingerprints
from tests.engines import trainer
from tests.model.modules.test_module_part import deck_of
from tests.train.planted import in_own_gradient
from tests.train.test_module import Launch, folder, hpctrain, tokens
from tests.train.test_module_stages import FEWER, STAGED, changes, staged

__all__ = ["folder", "staged", "tokens"]

KEYS = (*STAGED, *FEWER, "run.steps=3")


def steps_of(world: World, deck: Deck, gradient: str = "") -> list[StepFingerprints]:
    training = trainer(world, deck)
    if gradient:
        in_own_gradient(gradient)(training)
    return [fingerprints(training) for _ in range(3)]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_blocks_of_a_module_give_is_compared(world: World) -> None:
    kind, recomputed = "gpt", "memory.recompute=full"
    alone = steps_of(world.single_rank_world(), deck_of(kind, recomputed))
    steps = steps_of(world, deck_of(kind, recomputed, "layout.zero=3"))
    comparison = StepComparison(ROUNDING_LIMITS["fp32"], same_layout=False, exact=False)
    for one, other in zip(alone, steps, strict=True):
        assert comparison.first(comparison.of(one, other)) is None
        given = [each for each in other.tensors if each.phase == "forward"]
        names = ["output of layers.0", "output of layers.1", "output of layers.2", "loss"]
        assert [each.name for each in given] == names
        sizes = [each.elements for each in one.tensors if each.phase == "forward"]
        assert [each.elements for each in given] == sizes and len(set(sizes[:-1])) == 1
        assert sizes[0] % (8 * 32) == 0 and sizes[0] < 8 * 32 * 64  # each sample once
    name = next(
        each.name for each in steps[0].tensors if each.phase == "gradient" and "layers.1" in each.name
    )
    wrong = steps_of(world, deck_of(kind, recomputed, "layout.zero=3"), name)
    found = StepComparison(ROUNDING_LIMITS["fp32"], same_layout=True, exact=True).of(steps[1], wrong[1])
    first = next(each for each in found if not each.equal)
    assert (first.phase, first.name) == ("gradient", name)


def test_runs_of_a_module_are_replayed(staged: Path, launch: Launch) -> None:
    layout = ("layout.pipeline=2", "layout.schedule=zb-v")
    made = {"one": (1, ()), "stages": (2, layout), "faster": (1, ("learning_rate.peak=1.01e-2",))}
    for name, (ranks, keys) in made.items():
        own = changes(*KEYS, *keys, f"run.dir=runs/{name}")
        hpctrain(launch, ranks, "run", "code/deck.toml", *own)
    told = hpctrain(launch, 2, "compare", "--trust-code", "runs/one", "runs/stages", "--steps", "2")
    assert "No difference: the 2 steps after their beginning" in told, told
    told = hpctrain(launch, 1, "compare", "--trust-code", "runs/one", "runs/faster", code=1)
    assert "first differ in step 1, in the update: learning rate" in told, told
