"""Tables that a key selects, and decks that have keys by their old names.

Tests of deck/reading/old_keys.py, deck/reading/migrate.py and deck/sections/optimizer.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.reading.migrate import migrated_text
from hpctrain.deck.reading.old_keys import new_names, old_keys
from hpctrain.deck.schema import Deck, field_of
from hpctrain.deck.sections.optimizer import AdamWTable, LionTable, MuonTable, SgdTable
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError

SMALL = """
[run]
steps = 20
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 2
[data]
tokens = "tokens.h5"
[batch]
global_size = 8
sequence = 16
"""


def read(text: str, *overrides: str) -> Deck:
    deck = parse_deck(SMALL + text, overrides)
    assert parse_deck(deck_text(deck)) == deck
    return deck


def problems(text: str, *overrides: str, includes: bool = True) -> list[str]:
    with pytest.raises(HpctrainError) as raised:
        parse_deck(SMALL + text, overrides, includes=includes)
    return [*raised.value.problems]


def test_a_table_selects_itself() -> None:
    deck = read("[optimizer]\nclip = 2.0\n[optimizer.muon]\nmomentum = 0.5\n")
    assert (deck.optimizer.name, deck.optimizer.clip) == ("muon", 2.0)
    assert deck.optimizer.rule == MuonTable(momentum=0.5, nesterov=True)
    assert read("", "optimizer.sgd.momentum=0.5").optimizer.rule == SgdTable(momentum=0.5)
    assert read("[optimizer]\nlion = {beta1 = 0.5}\n").optimizer.rule == LionTable(beta1=0.5)
    assert read("").optimizer.rule == AdamWTable()


def test_a_table_that_is_not_selected_is_a_contradiction() -> None:
    text = '[optimizer]\nname = "adamw"\n[optimizer.muon]\nmomentum = 0.5\n'
    assert problems(text) == [
        'deck.toml:16: [optimizer.muon] requires optimizer.name = "muon", but deck.toml:15 has "adamw" '
        "(leave one of them out)"
    ]
    assert problems("[optimizer.muon]\nmomentum = 0.5\n[optimizer.sgd]\nmomentum = 0.5\n") == [
        'deck.toml:16: [optimizer.sgd] requires optimizer.name = "sgd", but deck.toml:14 has "muon" '
        "(leave one of them out)"
    ]
    assert problems('[optimizer]\nname = "sgd"\n', "optimizer.muon.momentum=0.5") == [
        '--set optimizer.muon.momentum=0.5: requires optimizer.name = "muon", but deck.toml:15 has '
        '"sgd" (leave one of them out)'
    ]


def test_problems_of_two_tables_are_reported_together() -> None:
    """The word "none" stands for an absent table only where no key selects the table."""
    assert problems("[optimizer.lion]\nbeta = 0.5\n[optimizer.adafactor]\nbeta3 = 1\n") == [
        "deck.toml:15: optimizer.lion.beta = 0.5: unknown key (did you mean optimizer.lion.beta1?)",
        'deck.toml:16: [optimizer.adafactor] requires optimizer.name = "adafactor", but deck.toml:14 '
        'has "lion" (leave one of them out)',
        "deck.toml:17: optimizer.adafactor.beta3 = 1: unknown key (did you mean optimizer.adafactor.beta1?)",
    ]
    assert problems("", "optimizer.muon=none") == ["--set optimizer.muon=none: must be a table, not text"]


def test_another_choice_replaces_the_table_below() -> None:
    text = '[optimizer]\nname = "muon"\n[optimizer.muon]\nmomentum = 0.5\n'
    assert read(text, "optimizer.name=sgd").optimizer.rule == SgdTable()
    assert read(text, "optimizer.name=sgd", "optimizer.sgd.momentum=0.1").optimizer.rule == SgdTable(
        momentum=0.1
    )
    assert read(text, "optimizer.muon.momentum=0.1").optimizer.rule == MuonTable(momentum=0.1, nesterov=True)
    assert read(text, "optimizer.name=").optimizer.rule == AdamWTable()
    assert read(text, "optimizer.muon.momentum=").optimizer.rule == MuonTable(nesterov=True)


def test_what_is_wrong_within_a_table_is_told_at_its_line() -> None:
    text = '[optimizer.muon]\nmomentum = 2.0\nmomentom = 0.5\nnewton_schulz = "fp8"\nbeta1 = 0.9\n'
    assert problems(text) == [
        "deck.toml:15: optimizer.muon.momentum = 2.0: must be a number from 0 to below 1",
        "deck.toml:16: optimizer.muon.momentom = 0.5: unknown key (did you mean optimizer.muon.momentum?)",
        'deck.toml:17: optimizer.muon.newton_schulz = "fp8": must be "bf16" or "fp32"',
    ]
    assert problems("", "optimizer.muon.momentum=2.0") == [
        "--set optimizer.muon.momentum=2.0: must be a number from 0 to below 1"
    ]


def test_old_keys_are_read_under_their_new_names() -> None:
    deck = read('[optimizer]\nname = "sgd"\nmomentum = 0.5\nnesterov = true\n')
    assert deck.optimizer.rule == SgdTable(momentum=0.5, nesterov=True)
    assert read("[optimizer.lion]\nbeta1 = 0.8\n", "optimizer.beta2=0.5").optimizer.rule == LionTable(
        beta1=0.8, beta2=0.5
    )
    new = deck_text(deck)
    assert parse_deck(new, ["optimizer.momentum=0.1"]).value("optimizer.sgd.momentum") == 0.1
    unset = parse_deck(new, ["optimizer.momentum=", "optimizer.nesterov="])
    assert unset.optimizer.rule == SgdTable()


def test_an_old_key_without_effect_may_have_its_default_only() -> None:
    text = '[optimizer]\nname = "sgd"\nbeta1 = 0.9\nbeta2 = {}\n'
    assert read(text.format(0.95)).optimizer.rule == SgdTable()
    expected = 'deck.toml:17: optimizer.beta2 = 0.5: has no effect with optimizer.name = "sgd" (leave it out)'
    assert problems(text.format(0.5)) == [expected]
    stored = parse_deck(SMALL + text.format(0.5), includes=False)
    assert stored.optimizer.rule == SgdTable()


OLD = """# An old deck.
[model]
preset = "gpt2-124m"
[layout]
replicas = 2   # as many nodes
[optimizer]
name = "muon"
# all blocks
matrices = [
  "blocks.*",  # all
]
momentum = 0.9 # as in the paper
clip = 2.0

