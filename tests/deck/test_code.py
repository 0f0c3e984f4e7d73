"""Tests of the decision which code of a deck may be called.

Modules: deck/code.py, deck/user_code.py, checkpoint/stored_deck.py.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.stored_deck import deck_state, require_trusted, stored_deck
from hpctrain.deck.code import CODE_KEYS, CodeEntry, CodeTrust, NamedCode, UntrustedCodeError, code_entries
from hpctrain.deck.read import changed_deck, parse_deck, read_code_entries, read_stored_deck
from hpctrain.deck.schema import Deck, fields, sections
from hpctrain.deck.user_code import import_function
from hpctrain.errors import EXIT_DONE, HpctrainError
from hpctrain.fault_checks.spikes import Spike
from hpctrain.post.rewards.process_rewards import UserReward
from hpctrain.post.rewards.rewards import parse_reward
from hpctrain.report.bad_samples import bad_samples

TEXT = """
[run]
steps = 2
[model]
module = "mine.py:build"
loss = "mine.py:loss"
initial = "mine.py:initial"
[data]
dataset = "mine.py:Data"
collate = "mine.py:collate"
[batch]
global_size = 2
[learning_rate]
peak = 1e-3
"""
FILE = Path("runs/x/checkpoints/step-00000002.h5")


def absolute_entry(key: str, target: str) -> CodeEntry:
    return CodeEntry(key, str(Path(target).absolute()))


MODULE, LOSS = absolute_entry("model.module", "mine.py:build"), absolute_entry("model.loss", "mine.py:loss")


def read_from_checkpoint(*overrides: str, text: str = TEXT, trust: CodeTrust = CodeTrust()) -> Deck:  # noqa: B008
    return stored_deck(deck_state(parse_deck(text)), FILE, overrides, trust)


def test_all_keys_that_name_code_are_listed() -> None:
    """The description of such a key mentions FILE.py or refers to model.module."""
    keys = {
        f"{section}.{name}"
        for section in sections()
        for name, field in fields(section).items()
        if any(word in str(field.description) for word in ("FILE.py", "named like model.module"))
    }
    assert keys | {"model.loss", "model.initial"} == set(CODE_KEYS)


def test_users_deck_is_trusted() -> None:
    deck = parse_deck(TEXT)
    assert not deck.untrusted_code and not deck.code("mine.py:build").refusal
    assert not changed_deck(deck, ["model.loss=other.py:f"], None).untrusted_code


def test_stored_deck_is_not_trusted() -> None:
    deck = read_from_checkpoint()
    assert {name.key for name in deck.untrusted_code} == set(CODE_KEYS) - {"policy.reward"}
    with pytest.raises(UntrustedCodeError) as refused:
        require_trusted(deck, FILE, CodeTrust())
    (sentence,) = refused.value.problems
    assert sentence.startswith(f"{FILE}: its deck names code that runs only if you allow it: ")
    for word in (str(MODULE), str(LOSS), "--set", "--trust-deck DECK", "--trust-code", "trust_code=True"):
        assert word in sentence
    with pytest.raises(UntrustedCodeError, match=r"model\.module"):
        import_function(deck.code(str(deck.model.module)))
    assert refused.value.exit_code == 2 != EXIT_DONE


def test_code_that_the_user_names_again_is_trusted() -> None:
    """The user repeats values with --set, removes keys, or passes a deck with --trust-deck."""
    keys = {"model.module": "build", "model.loss": "loss", "model.initial": "initial"}
    same = [f"{key}=mine.py:{name}" for key, name in keys.items()]
    rest = ["data.dataset=mine.py:Data", "data.collate="]
    assert not read_from_checkpoint(*same, *rest).untrusted_code
    assert read_from_checkpoint(*same[1:], *rest).untrusted_code == {MODULE}
    # The same function under another key is another name.
    other = read_from_checkpoint("model.loss=mine.py:build", trust=CodeTrust(entries=frozenset({LOSS})))
    assert MODULE in other.untrusted_code and LOSS not in other.untrusted_code
    assert not read_from_checkpoint(
        trust=CodeTrust(entries=read_from_checkpoint().untrusted_code)
    ).untrusted_code


def test_trust_code_applies_only_to_the_stored_names() -> None:
    deck = read_from_checkpoint(trust=CodeTrust(everything=True))
    assert not deck.untrusted_code
    later = changed_deck(deck, ["model.loss=later.py:f"], None)
    assert later.untrusted_code == {absolute_entry("model.loss", "later.py:f")}
    assert not changed_deck(deck, ["model.loss=later.py:f"], None, from_user=True).untrusted_code


def test_copies_of_a_stored_deck_are_not_trusted() -> None:
    deck = read_from_checkpoint()
    for made in (
        copy.deepcopy(deck),
        pickle.loads(pickle.dumps(deck)),
        deck.with_keys(run={"steps": 4}),
        changed_deck(deck, ["run.steps=4"], None),
    ):
        assert made.untrusted_code == deck.untrusted_code


def test_entries_of_the_users_deck(tmp_path: Path) -> None:
    """Included files are read, paths are relative to the deck, and other errors are ignored."""
    (tmp_path / "base.toml").write_text('[model]\nmodule = "mine.py:build"\n')
    (tmp_path / "deck.toml").write_text(
        'include = "base.toml"\n[policy]\nreward = ["exact-match", "a.b:f"]\n'
    )
    built = CodeEntry("model.module", f"{tmp_path}/mine.py:build")
    assert read_code_entries(tmp_path / "deck.toml") == {built, CodeEntry("policy.reward", "a.b:f")}
    with pytest.raises(HpctrainError, match=r"cannot be read"):
        read_code_entries(tmp_path / "no.toml")


def test_deck_in_a_run_folder_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(TEXT)
    assert read_stored_deck(tmp_path / "deck.toml", CodeTrust()).untrusted_code
    assert not read_stored_deck(tmp_path / "deck.toml", CodeTrust(everything=True)).untrusted_code


POLICY = """
[run]
steps = 2
[model]
family = "llama"
layers = 1
hidden = 8
heads = 2
vocabulary = 300
[data]
tokens = "prompts.h5"
[objective]
kind = "grpo"
[policy]
reward = ["torch:tensor", "exact-match"]
tokens = 4
[batch]
global_size = 16
sequence = 16
[learning_rate]
peak = 1e-3
"""


def test_rewards_of_a_stored_deck_need_trust() -> None:
    """An evaluation does not need rewards."""
    deck = read_from_checkpoint(text=POLICY)
    reward = CodeEntry("policy.reward", "torch:tensor")
    assert deck.untrusted_code == {reward}
    code = deck.code(reward.target)
    with pytest.raises(UntrustedCodeError, match=r"policy\.reward"):
        parse_reward(code, "policy.reward")
    with pytest.raises(UntrustedCodeError, match=r"policy\.reward"):
        UserReward(code)
    state = deck_state(parse_deck(POLICY))
    assert evaluation_deck(state, FILE, [], 1).objective.kind == "next-token"
    assert not read_from_checkpoint(f'policy.reward=["{reward.target}"]', text=POLICY).untrusted_code


def test_bad_samples_need_a_trusted_dataset() -> None:
    """`inspect --bad-samples` opens the dataset, which is code."""
    spike = Spike(2, None, None, "loss is not finite", 0, 2)
    state = deck_state(parse_deck(TEXT)) | {"spikes": {"found": [asdict(spike)]}}
    structure = CheckpointIndex(FILE, {}, np.empty(0, np.uint64), state)
    with pytest.raises(UntrustedCodeError, match=r"data\.dataset = "):
        bad_samples(structure, CodeTrust())


def test_other_rewards_name_no_code() -> None:
    rewards = ["exact-match", "regular-expression:a:b", "runs/reward", "math_rewards:score"]
    assert code_entries({"policy": {"reward": rewards}}, "deck.toml") == {
        CodeEntry("policy.reward", "math_rewards:score")
    }


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"text_config": {"attn_implementation": "hub/kernels"}}, "text_config.attn_implementation"),
        ({"attn_implementation": {"": "hub/kernels"}}, "attn_implementation"),
    ],
)
def test_arguments_that_download_code_are_listed(arguments: dict[str, object], key: str) -> None:
    (entry,) = code_entries({"model": {"arguments": arguments}}, "deck.toml")
    assert entry.key == f"model.arguments.{key}"
    harmless = {"trust_remote_code": False, "attn_implementation": "eager", "hidden": 8}
    assert not code_entries({"model": {"arguments": harmless}}, "deck.toml")


@pytest.mark.parametrize(
    "target",
    [
        "subprocess:run",
        "os:system",
        "builtins:eval",
        "importlib.util:find_spec",
        "hpctrain.host.process_lifetime:start_child",
        "torch:os.system",
        "{stdlib}/subprocess.py:run",
        "{own}:run",
        "{own}:again",
        "{own}:subprocess.run",
        "{own}:torch.load",
        "{own}:build.__globals__.get",
    ],
)
def test_functions_of_other_libraries_are_refused(target: str, tmp_path: Path) -> None:
    """They are refused for every deck, since none of them is a model, dataset, loss or reward."""
    own = tmp_path / "mine.py"
    own.write_text(
        "import subprocess\nfrom functools import partial\nfrom subprocess import run\nimport torch\n"
        "again = partial(partial(run), ['true'])\ndef build(): pass\n"
    )
    import subprocess

    stdlib = Path(subprocess.__file__).parent
    with pytest.raises(HpctrainError, match=r"standard library|is a module that|Python's own attributes"):
        import_function(NamedCode(target.format(stdlib=stdlib, own=own)))


def test_file_imports_modules_of_its_folder(tmp_path: Path) -> None:
    """So are names that it imports from a package. The file has the name of a standard module."""
    (tmp_path / "lower.py").write_text("def build(): return 1\n")
    (tmp_path / "code.py").write_text("import lower\nfrom torch.nn import Linear\ndef build(): return 2\n")
    for name, value in (("lower.build", 1), ("build", 2)):
        assert import_function(NamedCode(f"{tmp_path}/code.py:{name}"))() == value
    assert import_function(NamedCode(f"{tmp_path}/code.py:Linear"))(1, 1).weight.shape == (1, 1)
