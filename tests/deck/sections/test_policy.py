"""What a deck may say of policies: defaults that follow other keys, paths, and everything that will not do.

Tests of deck/sections/policy.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.policy import (
    PolicySection,
    max_sample_tokens,
    policy_problems,
    reward_weights,
    sequences_per_sample,
    steps_per_rollout,
)
from hpctrain.deck.toml_text import deck_text
from tests.deck.small_text import SMALL, problems

REWARDED = 'reward = ["exact-match"]\ntokens = 16\n'
WHOLE = "[checkpoint]\nevery = 0\n"


def text(kind: str, policy: str = "", more: str = WHOLE) -> str:
    """A deck that learns from rewards."""
    return f'{SMALL}\n[objective]\nkind = "{kind}"\n[policy]\n{REWARDED}{policy}\n{more}'


def test_defaults_follow_the_kind() -> None:
    ppo, grpo = (parse_deck(text(kind)).policy for kind in POLICY_KINDS)
    assert (ppo.samples, ppo.kl, ppo.mean, ppo.rollout, ppo.clip_high) == (1, "k1", "tokens", 8, 0.2)
    assert (grpo.samples, grpo.kl, grpo.mean, grpo.rollout, grpo.clip_high) == (8, "k3", "answers", 8, 0.2)
    assert ppo.whiten and grpo.scale
    assert (ppo.gamma, ppo.gae_lambda, ppo.value_clip) == (1.0, 0.95, 0.2)


def test_defaults_follow_other_keys() -> None:
    deck = parse_deck(text("ppo", "clip_low = 0.1"), ["batch.global_size=16"])
    assert (deck.policy.rollout, deck.policy.clip_high) == (16, 0.1)
    given = 'samples = 4\nrollout = 16\nclip_high = 0.3\nkl = "k1"\nmean = "constant"\nepochs = 3'
    deck = parse_deck(text("grpo", given), ["run.steps=12"])
    keys = deck.policy
    assert (keys.samples, keys.rollout, keys.clip_high, keys.kl, keys.mean) == (4, 16, 0.3, "k1", "constant")
    assert steps_per_rollout(deck) == 16 * 3 // 8
    assert max_sample_tokens(deck) == 64 - 16
    assert sequences_per_sample(deck) == 4 * 3
    assert parse_deck(deck_text(deck)) == deck


def test_other_kinds_have_no_policy() -> None:
    deck = parse_deck(SMALL)
    assert (deck.policy.samples, deck.policy.rollout, deck.policy.kl, deck.policy.mean) == (None,) * 4
    assert (max_sample_tokens(deck), sequences_per_sample(deck)) == (64, 1)
    assert "[policy]" not in deck_text(deck) or parse_deck(deck_text(deck)) == deck


def test_each_reward_has_a_weight() -> None:
    several = 'reward = ["exact-match", "regular-expression:b"]\ntokens = 16\n'
    deck = parse_deck(text("ppo").replace(REWARDED, several))
    assert reward_weights(deck.policy) == (1.0, 1.0)
    deck = parse_deck(text("ppo", "weights = [2.0, -0.5]").replace(REWARDED, several))
    assert reward_weights(deck.policy) == (2.0, -0.5)


def test_a_reward_is_named_once() -> None:
    twice = text("grpo").replace('["exact-match"]', '["exact-match", "exact-match"]')
    assert any("contains a reward twice" in each for each in problems(twice))


def test_a_call_is_no_hang() -> None:
    told = "policy.seconds = 200.0: must be at most 1/4 of stability.hang_seconds = 600"
    assert any(told in each for each in problems(text("grpo", "seconds = 200.0")))
    for hang in ("0", "800"):
        parse_deck(text("grpo", "seconds = 200.0"), [f"stability.hang_seconds={hang}"])


def test_functions_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "decks"
    home.mkdir()
    named = [
        "own.py:polite",
        "regular-expression:a/b.py:c",
        "exact-match",
        f"{tmp_path}/there.py:x",
        "package:f",
    ]
    listed = ", ".join(f'"{each}"' for each in named)
    (home / "deck.toml").write_text(text("ppo").replace('["exact-match"]', f"[{listed}]"))
    found = read_deck(Path("decks/deck.toml")).policy.reward
    assert found == (f"{home}/own.py:polite", *named[1:])


VAIN = {
    "temperature": "0.5",
    "reward": '["exact-match"]',
    "weights": "[1.0]",
    "answer": '"right"',
    "seconds": "3.0",
    "processes": "2",
    "tokens": "16",
    "stops": '["b"]',
    "samples": "2",
    "rollout": "16",
    "epochs": "2",
    "clip_low": "0.1",
    "clip_high": "0.3",
    "kl": '"k1"',
    "mean": '"tokens"',
    "scale": "false",
    "whiten": "false",
    "gamma": "0.9",
    "gae_lambda": "0.9",
    "value_clip": "0.1",
    "critic": '["learning_rate.peak=1"]',
    "reference": '["layout.zero=0"]',
    "critic_ranks": '"1"',
    "reference_ranks": '"1"',
    "reward_ranks": '"1"',
    "shown": "1",
}


def test_keys_given_in_vain() -> None:
    assert VAIN.keys() == PolicySection.model_fields.keys()
    for kind in ("next-token", "dpo"):
        for name, value in VAIN.items():
            told = problems(
                f'{SMALL}micro_size = 2\n[objective]\nkind = "{kind}"\n[policy]\n{name} = {value}\n'
            )
            why = f': requires objective.kind = "ppo" or "grpo", but it is "{kind}"'
            assert len(told) == 1, told
            assert f"policy.{name} = " in told[0]
            assert told[0].endswith(why)


ONLY_PPO = ("whiten", "gamma", "gae_lambda", "value_clip", "critic")


@pytest.mark.parametrize("name", ONLY_PPO)
def test_groups_have_no_critic(name: str) -> None:
    (told,) = problems(text("grpo", f"{name} = {VAIN[name]}"))
    assert f"policy.{name} = " in told
    assert told.endswith(': requires objective.kind = "ppo", but it is "grpo"')
    assert parse_deck(text("ppo", f"{name} = {VAIN[name]}"))


WRONG = {
    "no reward": (
        "ppo",
        "",
        'policy.reward = [] (default): must name a reward function or model (such as "exact-match")',
    ),
    "weights": (
        "ppo",
        "weights = [1.0, 2.0]",
        "must have one weight for each of the 1 rewards (leave it out for weights",
    ),
    "no room": (
        "ppo",
        "",
        "policy.tokens = 64: must be below batch.sequence = 64, which includes the prompt",
    ),
    "stop": (
        "ppo",
        'stops = ["b", ""]',
        "contains an empty text, which ends every answer immediately (remove",
    ),
    "scale": (
        "ppo",
        "scale = false",
        'policy.scale = false: requires objective.kind = "grpo", but it is "ppo"',
    ),
    "alone": (
        "grpo",
        "samples = 1",
        "policy.samples = 1: must be 2 or more with",
    ),
    "groups": (
        "grpo",
        "samples = 3",
        "policy.rollout = 8 (default): must be a multiple of policy.samples = 3 (use 6 or 9)",
    ),
    "steps": (
        "ppo",
        "rollout = 12",
        "policy.rollout = 12: must be a multiple of batch.global_size = 8 (use 8 or 16)",
    ),
    "run": (
        "ppo",
        "rollout = 24",
        "run.steps = 20: must be a multiple of policy.rollout x policy.epochs / batch.global_size = 3 "
        "steps (use 18 or 21)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_will_not_do(name: str) -> None:
    kind, policy, wanted = WRONG[name]
    given = text(kind, policy)
    if name == "no reward":
        given = given.replace('reward = ["exact-match"]\n', "")
    if name == "no room":
        given = given.replace("tokens = 16", "tokens = 64")
    (told,) = problems(given)
    assert wanted in told


EVERY = {
    "checkpoint.every": "[checkpoint]\nevery = 4\n",
    "checkpoint.memory_every": "[checkpoint]\nevery = 0\nmemory_every = 4\n",
    "run.evaluate_every": WHOLE,
}


@pytest.mark.parametrize("name", EVERY)
def test_what_is_between_rollouts_comes_with_whole_ones(name: str) -> None:
    given = text("ppo", "rollout = 24", EVERY[name]).replace("steps = 20", "steps = 21")
    if name == "run.evaluate_every":
        given = given.replace("steps = 21", "steps = 21\nevaluate_every = 4")
    (told,) = problems(given)
    assert (
        f"{name} = 4: must be a multiple of policy.rollout x policy.epochs / batch.global_size = 3 steps"
        in told
    )
    assert told.endswith("3 or 6)")
    assert parse_deck(given.replace("every = 4", "every = 6"))


def test_what_is_never_asked() -> None:
    reference = 'reference = ["layout.zero=0"]'
    assert parse_deck(text("ppo", reference))
    (told,) = problems(text("ppo", reference).replace('kind = "ppo"', 'kind = "ppo"\nbeta = 0'))
    assert told.endswith(": requires objective.beta above 0, but it is 0.0")
    for kind in POLICY_KINDS:
        assert parse_deck(text(kind).replace(f'"{kind}"', f'"{kind}"\nbeta = 0')).objective.beta == 0


# Each with what it needs besides.
OTHERS = {
    "model.module": ["model.module=torch.nn:Linear"],
    "model.loss": ["model.loss=x.py:f"],
    "data.dataset": ["data.dataset=x.py:f"],
    "data.mixture": ["data.mixture=[{tokens='a.h5', weight=1}]"],
    "run.tokens": ["run.tokens=100000"],
    "communication.server": ["communication.server=async"],
    "layout.local_steps": ["layout.replicas=2"],
    "model.dropout": ["model.dropout=0.1"],
    "batch.ramp_from": ["batch.ramp_from=4", "batch.ramp_steps=4"],
    "stability.z_loss": ["stability.z_loss=1e-4"],
    "evaluation.sets": [],
    "checkpoint.mirror": ["checkpoint.mirror=true"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_go_with_answers_of_its_own(name: str) -> None:
    books = '[[evaluation]]\nname = "books"\ntokens = "b.h5"\n'
    more = WHOLE + (books if name == "evaluation.sets" else "")
    told = problems(text("grpo", more=more), *OTHERS[name])
    assert any(
        'objective.kind = "grpo": conflicts with ' in each
        and name in each
        and each.endswith(f"the model learns from its own answers (leave {name} out)")
        for each in told
    ), told


def test_epochs_are_not_counted() -> None:
    given = text("ppo", "rollout = 24").replace("steps = 20", "epochs = 2")
    (told,) = problems(given)
    wanted = "run.epochs = 2: counts sequences of token files, but a policy trains on prompts (use run.steps)"
    assert told.endswith(wanted)


def test_experts_that_drop_tokens() -> None:
    mixture = ["model.family=llama", "model.experts.count=4", "model.experts.mlp=64"]
    assert parse_deck(text("grpo"), mixture)
    told = problems(text("grpo"), *mixture, "model.experts.capacity=1.5")
    wanted = (
        "conflicts with model.experts.capacity = 1.5: experts drop tokens that depend on "
        "the other sequences of a micro-batch (leave model.experts.capacity out)"
    )
    assert any(each.endswith(wanted) for each in told), told


def test_all_at_once() -> None:
    wrong = 'weights = [1.0, 2.0]\nstops = [""]\nsamples = 3\ngamma = 0.9'
    told = problems(text("grpo", wrong))
    assert len(told) == 4, told


def test_a_deck_that_will_do_has_no_problem() -> None:
    for kind in POLICY_KINDS:
        assert list(policy_problems(parse_deck(text(kind)))) == []
