"""What a deck says of compressed sums that cannot be, or that has no effect."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from tests.deck.test_check import DECK, problems

ONE_BIT = ["communication.compress=onebit", "communication.warmup=2"]
TOP_K = ["communication.compress=topk"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["communication.compress=sign", "communication.error_feedback=false", "layout.zero=1"],
        ["communication.compress=int8", "communication.warmup=5"],
        ONE_BIT,
        [*TOP_K, "communication.ratio=0.5", "optimizer.name=sgd", "optimizer.momentum=0.9"],
        [*TOP_K, "communication.ratio=1.0"],
        ["communication.compress=powersgd", "communication.rank=2", "communication.compress_between=nodes"],
    ],
)
def test_compression_that_can_be(overrides: list[str]) -> None:
    parse_deck(DECK, overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["communication.warmup=3"],
            'communication.warmup=3: has no effect with communication.compress = "none" (leave it out)',
        ),
        (
            ["communication.error_feedback=false"],
            "communication.error_feedback=false: has no effect with "
            'communication.compress = "none" (leave it out)',
        ),
        (
            ["communication.compress_between=nodes"],
            'communication.compress_between=nodes: has no effect with communication.compress = "none" '
            "(leave it out)",
        ),
        (
            ["communication.compress=sign", "communication.rank=2"],
            'communication.rank=2: has no effect with communication.compress = "sign" (leave it out)',
        ),
        (
            ["communication.compress=sign", "communication.ratio=0.5"],
            'communication.ratio=0.5: has no effect with communication.compress = "sign" (leave it out)',
        ),
        (
            [*TOP_K, "communication.ratio=1.0", "communication.warmup=3"],
            "communication.warmup=3: has no effect with communication.topk.ratio = 1 (leave it out)",
        ),
        (
            ["communication.compress=int8", "layout.zero=2"],
            (
                'layout.zero=2: conflicts with communication.compress = "int8": each rank needs '
                "complete gradients to keep what it does not send (use 0 or 1)"
            ),
        ),
        (
            ["communication.compress=int8", "layout.zero=1", "layout.zero_group=2"],
            (
                'layout.zero_group=2: conflicts with communication.compress = "int8": gradients '
                "would be summed exactly between groups (leave it out)"
            ),
        ),
        (
            [*TOP_K, "communication.error_feedback=false"],
            'communication.error_feedback=false: has no effect with communication.compress = "topk" '
            "(leave it out)",
        ),
        (
            [*TOP_K, "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true"],
            (
                'optimizer.nesterov=true: conflicts with communication.compress = "topk": it requires '
                "the same momentum on all ranks, but each rank accumulates a different one (use false)"
            ),
        ),
        (
            [ONE_BIT[0], "communication.warmup=0"],
            (
                'communication.warmup=0: conflicts with communication.compress = "onebit": exact steps '
                "at the start determine the step size of each element for the rest of the run (use a "
                "tenth of run.steps or more)"
            ),
        ),
        (
            [*ONE_BIT, "optimizer.name=lion"],
            (
                'optimizer.name=lion: conflicts with communication.compress = "onebit": it communicates '
                'the momentum of Adam (use "adamw")'
            ),
        ),
        (
            [*ONE_BIT, "optimizer.name=sgd"],
            (
                'optimizer.name=sgd: conflicts with communication.compress = "onebit": it communicates '
                'the momentum of Adam (use "adamw")'
            ),
        ),
    ],
)
def test_what_cannot_be_is_told(overrides: list[str], told: str) -> None:
    assert problems(*overrides) == [told]
