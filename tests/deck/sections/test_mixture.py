"""What a deck says of token files: lists, patterns and mixtures, and all that can be wrong with them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.mixture import dataset_entries, token_file_patterns
from hpctrain.deck.toml_text import deck_text
from tests.deck.small_text import SMALL, changed, problems

MIXTURE = """
[[data.mixture]]
tokens = "web.h5"
weight = 0.7
[[data.mixture]]
tokens = ["a.h5", "b/*.h5"]
weight = 0.3
name = "books"
"""
WITHOUT = changed('tokens = "tokens.h5"', "")


def mixture(*entries: str) -> list[str]:
    return problems(WITHOUT + "".join(f"\n[[data.mixture]]\n{entry}\n" for entry in entries))


def test_a_mixture_is_read_and_parses_back() -> None:
    deck = parse_deck(WITHOUT + MIXTURE)
    web, books = dataset_entries(deck)
    assert (web.name, web.tokens, web.share) == ("web", ("web.h5",), Fraction(7, 10))
    assert (books.name, books.tokens, books.share) == ("books", ("a.h5", "b/*.h5"), Fraction(3, 10))
    assert token_file_patterns(deck) == ("web.h5", "a.h5", "b/*.h5")
    text = deck_text(deck)
    assert "\ntokens = " not in text
    assert dataset_entries(parse_deck(text, name="other.toml")) == (web, books)
    by_argument = 'data.mixture=[{tokens="web.h5", weight=1}, {tokens="x.h5", weight=1}]'
    assert dataset_entries(parse_deck(SMALL, ["data.tokens=", by_argument]))[1].share == Fraction(1, 2)
    assert parse_deck(text, ["data.mixture=", "data.tokens=t.h5"]).data.tokens == "t.h5"


def test_tokens_are_one_or_a_list() -> None:
    listed = changed('tokens = "tokens.h5"', 'tokens = ["a.h5", "b.h5"]')
    (entry,) = dataset_entries(parse_deck(listed))
    assert (entry.name, entry.tokens, entry.share) == ("a", ("a.h5", "b.h5"), 1)
    assert parse_deck(deck_text(parse_deck(listed))).data.tokens == ("a.h5", "b.h5")
    assert parse_deck(SMALL, ['data.tokens=["a.h5", "b.h5"]']).data.tokens == ("a.h5", "b.h5")
    assert parse_deck(SMALL, ["data.tokens=5"]).data.tokens == "5"


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("[]", "text in quotes that is not empty, or a list of texts"),
        ('["a.h5", ""]', "must name files; names must not be empty"),
        ('["a.h5", 5]', "must be text in quotes that is not empty, or a list of texts"),
        ('["a\\u0007"]', "has a control character (U+0007)"),
    ],
)
def test_wrong_tokens(tokens: str, told: str) -> None:
    (sentence,) = problems(changed('tokens = "tokens.h5"', f"tokens = {tokens}"))
    assert sentence.startswith("deck.toml:11: data.tokens = ") and told in sentence


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('tokens = "a.h5"\nweight = -1', "entry 2: weight = -1: must be a number above 0"),
        ('tokens = "a.h5"\nweight = nan', "entry 2: weight = nan: must be a number above 0"),
        ('tokens = "a.h5"\nweight = inf', "entry 2: weight = inf: must be a number above 0"),
        ('tokens = "a.h5"\nweight = "2"', 'entry 2: weight = "2": must be a number above 0'),
        ('tokens = "a.h5"\nweight = true', "entry 2: weight = true: must be a number above 0"),
        ('tokens = "a.h5"\nweight = 0', "entry 2: weight = 0: must be above 0 (or leave the entry out)"),
        ('tokens = "a.h5"\nweight = 1e-9', "entry 2: weight = 1e-09: must be at least 1e-05"),
        ('tokens = "a.h5"', "entry 2: weight is missing: a number above 0"),
        ("weight = 1", "entry 2: tokens is missing: token files, as data.tokens"),
        ('tokens = ""\nweight = 1', 'entry 2: tokens = "": must name files'),
        ("tokens = [1]\nweight = 1", "entry 2: tokens = [1]: must be text in quotes, or a list of texts"),
        ('tokens = "a.h5"\nweigth = 1\nweight = 1', 'entry 2: "weigth": unknown key (did you mean weight?)'),
        ('tokens = "a.h5"\nweight = 1\nname = ""', 'entry 2: name = "": must be text of 1 to 100'),
        ('tokens = "c/web.h5"\nweight = 1', 'has 2 entries called "web" (use a different name for each)'),
    ],
)
def test_wrong_entries(entry: str, told: str) -> None:
    (sentence,) = mixture('tokens = "web.h5"\nweight = 1', entry)
    assert sentence.startswith("deck.toml:20: data.mixture = ") and told in sentence, sentence


def test_wrong_mixtures() -> None:
    assert "with a weight above 0" in mixture('tokens = "a"\nweight = 0')[0]
    both = problems(SMALL + MIXTURE)
    assert both == [
        'deck.toml:11: data.tokens = "tokens.h5": conflicts with data.mixture (leave one of them out)'
    ]
    assert "to 512 entries" in problems(WITHOUT, "data.mixture=[]")[0]
    assert "must be a list of tables" in problems(WITHOUT, "data.mixture=5")[0]
    two = mixture('tokens = "a"\nweight = -1', 'tokens = ""\nweight = 1')
    assert len(two) == 2  # all at once
