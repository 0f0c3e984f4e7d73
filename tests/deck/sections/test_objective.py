"""What a deck may say of its objective."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.model.shape import ModelShape
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
            (
                'objective.beta = 0.3: requires objective.kind = "dpo", "ppo" or "grpo", but it is '
                '"next-token"'
            ),
        ),
        (
            'loss = "ipo"',
            'objective.loss = "ipo": requires objective.kind = "dpo", but it is "next-token"',
        ),
        (
            'kind = "dpo"\nbeta = 0',
            ('objective.beta = 0: conflicts with objective.kind = "dpo": it must be above 0 (use 0.1)'),
        ),
        ('kind = "dpo"\nsmoothing = 0.5', "objective.smoothing = 0.5: must be"),
        (
            'kind = "dpo"\nloss = "ipo"\nsmoothing = 0.1',
            (
                'objective.smoothing = 0.1: requires objective.loss = "sigmoid", but it is "ipo" (leave '
                "this key out)"
            ),
        ),
        (
            "centering = 0.01",
            'objective.centering = 0.01: requires objective.kind = "reward", but it is "next-token"',
        ),
        (
            'kind = "dpo"\nmargin = 0.5',
            'objective.margin = 0.5: requires objective.kind = "reward", but it is "dpo"',
        ),
        (
            'kind = "reward"\nbeta = 0.3',
            ('objective.beta = 0.3: requires objective.kind = "dpo", "ppo" or "grpo", but it is "reward"'),
        ),
        ('kind = "reward"\nmargin = "big"', 'objective.margin = "big": must be a number'),
        (
            'kind = "reward"\n[stability]\nz_loss = 1e-4',
            (
                'objective.kind = "reward": conflicts with stability.z_loss = 0.0001 (leave '
                "stability.z_loss out)"
            ),
        ),
        (
            'kind = "dpo"\n[stability]\nz_loss = 1e-4',
            ('objective.kind = "dpo": conflicts with stability.z_loss = 0.0001 (leave stability.z_loss out)'),
        ),
        (
            'kind = "dpo"\n[communication]\nserver = "async"',
            (
                'objective.kind = "dpo": conflicts with [communication.server]: workers compute '
                "next-token losses only"
            ),
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


def test_a_reward_model_has_a_head_of_its_own() -> None:
    keys = ["objective.kind=reward", "objective.margin=0.5", "objective.centering=0.01"]
    for family, tied in (("gpt2", True), ("llama", False)):
        of_family = [f"model.family={family}", "batch.micro_size=2"]
        deck = parse_deck(SMALL, [*of_family, *keys])
        shape = ModelShape.of(deck, 61)
        assert (deck.model.tied, shape.tied, shape.head) == (False, False, "scalar")
        assert parse_deck(deck_text(deck)) == deck
        assert not [line for line in deck_text(deck).splitlines() if line.startswith("tied")]
        assert ModelShape.of(parse_deck(SMALL, of_family), 61).head == "vocabulary"
        assert parse_deck(SMALL, of_family).model.tied is tied
    own = changed("global_size = 8", "global_size = 8\nmicro_size = 2").replace(
        "[model]", "[model]\ntied = true"
    )
    (told,) = problems(f'{own}\n[objective]\nkind = "reward"\n')
    assert (
        'model.tied = true: conflicts with objective.kind = "reward": a reward model has '
        "its own output row (leave it out)"
    ) in told
