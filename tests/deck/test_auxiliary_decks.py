"""What names a reward model, and what a critic may have of its own. Tests of deck/auxiliary_decks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.auxiliary_decks import critic_deck, is_checkpoint, reference_deck
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("runs/reward/checkpoints/step-00000100.h5", True),
        ("runs/reward/checkpoints/latest", True),
        ("{folder}", True),
        ("{folder}/none", False),
        ("exact-match", False),
        ("own.py:polite", False),
        ("regular-expression:/checkpoints/", False),
        ("regular-expression:x.h5", False),
    ],
)
def test_checkpoints(tmp_path: Path, name: str, wanted: bool) -> None:
    assert is_checkpoint(name.format(folder=tmp_path)) == wanted


PPO = """
[run]
steps = 2
[model]
family = "llama"
layers = 2
hidden = 32
heads = 2
vocabulary = 64
[data]
tokens = "prompts.h5"
[objective]
kind = "ppo"
[policy]
reward = ["exact-match"]
tokens = 8
critic = ["CHANGE"]
[batch]
sequence = 32
global_size = 4
"""


def test_problems_of_a_critic_name_the_lines_of_the_deck() -> None:
    text = (
        PPO.replace("CHANGE", 'optimizer.muon.momentum=0.5", "layout.tensr=2') + '[optimizer]\nname = "sgd"\n'
    )
    with pytest.raises(HpctrainError) as raised:
        critic_deck(parse_deck(text, name="a.toml"), 1)
    assert raised.value.problems == (
        'policy.critic: optimizer.muon.momentum=0.5: requires optimizer.name = "muon", but a.toml:22 has '
        '"sgd" (leave one of them out)',
        "policy.critic: layout.tensr=2: unknown key (did you mean layout.tensor?)",
    )


@pytest.mark.parametrize("change", ["batch.sequence=16", "data.tokens=x.h5", "run.seed=9", "policy.tokens=4"])
def test_what_all_models_of_a_run_have_in_common(change: str) -> None:
    deck = parse_deck(PPO.replace("CHANGE", change), ranks=1)
    with pytest.raises(
        HpctrainError,
        match=f"^policy.critic: {change.partition('=')[0]} must be the same for all models of the run",
    ):
        critic_deck(deck, 1)


@pytest.mark.parametrize(
    "change",
    [
        "model.hidden=64",
        "model.from=x.h5",
        "optimizer.name=sgd",
        "learning_rate.peak=1",
        "stability.z_loss=1",
    ],
)
def test_a_reference_is_the_model_that_the_run_starts_from(change: str) -> None:
    text = PPO.replace("critic", "reference").replace("[policy]", "beta = 0.1\n[policy]")
    name = change.partition("=")[0]
    why = f"{name} does not apply to the reference model, which is not trained"
    sections = "layout, precision, memory, communication, machine"
    told = rf"^policy\.reference: {why} \(allowed: keys of {sections}, and batch\.micro_size\)$"
    with pytest.raises(HpctrainError, match=told):
        reference_deck(parse_deck(text.replace("CHANGE", change), ranks=1), 1)
    other = reference_deck(parse_deck(text.replace("CHANGE", "precision.compute=bf16"), ranks=1), 1)
    assert other is not None and other.precision.compute == "bf16"


def test_what_is_wrong_with_a_critic_is_told_under_its_key() -> None:
    deck = parse_deck(PPO.replace("CHANGE", "layout.tensor=2"), ranks=1)
    with pytest.raises(HpctrainError, match=r"^policy\.critic: layout\.tensor=2: layout\.tensor x "):
        critic_deck(deck, 1)
    own = critic_deck(parse_deck(PPO.replace("CHANGE", "batch.micro_size=2"), ranks=1), 1)
    assert own is not None and own.batch.micro_size == 2
