"""Tests of the comparison of a resumed run's deck with the deck of its checkpoint.

Tests of checkpoint/same_model.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.checkpoint.same_model import require_same_model
from hpctrain.deck.read import parse_deck
from hpctrain.deck.resume_rules import keys_of_policy
from hpctrain.deck.schema import Deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.train.resume_check import keep_vocabulary, replaced_optimizer_state, require_resumable
from tests.engines import small_deck

PATH = Path("x.h5")
LLAMA = ("model.family=llama", "model.mlp=48")
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=24")
GROUPS = (*MIXTURE, "model.experts.router_groups=2")
MUP = ("model.parametrization=mup", "model.base_width=8", "model.base_head_size=4")
ADAPTERS = "model.adapters={rank = 2}"
MODULE = 'model.module="net.py:Net"'
PPO = ("objective.kind=ppo", 'policy.reward=["exact-match"]', "policy.tokens=4", "objective.beta=0")


# By refused key: the --set arguments of the first run, and those of the resumed run.
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "model.from": ((), ("model.from=other.h5",)),
    "model.family": ((), LLAMA),
    "model.layers": ((), ("model.layers=1",)),
    "model.mtp_layers": (LLAMA, (*LLAMA, "model.mtp_layers=1")),
    "model.hidden": ((), ("model.hidden=64",)),
    "model.heads": ((), ("model.heads=4",)),
    "model.head_size": ((), ("model.head_size=2",)),
    "model.mlp": ((), ("model.mlp=40",)),
    "model.key_value_heads": (LLAMA, (*LLAMA, "model.key_value_heads=1")),
    "model.query_key_norm": (LLAMA, (*LLAMA, "model.query_key_norm=head")),
    "model.positions": (LLAMA, (*LLAMA, "model.positions=none")),
    "model.rotary_fraction": (LLAMA, (*LLAMA, "model.rotary_fraction=0.5")),
    "model.rotation_pattern": (LLAMA, (*LLAMA, "model.rotation_pattern=[false]")),
    "model.windows": (LLAMA, (*LLAMA, "model.windows=[3]")),
    "model.query_key_value_clip": (LLAMA, (*LLAMA, "model.query_key_value_clip=8")),
    "model.attention_cap": (LLAMA, (*LLAMA, "model.attention_cap=5")),
    "model.attention_sinks": (LLAMA, (*LLAMA, "model.attention_sinks=true")),
    "model.rope_local_base": (
        (*LLAMA, "model.windows=[3]"),
        (*LLAMA, "model.windows=[3]", "model.rope_local_base=300"),
    ),
    "model.latent": (LLAMA, (*LLAMA, "model.latent={key_value_rank = 8, rotary_size = 2}")),
    "model.norm": (LLAMA, (*LLAMA, "model.norm=layer")),
    "model.norm_weight": (LLAMA, (*LLAMA, "model.norm_weight=one_plus")),
    "model.norm_bias": ((), ("model.norm_bias=false",)),
    "model.norm_placement": (LLAMA, (*LLAMA, "model.norm_placement=both")),
    "model.parallel_residual": (LLAMA, (*LLAMA, "model.parallel_residual=one_norm")),
    "model.mlp_bias": (LLAMA, (*LLAMA, "model.mlp_bias=true")),
    "model.embedding_multiplier": (LLAMA, (*LLAMA, "model.embedding_multiplier=2")),
    "model.residual_multiplier": (LLAMA, (*LLAMA, "model.residual_multiplier=0.5")),
    "model.attention_scale": (LLAMA, (*LLAMA, "model.attention_scale=0.5")),
    "model.logit_multiplier": (LLAMA, (*LLAMA, "model.logit_multiplier=0.5")),
    "model.logit_cap": (LLAMA, (*LLAMA, "model.logit_cap=30")),
    "model.attention_bias": (LLAMA, (*LLAMA, "model.attention_bias=all")),
    "model.tied": ((), ("model.tied=false",)),
    "model.vocabulary": (("model.vocabulary=99",), ("model.vocabulary=101",)),
    "model.adapters": ((), (ADAPTERS,)),
    "model.experts.count": (LLAMA, MIXTURE),
    "model.experts.per_token": (MIXTURE, (*MIXTURE, "model.experts.per_token=3")),
    "model.experts.mlp": (MIXTURE, (*MIXTURE, "model.experts.mlp=16")),
    "model.experts.shared": (MIXTURE, (*MIXTURE, "model.experts.shared=1")),
    "model.experts.every": (MIXTURE, (*MIXTURE, "model.experts.every=2")),
    "model.experts.dense_first": (MIXTURE, (*MIXTURE, "model.experts.dense_first=1")),
    "model.experts.router": (MIXTURE, (*MIXTURE, "model.experts.router=sigmoid")),
    "model.experts.router_normalize": (MIXTURE, (*MIXTURE, "model.experts.router_normalize=false")),
    "model.experts.router_scale": (MIXTURE, (*MIXTURE, "model.experts.router_scale=2.0")),
    "model.experts.router_groups": (MIXTURE, GROUPS),
    "model.experts.router_groups_per_token": (GROUPS, (*GROUPS, "model.experts.router_groups_per_token=2")),
    "model.experts.capacity": (MIXTURE, (*MIXTURE, "model.experts.capacity=1.5")),
    "model.activation": (LLAMA, (*LLAMA, "model.activation=geglu")),
    "model.rope_base": (LLAMA, (*LLAMA, "model.rope_base=500")),
    "model.rope_scaling": (LLAMA, (*LLAMA, 'model.rope_scaling={kind = "linear", factor = 2}')),
    "model.norm_epsilon": ((), ("model.norm_epsilon=1e-6",)),
    "model.parametrization": ((), MUP),
    "model.base_width": (MUP, (MUP[0], "model.base_width=16", MUP[2])),
    "model.base_head_size": (MUP, (*MUP[:2], "model.base_head_size=2")),
    "model.module": ((MODULE,), ('model.module="net.py:Other"',)),
    "model.arguments": ((MODULE,), (MODULE, "model.arguments={width = 3}")),
    "objective.kind": ((), ("objective.kind=reward", "model.tied=false", "batch.micro_size=2")),
    "objective.beta": (PPO, (*PPO, "objective.beta=0.1")),
    "batch.sequence": ((), ("batch.sequence=12",)),
    "communication.warmup": (
        ("layout.local_steps.replicas=2", "layout.local_steps.steps=4"),
        ("layout.local_steps.replicas=2", "layout.local_steps.steps=4", "communication.warmup=8"),
    ),
}


def deck_of(keys: tuple[str, ...]) -> Deck:
    if any(key.startswith("model.module") for key in keys):
        text = "[run]\nsteps = 2\n[data]\ntokens = 't.h5'\n[batch]\nglobal_size = 4\nsequence = 16\n"
        return parse_deck(text, [*keys, "model.vocabulary=99"])
    return small_deck(*keys)


def test_all_refused_keys_are_tested() -> None:
    elsewhere = {key for key in keys_of_policy("refused") if key.count(".") > 1} | {
        "policy.rollout",
        "policy.epochs",
    }
    assert CHANGES.keys() | elsewhere == set(keys_of_policy("refused"))


@pytest.mark.parametrize("key", CHANGES)
def test_refused_key(key: str) -> None:
    before, after = (deck_of(keys) for keys in CHANGES[key])
    require_resumable(before, before, PATH, 6)
    stored = parse_deck(deck_text(before))
    require_resumable(before, stored, PATH, 6)
    with pytest.raises(HpctrainError) as caught:
        require_resumable(after, stored, PATH, 6)
    assert caught.value.exit_code == 2
    message = [each for each in caught.value.problems if key in each.partition(": ")[2] or key in each[:60]]
    assert len(message) >= 1, caught.value.problems
    assert "x.h5 was trained with" in message[0] or key == "communication.warmup"


def test_error_names_all_refused_keys() -> None:
    changes = ("model.layers=3", "model.heads=4", "model.norm_epsilon=1e-6", "optimizer.name=sgd")
    with pytest.raises(HpctrainError) as caught:
        require_resumable(small_deck(*changes), small_deck(), PATH, 2)
    assert [each.split(": ")[0] for each in caught.value.problems] == [f"--set {each}" for each in changes]
    assert "x.h5 was trained with 1e-05, and another value changes what" in caught.value.problems[2]


def test_error_omits_keys_that_depend_on_a_refused_one() -> None:
    with pytest.raises(HpctrainError) as caught:
        require_same_model(small_deck("model.hidden=64"), small_deck(), PATH)
    assert len(caught.value.problems) == 1


def test_refused_key_with_its_default_value() -> None:
    """For example, a batch script no longer has a --set of the first run."""
    with pytest.raises(HpctrainError, match=r"model.norm_epsilon = 1e-05 \(default\): .* with 0.001,"):
        require_same_model(small_deck(), small_deck("model.norm_epsilon=1e-3"), PATH)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("model.dropout=0.1", "optimizer.weight_decay=0.5", "precision.compute=bf16", "layout.zero=1")),
        ((), ('model.frozen=["blocks.0.*"]', "run.seed=7", "learning_rate.peak=1e-3", "batch.global_size=8")),
        (("model.vocabulary=99",), ("model.vocabulary=",)),
        (LLAMA, (*LLAMA, "batch.sequence=32")),
        (("model.from=a.h5",), ()),
        ((), ("objective.kind=sft",)),
        ((), ("model.parametrization=mup", "model.base_width=32")),
        (MIXTURE, (*MIXTURE, "model.experts.balance_loss=0.1", "model.experts.router_z_loss=0.1")),
        ((MODULE,), (MODULE, "model.arguments={}")),
        ((MODULE,), (MODULE.replace("net.py", "elsewhere/net.py"),)),
        ((*PPO, "objective.beta=0.1"), PPO),
    ],
)
def test_free_keys(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    stored = parse_deck(deck_text(deck_of(before)))
    require_resumable(deck_of(after), stored, PATH, 2)


def test_run_keeps_its_vocabulary() -> None:
    before = small_deck("model.vocabulary=99")
    deck = small_deck("model.vocabulary=")
    assert keep_vocabulary(deck, before).model.vocabulary == 99
    assert keep_vocabulary(small_deck("model.vocabulary=98"), before).model.vocabulary == 98


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("policy.rollout=16",),
            "--set policy.rollout=16: x.h5 was trained on 24 samples, which is not a multiple",
        ),
        (
            ("policy.epochs=2",),
            "--set policy.epochs=2: x.h5 was trained on 24 samples, which is not",
        ),
        (("batch.global_size=24",), ""),
        (("policy.epochs=3",), ""),
    ],
)
def test_policy_resumes_between_rollouts(changes: tuple[str, ...], message: str) -> None:
    """A run that resumed inside a rollout would never handle a signal, since it does so between rollouts."""
    before, after = small_deck(*PPO, "run.steps=48"), small_deck(*PPO, "run.steps=48", *changes)
    if not message:
        require_resumable(after, before, PATH, 3, 24)
        require_resumable(before, before, PATH, 3, 28)  # as in a run that was stopped after too many spikes
        return
    with pytest.raises(HpctrainError) as caught:
        require_resumable(after, before, PATH, 3, 24)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(message)


def test_changed_critic_is_refused() -> None:
    before = small_deck(*PPO, 'policy.critic=["learning_rate.peak=1e-3"]')
    require_resumable(small_deck(*PPO, 'policy.critic=["layout.zero=1"]'), before, PATH, 2)
    with pytest.raises(
        HpctrainError, match=r"policy.critic: .*layers.*: x.h5 was trained with 2, "
    ) as caught:
        require_resumable(small_deck(*PPO, 'policy.critic=["model.layers=1"]'), before, PATH, 2)
    assert len(caught.value.problems) == 1


def test_diverged_replicas_cannot_warm_up() -> None:
    """Their optimizer states differ, so summed gradients would not make the replicas equal again."""

    def deck(warmup: int, *keys: str, replicas: int = 2) -> Deck:
        replica_keys = (
            (f"layout.local_steps.replicas={replicas}", "layout.local_steps.steps=4") if replicas > 1 else ()
        )
        return small_deck(*replica_keys, f"communication.warmup={warmup}" if warmup else "run.seed=1", *keys)

    for after, before, updates in (
        (deck(8), deck(8), 6),  # the warm-up continues
        (deck(20), deck(8), 6),
        (deck(8), deck(0), 8),
        (deck(8), deck(0, replicas=1), 6),
        (deck(0, replicas=1), deck(0), 6),
    ):
        require_resumable(after, before, PATH, updates)
    for after, before, updates in ((deck(8), deck(0), 6), (deck(20), deck(8), 9), (deck(20), deck(8), 19)):
        with pytest.raises(HpctrainError, match=r"communication.warmup=.*after update (0|8); after"):
            require_resumable(after, before, PATH, updates)


RESTART = "optimizer.restart=true"
LION, SGD, MOMENTUM = "optimizer.name=lion", "optimizer.name=sgd", "optimizer.momentum=0.9"
MUON, BOTH = "optimizer.name=muon", 'optimizer.muon.matrices=["blocks.*", "*embedding*"]'
TOP_K, ONE_BIT = "communication.compress=topk", "communication.compress=onebit"
WARMUP, REPLICAS = "communication.warmup=3", ("layout.local_steps.replicas=2", "layout.local_steps.steps=4")


@pytest.mark.parametrize(
    ("before", "after", "replaced_state"),
    [
        ([], [], ""),
        ([], [RESTART], ""),
        ([], ["optimizer.beta1=0.8"], ""),
        ([], [LION, RESTART], 'the state of "adamw"'),
        ([LION], [SGD, RESTART], 'the state of "lion"'),
        ([MUON], [SGD, RESTART], 'the state of "muon"'),
        ([SGD], [SGD, MOMENTUM, RESTART], "no momentum"),
        ([MUON], [MUON, BOTH, RESTART], 'muon\'s state of ["blocks.*"]'),
        ([MUON], [MUON, RESTART, "optimizer.momentum=0.5"], ""),
        ([SGD, MOMENTUM], [SGD], ""),
        ([SGD, MOMENTUM], [SGD, MOMENTUM, TOP_K], ""),
        ([], [SGD, MOMENTUM, TOP_K, RESTART], 'the state of "adamw"'),
        ([], [LION, RESTART, *REPLICAS], 'the state of "adamw"'),
    ],
)
def test_replaced_optimizer_state(before: list[str], after: list[str], replaced_state: str) -> None:
    assert replaced_optimizer_state(small_deck(*after), small_deck(*before), PATH) == replaced_state


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([], [LION, "optimizer.restart=false"], r'optimizer.name=lion: x.h5 holds the state of "adamw" \('),
        ([LION], [], r'optimizer.name = "adamw" .*x.h5 holds the state of "lion" \(optimizer'),
        ([SGD], [SGD, MOMENTUM], r"momentum=0.9: x.h5 holds no momentum \(optimizer"),
        ([MUON], [MUON, BOTH], r"matrices=.*: x.h5 holds muon's state of \[.blocks.\*.\] \(optimizer"),
        (
            [LION],
            [ONE_BIT, WARMUP, RESTART],
            "communication.warmup=3: conflicts with optimizer.restart, with which",
        ),
        (
            [],
            [SGD, MOMENTUM, TOP_K, WARMUP, RESTART],
            "communication.warmup=3: conflicts with optimizer.restart",
        ),
        ([], [LION, RESTART, WARMUP, *REPLICAS], "communication.warmup=3: conflicts with optimizer.restart"),
    ],
)
def test_other_optimizer_needs_a_restart(before: list[str], after: list[str], message: str) -> None:
    with pytest.raises(HpctrainError, match=message):
        replaced_optimizer_state(small_deck(*after), small_deck(*before), PATH)
