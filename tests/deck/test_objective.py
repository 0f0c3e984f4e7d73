"""What a deck may say of its objective."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from tests.deck.small_text import SMALL, changed, problems


def test_kinds() -> None:
    assert parse_deck(SMALL).objective.kind == "next-token"
    deck = parse_deck(SMALL, ["objective.kind=dpo", "objective.beta=0.3", "batch.micro_size=2"])
    assert (deck.objective.beta, deck.objective.loss, deck.objective.smoothing) == (0.3, "sigmoid", 0.0)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            "beta = 0.3",
            'objective.beta = 0.3: is for objective.kind = "dpo", which is "next-token" (leave it out)',
        ),
        (
            'loss = "ipo"',
            'objective.loss = "ipo": is for objective.kind = "dpo", which is "next-token" (leave',
        ),
        ('kind = "dpo"\nbeta = 0', "objective.beta = 0: must be a number above 0"),
        ('kind = "dpo"\nsmoothing = 0.5', "objective.smoothing = 0.5: must be"),
        (
            'kind = "dpo"\nloss = "ipo"\nsmoothing = 0.1',
            'objective.smoothing = 0.1: is for objective.loss = "sigmoid"',
        ),
        (
            'kind = "dpo"\n[stability]\nz_loss = 1e-4',
            'objective.kind = "dpo": has no z-loss: stability.z_loss is for "next-token" (leave it out)',
        ),
        (
            'kind = "dpo"\n[communication]\nserver = "async"',
            'objective.kind = "dpo": is not for servers and workers',
        ),
    ],
)
def test_what_will_not_do(keys: str, told: str) -> None:
    sentences = problems(f"{SMALL}\n[objective]\n{keys}\n")
    assert any(told in sentence for sentence in sentences), sentences


def test_pairs_are_not_parted() -> None:
    odd = changed("global_size = 8", "global_size = 9\nmicro_size = 3")
    sentences = problems(f'{odd}\n[objective]\nkind = "dpo"\n')
    for name, size in (("micro_size", 3), ("global_size", 9)):
        told = f"batch.{name} = {size}: must be even: a pair of answers is two sequences"
        assert any(told in sentence for sentence in sentences), sentences
