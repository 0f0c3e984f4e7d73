"""What is said of replicas and of steps that they make by themselves.

Tests of deck/sections/local_steps.py.
"""

from __future__ import annotations

import pytest

from hpctrain.deck.check import check_world
from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from tests.engines import DECK, LLAMA


def problems(*overrides: str, ranks: int | None = None) -> list[str]:
    keys = [f"layout.{key}" if key.startswith("replicas") else key for key in overrides]
    keys = [key if "." in key.partition("=")[0] else f"communication.{key}" for key in keys]
    try:
        parse_deck(DECK, keys, ranks=ranks)
    except HpctrainError as error:
        return [problem.removeprefix("--set ") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["local_steps=4"],
            "communication.local_steps=4: has no effect without [layout.local_steps]",
        ),
        (
            ["outer_format=int8"],
            "communication.outer_format=int8: has no effect without [layout.local_steps]",
        ),
        (
            ["replicas=2", "outer_momentum=0.5"],
            "communication.outer_momentum=0.5: has no effect with layout.local_steps.outer",
        ),
        (
            ["replicas=2", "layout.zero=1", "layout.zero_group=2"],
            (
                "layout.zero_group=2: conflicts with layout.local_steps.replicas = 2: layout.zero "
                "shards within each replica (leave it out)"
            ),
        ),
        (
            ["replicas=2", "local_steps=9", "fragments=3"],
            "communication.fragments=3: must be at most model.layers = 2: each fragment has one block "
            "or more",
        ),
        (
            ["replicas=2", "fragments=2"],
            "communication.fragments=2: must be at most layout.local_steps.steps = 1: each fragment is "
            "synchronized in a different step",
        ),
        (
            ["replicas=2", "compress=int8", "compress_between=nodes"],
            (
                "communication.compress_between=nodes: conflicts with layout.local_steps.replicas = 2: "
                'sums are compressed within each replica (use "ranks")'
            ),
        ),
        (
            ["replicas=2", "local_steps=3", "delay=3"],
            (
                "communication.delay=3: must be below layout.local_steps.steps = 3: a synchronization "
                "must take effect before the next one starts"
            ),
        ),
    ],
)
def test_keys_that_do_not_fit(overrides: list[str], told: str) -> None:
    (problem,) = problems(*overrides)
    assert problem.startswith(told)


def test_keys_that_fit() -> None:
    assert problems("outer=diloco", "local_steps=4") == []
    assert problems("replicas=2") == []
    assert problems("replicas=2", "local_steps=4", "fragments=2", "delay=3", "blend=1", ranks=2) == []
    assert problems("replicas=2", "layout.zero=3", ranks=4) == []
    assert problems("replicas=2", "compress=int8", "layout.zero=1", "warmup=3", ranks=4) == []


@pytest.mark.parametrize(
    ("overrides", "ranks", "told"),
    [
        (
            ["replicas=3"],
            4,
            "layout.replicas=3: must divide the 4 data ranks into replicas with complete",
        ),
        (
            ["replicas=4", "layout.tensor=2"],
            4,
            "layout.replicas=4: must divide the 2 data ranks into replicas",
        ),
        (
            [*LLAMA, "model.experts.count=4", "layout.expert=4", "layout.zero=0", "replicas=2"],
            4,
            "layout.replicas=2: must divide the 4 data ranks into replicas with complete context and expert",
        ),
        (
            ["replicas=2", "layout.zero=3"],
            2,
            "layout.zero=3: shards parameters, which requires two ranks or more, over a single rank "
            "(use layout.zero = 0, 1 or 2; the ranks form 1 data x context rank of a replica)",
        ),
        (
            ["replicas=2", "compress=int8"],
            2,
            "communication.compress=int8: has no effect with 2 replicas of one data rank each: it sums "
            'gradients within a replica (use "none")',
        ),
    ],
)
def test_ranks_that_do_not_fit(overrides: list[str], ranks: int, told: str) -> None:
    (problem,) = problems(*overrides, ranks=ranks)
    assert problem.startswith(told)


def test_a_stored_deck_may_have_one_replica_left() -> None:
    """Its keys wait for others to join."""
    deck = parse_deck(DECK, ["layout.local_steps.replicas=2", "layout.local_steps.steps=5"])
    text = deck_text(deck.with_keys(layout={"local_steps.replicas": 1}))
    left = parse_deck(text, includes=False)
    assert left.layout.steps_between_syncs == 5
    check_world(left, 1)
    with pytest.raises(HpctrainError, match="use 2 replicas or more"):
        parse_deck(text)
