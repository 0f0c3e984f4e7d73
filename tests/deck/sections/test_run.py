"""What a deck says of a noise scale that cannot be measured."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from tests.deck.test_check import DECK, problems

ON = "run.noise_scale_steps=20"
MIXTURE = ["model.family=llama", "model.experts.count=4"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.tensor=2", "layout.pipeline=2", "layout.zero=3"],
        ["communication.compress=int8", "layout.zero=1"],
        ["layout.zero=2", "layout.zero_group=node"],
        MIXTURE,
    ],
)
def test_what_can_be_measured(overrides: list[str]) -> None:
    parse_deck(DECK, [ON, *overrides])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["communication.server=sync"],
            'communication.server.mode = "sync", whose workers do not make steps together',
        ),
        (
            ["layout.replicas=2"],
            "layout.local_steps.replicas = 2, with which gradients are not summed over all data ranks",
        ),
        (
            ["communication.outer=diloco"],
            'layout.local_steps.outer = "diloco", with which gradients are not summed over all data ranks',
        ),
        (
            ["communication.compress=sign"],
            'communication.compress = "sign", which changes the sums of gradients',
        ),
        (
            ["layout.zero=2", "memory.accumulate=sliced"],
            'memory.accumulate = "sliced", with which no rank has the gradient of all of its tokens',
        ),
        (
            ["layout.context=2"],
            "layout.context = 2, whose ranks compute gradients of parts of the same sequences",
        ),
        (
            [*MIXTURE, "layout.expert=2"],
            "layout.expert = 2 and model.experts.count = 4, with which gradients of experts come from "
            "tokens of several ranks",
        ),
        (
            [*MIXTURE, "layout.tensor=2"],
            "layout.tensor = 2 and model.experts.count = 4, with which gradients of experts come from "
            "tokens of several ranks",
        ),
    ],
)
def test_what_cannot_be_measured_is_told(overrides: list[str], told: str) -> None:
    assert problems(ON, *overrides) == [f"{ON}: conflicts with {told} (use 0)"]
    parse_deck(DECK, overrides)


def test_one_data_rank_has_nothing_to_be_compared_with_but_micro_batches() -> None:
    (problem,) = problems(ON, "layout.tensor=2", ranks=2)
    assert problem == f"{ON}: compares gradients of several data ranks, but the layout has one (use 0)"
    parse_deck(DECK, [ON, "layout.tensor=2"], ranks=4)
    (problem,) = problems(ON, "batch.micro_size=8", "batch.global_size=8", ranks=1)
    assert problem == (
        f"{ON}: compares the first micro-batch of a step with all of them, but a step has one (use 0, a "
        "smaller batch.micro_size, or more ranks)"
    )
    parse_deck(DECK, [ON, "batch.micro_size=4", "batch.global_size=8"], ranks=1)