[communication]
local_steps = 4
outer = "diloco"
outer_momentum = 0.8
ratio = 0.01

[machine]
memory_per_node = "3 GB"
"""

NEW = """# An old deck.
[model]
preset = "gpt2-124m"

[layout.local_steps]
replicas = 2   # as many nodes
steps = 4
outer = "diloco"

[layout.local_steps.diloco]
momentum = 0.8

[optimizer]
name = "muon"
clip = 2.0

[optimizer.muon]
# all blocks
matrices = [
  "blocks.*",  # all
]
momentum = 0.9 # as in the paper

[machine]
memory = "3 GB"
"""


def test_a_deck_is_migrated_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_text(OLD)
    assert migrated_text(path) == NEW
    path.write_text(NEW)
    assert migrated_text(path) == NEW
    keys = ["run.steps=10", "data.tokens=tokens.h5", "batch.global_size=8"]
    assert parse_deck(OLD, keys) == parse_deck(NEW, keys)


def test_an_old_key_in_an_inline_table_is_not_migrated(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_text('optimizer = {name = "sgd", momentum = 0.9}\n')
    with pytest.raises(
        HpctrainError,
        match="must be on a separate line",
    ):
        migrated_text(path)


def test_the_user_is_told_the_present_name_of_an_old_key(caplog: pytest.LogCaptureFixture) -> None:
    parse_deck(SMALL + '[optimizer]\nname = "sgd"\nmomentum = 0.5\n', name="old.toml")
    assert caplog.messages == ["old.toml:16: optimizer.momentum is now optimizer.sgd.momentum"]
    caplog.clear()
    parse_deck(SMALL + '[optimizer]\nname = "sgd"\nmomentum = 0.5\n', name="stored", includes=False)
    assert caplog.messages == []


def test_each_old_key_has_a_new_one() -> None:
    for key in old_keys():
        assert new_names(key), key
        assert all(field_of(name) is not None for name in new_names(key)), key


OLD_SGD = '[optimizer]\nname = "sgd"\nmomentum = 0.9\n'
OLD_REPLICAS = "[layout]\nreplicas = 2\n[communication]\nlocal_steps = 4\n"


@pytest.mark.parametrize(
    ("text", "overrides", "key", "value"),
    [
        (
            OLD_SGD,
            ("optimizer.sgd.momentum=0.4", "optimizer.momentum=0.3"),
            "optimizer.sgd.momentum",
            0.3,
        ),
        (OLD_SGD, ("optimizer.sgd.momentum=",), "optimizer.sgd.momentum", 0.0),
        (OLD_SGD.replace("sgd", "muon"), ("optimizer.muon=",), "optimizer.muon.momentum", 0.95),
        (OLD_SGD, ("optimizer.muon=", "optimizer.lion.beta1="), "optimizer.sgd.momentum", 0.9),
        (OLD_SGD, ("optimizer.name=muon", "optimizer.muon.momentum=0.5"), "optimizer.muon.momentum", 0.5),
        (OLD_REPLICAS, ("layout.local_steps=none",), "layout.local_steps", None),
        (OLD_REPLICAS, ("layout.local_steps=",), "layout.local_steps", None),
        (
            '[communication]\nserver = "async"\nserver_ranks = 2\n',
            ("communication.server=none",),
            "communication.server",
            None,
        ),
    ],
)
def test_the_last_of_an_old_and_a_present_name_counts(
    text: str, overrides: tuple[str, ...], key: str, value: object
) -> None:
    assert read(text, *overrides).value(key) == value


EXPERTS = "[model]\nexperts = 4\nexperts_per_token = 2\n"


@pytest.mark.parametrize(
    ("base", "text", "key", "value"),
    [
        (OLD_REPLICAS, 'layout = "auto"\n', "layout.local_steps.replicas", 2),
        (EXPERTS, "[model]\nexperts = 8\n", "model.experts.per_token", 2),
        (EXPERTS, "[model.experts]\ncount = 8\n", "model.experts.per_token", 2),
        (EXPERTS, "[model]\nexperts = 0\n", "model.experts", None),
        (EXPERTS, '[model]\nexperts = "none"\n', "model.experts", None),
        (OLD_SGD, "[optimizer]\nmomentum = 0.5\n", "optimizer.sgd.momentum", 0.5),
        (OLD_SGD, "[optimizer.sgd]\nnesterov = true\n", "optimizer.sgd.momentum", 0.9),
    ],
)
def test_old_keys_of_an_included_deck_stay_unless_they_are_replaced(
    base: str, text: str, key: str, value: object, tmp_path: Path
) -> None:
    llama = SMALL.replace('family = "gpt2"', 'family = "llama"')
    small = llama.replace("[model]\n", base) if base == EXPERTS else SMALL + base
    (tmp_path / "base.toml").write_text(small)
    (tmp_path / "deck.toml").write_text(f'include = "base.toml"\n{text}')
    assert read_deck(tmp_path / "deck.toml").value(key) == value


def test_a_deck_takes_precedence_over_an_included_one_with_present_names(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        f'{SMALL}[optimizer]\nname = "sgd"\n[optimizer.sgd]\nmomentum = 0.9\n'
    )
    (tmp_path / "deck.toml").write_text('include = "base.toml"\n[optimizer]\nmomentum = 0.5\n')
    assert read_deck(tmp_path / "deck.toml").value("optimizer.sgd.momentum") == 0.5
    (tmp_path / "base.toml").write_text(SMALL + OLD_REPLICAS)
    (tmp_path / "deck.toml").write_text('include = "base.toml"\n[layout]\nlocal_steps = "none"\n')
    assert read_deck(tmp_path / "deck.toml").layout.local_steps is None
    (tmp_path / "base.toml").write_text(f'{SMALL}[layout]\nlocal_steps = "none"\n')
    (tmp_path / "deck.toml").write_text(f'include = "base.toml"\n{OLD_REPLICAS}')
    local_steps = read_deck(tmp_path / "deck.toml").layout.local_steps
    assert local_steps is not None and (local_steps.replicas, local_steps.steps) == (2, 4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{OLD_SGD}[optimizer.sgd]\nmomentum = 0.8\n",
            "deck.toml:16: optimizer.momentum = 0.9: conflicts with optimizer.sgd.momentum on line 18, "
            "its new name (leave one of them out)",
        ),
        (
            OLD_REPLICAS.replace("[comm", 'local_steps = "none"\n[comm').replace("local_steps = 4\n", ""),
            'deck.toml:15: layout.replicas = 2: has no effect with layout.local_steps = "none" '
            "(leave one of them out)",
        ),
    ],
)
def test_a_file_cannot_give_a_key_by_both_names(text: str, problem: str) -> None:
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("key", "chosen"),
    [("optimizer.lion.beta1", "optimizer.name"), ("communication.topk.ratio", "communication.compress")],
)
def test_a_reset_does_not_choose_a_table(key: str, chosen: str) -> None:
    assert read("", f"{key}=").value(chosen) == read("").value(chosen)


@pytest.mark.parametrize("name", ['"sgdd"', "3"])
def test_a_wrong_choice_is_the_only_problem(name: str) -> None:
    for more in ("momentum = 0.4\n", "[optimizer.muon]\n"):
        (problem,) = problems(f"[optimizer]\nname = {name}\n{more}")
        assert problem.startswith("deck.toml:15: optimizer.name")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[optimizer]\nname = "muon"\nmuon.match = "original"\nmomentum = 0.4\n',
            "deck.toml:17: optimizer.momentum is now optimizer.muon.momentum",
        ),
        ("[optimizer]\nmomentum = 0.4\n", "has no effect with optimizer.name"),
        (f"{OLD_SGD}[optimizer.sgd]\nmomentum = 0.8\n", "its new name"),
    ],
)
def test_a_deck_that_would_change_is_not_migrated(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_text(SMALL + text)
    with pytest.raises(HpctrainError) as raised:
        migrated_text(path)
    assert problem in raised.value.problems[-1]


def test_comments_of_other_sections_and_quoted_keys_stay_in_place(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_text(
        f"{SMALL}[optimizer]\nname = 'sgd'\n'momentum' = 0.9\n\n# often\n[checkpoint]\nevery = 3\n"
    )
    assert migrated_text(path).endswith(
        "[optimizer.sgd]\nmomentum = 0.9\n\n# often\n[checkpoint]\nevery = 3\n"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\xff[run]", "is not UTF-8 text (byte 0)"), (None, "cannot be read: no such file or directory")],
)
def test_files_that_cannot_be_migrated_are_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "old.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HpctrainError) as raised:
        migrated_text(path)
    assert raised.value.problems == (f"{path}: {problem}",)
