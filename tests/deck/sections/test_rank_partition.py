"""Ranks of their own for models of a run that learns by rewards: what a deck may say, and who has what."""

from __future__ import annotations

import pytest

from hpctrain.deck.check import check_world, data_ranks
from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.rank_partition import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    RankPartition,
    SharedRanks,
    require_no_dedicated_ranks,
    without_dedicated_ranks,
)
from hpctrain.errors import HpctrainError
from tests.deck.sections.test_policy import text


def test_those_that_no_key_names_have_the_policy() -> None:
    deck = parse_deck(text("ppo", 'critic_ranks = "2-4"\nreference_ranks = 4\n'))
    division = RankPartition.of(deck, 8)
    assert division.policy == (0, 1, 5, 6, 7)
    assert division.other_ranks == (2, 3, 4)
    assert list(division.of_model(CRITIC)) == [2, 3, 4]
    assert list(division.of_model(REFERENCE)) == [4]
    assert division.of_model(REWARD) == division.policy
    assert division.rank_sets == [
        SharedRanks((POLICY, REWARD), (0, 1, 5, 6, 7)),
        SharedRanks((CRITIC,), (2, 3)),
        SharedRanks((CRITIC, REFERENCE), (4,)),
    ]
    assert [division.rank_set_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 0, 0, 0]
    with pytest.raises(ValueError, match="rank 8 is not one of the 8 ranks"):
        division.rank_set_index(8)


def test_the_layout_is_that_of_the_others() -> None:
    deck = parse_deck(text("ppo", 'critic_ranks = "1-2"\n'))
    assert data_ranks(deck, 4) == 2
    assert data_ranks(without_dedicated_ranks(deck), 4) == 4
    # A deck of another kind has kept the key, and no such models.
    assert data_ranks(deck.with_keys(objective={"kind": "next-token"}), 4) == 4


WRONG = {
    'critic_ranks = "0-1"': r'policy\.critic_ranks = "0-1": contains rank 0, which holds the policy',
    'critic_ranks = "3-2"': r"must be ranks such as \"4-7\", or \"policy\"",
    'critic_ranks = ""': "must be ranks such as",
    'critic_ranks = "-3"': "must be ranks such as",
    "critic_ranks = true": "must be ranks such as",
    'critic_ranks = "critic"': "must be ranks such as",
    "reward_ranks = 1": "policy.reward_ranks.*has no effect without a reward model in policy.reward",
}


@pytest.mark.parametrize("key", WRONG)
def test_what_will_not_do(key: str) -> None:
    with pytest.raises(HpctrainError, match=WRONG[key]):
        parse_deck(text("ppo", f"{key}\n"))


def test_what_is_given_in_vain() -> None:
    with pytest.raises(HpctrainError, match=r"policy.critic_ranks.*requires objective.kind"):
        parse_deck(text("grpo", "critic_ranks = 1\n"))
    with pytest.raises(HpctrainError, match=r"policy.reference_ranks.*no effect with objective.beta = 0"):
        parse_deck(text("ppo", "reference_ranks = 1\n"), ["objective.beta=0"])


ALONE = {
    "run.trace=true": "run.trace.*conflicts with policy.critic_ranks: it records steps",
    "stability.corruption=cheap": 'stability.corruption.*conflicts with.*use "off"',
    "stability.verify_layout=true": "stability.verify_layout.*conflicts with",
    "stability.spike=rollback": 'stability.spike.*conflicts with.*use "skip"',
    "layout=auto": "layout.*conflicts with policy.critic_ranks: .*leave it out",
    "checkpoint.memory_every=10": "checkpoint.memory_every.*conflicts with.*use 0",
}


@pytest.mark.parametrize("key", ALONE)
def test_what_does_not_go_with_them(key: str) -> None:
    keys = [key, "checkpoint.every=100"]
    with pytest.raises(HpctrainError, match=ALONE[key]):
        parse_deck(text("ppo", "critic_ranks = 1\n"), keys)


def test_ranks_that_are_not_there() -> None:
    deck = parse_deck(text("ppo", 'critic_ranks = "1-4"\n'))
    with pytest.raises(
        HpctrainError,
        match=r"contains rank 4, but the run has 4 ranks, numbered from 0 "
        r"\(use",
    ):
        check_world(deck, 4)
    check_world(deck, 5)


def test_servers_take_ranks_besides() -> None:
    """Which no policy has: that is told even where none is left."""
    keys = ["communication.server=async"]
    for ranks in (4, 5):
        with pytest.raises(
            HpctrainError,
            match=r"conflicts with \[communication\.server\]: the model learns from its own answers",
        ):
            parse_deck(text("ppo", 'critic_ranks = "1-3"\n'), keys, ranks=ranks)


def test_what_goes_with_one_model_alone() -> None:
    require_no_dedicated_ranks(parse_deck(text("ppo", "")), "is not for it")
    with pytest.raises(HpctrainError) as caught:
        require_no_dedicated_ranks(
            parse_deck(text("ppo", "critic_ranks = 1\nreference_ranks = 2\n")), "is not for it"
        )
    critic, reference = caught.value.problems
    assert 'policy.critic_ranks = 1: is not for it (use "policy")' in critic
    assert "policy.reference_ranks = 2: is not for it" in reference
