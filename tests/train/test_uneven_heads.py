"""Training with heads that tensor ranks do not divide evenly: equal to one rank.

Tests of `Partition.of_heads` of parallel/shards.py in whole runs.
"""

from __future__ import annotations

import re

import pytest

from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.train.miniature import miniature
from hpctrain.train.verify import compare
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer

TENSOR = ("layout.tensor=2",)
SEQUENCE = (*TENSOR, "layout.sequence_parallel=true")
FOUR = ("layout.tensor=4",)


def heads(queries: int, key_values: int, *keys: str) -> tuple[str, ...]:
    """Return the keys of a llama with these heads, of 8 features."""
    sizes = f"model.heads={queries}", f"model.key_value_heads={key_values}", f"model.hidden={8 * queries}"
    return (*LLAMA, *sizes, *keys)


ON_TWO: dict[str, tuple[str, ...]] = {
    "groups": (*heads(9, 3), *SEQUENCE),
    "plain": (*heads(7, 7), *TENSOR),
    "shared": (*heads(5, 1), *SEQUENCE),
    "gpt2": ("model.heads=5", "model.hidden=40", "model.mlp=48", *TENSOR),
}
ON_FOUR: dict[str, tuple[str, ...]] = {
    "unequal-shares": (*heads(6, 3), *FOUR, "layout.sequence_parallel=true"),
    "split-queries": (*heads(14, 2), *FOUR),
}


def check_steps(world: World, keys: tuple[str, ...]) -> None:
    """Compare one step of a miniature, and five steps, with those of one rank. Collective."""
    deck = small_deck(*keys)
    for difference in compare(miniature(deck), world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference
    expected = by_rank_0(world, lambda: [(s.loss, s.grad_norm) for s in reference(world, deck).train(5)])
    measured = [(step.loss, step.grad_norm) for step in trainer(world, deck).train(5)]
    for here, there in zip(measured, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    assert expected[-1][0] != expected[0][0]


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_train_like_one(world: World, case: str) -> None:
    check_steps(world, ON_TWO[case])


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks_train_like_one(world: World, case: str) -> None:
    check_steps(world, ON_FOUR[case])
