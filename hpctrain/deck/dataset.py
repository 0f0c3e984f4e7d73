"""Keys of a user's own dataset, and placeholders for the keys of token files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.deck.code import is_target, resolve_target
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck, fields

ONLY_OF_DATASETS = ("dataset", "arguments", "collate", "workers", "inputs")
"""Keys of [data] that only a deck with a dataset may have."""

STAND_INS: Mapping[str, Any] = {"data.tokens": "none", "batch.sequence": 1, "model.vocabulary": 2}
"""Placeholder values of keys about token files, which a deck with a dataset does not use.

A sample counts as a sequence of one token.
"""

_WITH = ("data.dataset",)


def fill_dataset(tables: Mapping[str, dict[str, Any]], deck_name: str) -> None:
    """Resolve the functions of a dataset in the tables of a deck, and set the placeholders, in place."""
    data = tables["data"]
    for name in ("dataset", "collate"):
        if isinstance(data.get(name), str):
            data[name] = resolve_target(data[name], deck_name)
    for key, value in STAND_INS.items():
        section, _, name = key.partition(".")
        tables[section].setdefault(name, value)


def dataset_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of keys about a dataset, which is not loaded."""
    if deck.data.dataset is None:
        usual = {name: field.default for name, field in fields("data").items()}
        for name in ONLY_OF_DATASETS:
            if getattr(deck.data, name) != usual[name]:
                sentence = "is of a dataset that you bring, and data.dataset names none"
                yield DeckProblem(f"data.{name}", sentence, _WITH)
        return
    for name in ("dataset", "collate"):
        if not is_target(getattr(deck.data, name)):
            yield DeckProblem(f"data.{name}", 'must be "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"')
    if deck.model.module is None:
        sentence = "feeds modules that you bring (model.module); our own families read token files"
        yield DeckProblem("data.dataset", sentence, ("model.module",))
    why = {
        "data.tokens": "names a token file beside data.dataset, which is trained on (one of both has to go)",
        "data.other_tokenizer": "is of token files (leave it out with data.dataset)",
        "batch.sequence": "is of token files; of a dataset samples are counted (leave it out)",
        "model.vocabulary": "is of token files (leave it out with data.dataset)",
    }
    for key, sentence in why.items():
        given = deck.sources.places.get(key)
        if given is not None and not given.note:
            yield DeckProblem(key, sentence, _WITH)
