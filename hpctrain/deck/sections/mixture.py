"""Token files of a deck and the weighted entries of [[data.mixture]], and their checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from glob import glob
from math import isfinite
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hpctrain.deck.key import expand_user_path
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.text import control_problem, nearest

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

PLACEHOLDER = "none"
"""Placeholder value of data.tokens in a deck with a mixture; it is not read."""


LEAST_SHARE = Fraction(1, 100_000)
"""Smallest share of an entry: at least one of 100,000 samples."""


_MIXTURE = "data.mixture"


_NAMES = ("tokens", "weight", "name")


_LONGEST_NAME = 100


_MOST_ENTRIES = 512


@dataclass(frozen=True)
class DatasetEntry:
    """One entry of a data mixture: its name, its token files, and its share of all samples.

    Attributes:
        name: Name of the entry.
        tokens: Names and patterns of its files.
        share: Its share of all samples.
    """

    name: str
    tokens: tuple[str, ...]
    share: Fraction


def patterns_in_value(tokens: object) -> tuple[str, ...]:
    """Return the names and patterns of token files in a value of `data.tokens`, in order, with "~" expanded.

    Args:
        tokens: A valid value: text, or a list of texts.
    """
    names: Iterable[str] = (tokens,) if isinstance(tokens, str) else tokens  # type: ignore[assignment]
    return tuple(map(expand_user_path, names))


def dataset_entries(deck: Deck) -> tuple[DatasetEntry, ...]:
    """Return the entries of a valid deck's mixture in order, whose shares add up to 1. No file is read.

    A deck without a mixture has one entry with the files of data.tokens, named after the first file without
    its suffix. Do not call this for a deck with a dataset: the result would be an entry with the placeholder
    of data.tokens, which is no file.
    """
    if deck.data.mixture is None:
        names = patterns_in_value(deck.data.tokens)
        return (DatasetEntry(PurePath(names[0]).stem, names, Fraction(1)),)
    shares = _shares(deck.data.mixture)
    return tuple(
        DatasetEntry(_name(entry), patterns_in_value(entry["tokens"]), share)
        for entry, share in zip(deck.data.mixture, shares, strict=True)
    )


def token_file_patterns(deck: Deck) -> tuple[str, ...]:
    """Return the names and patterns of all token files that a deck trains on; empty if it has a dataset.

    They are in the order of the deck, with duplicates. Files of [[evaluation]] are not among them.
    """
    if deck.data.dataset is not None:
        return ()
    return tuple(name for entry in dataset_entries(deck) for name in entry.tokens)


def token_files(deck: Deck) -> list[str]:
    """Return the paths of all token files of a deck, with patterns expanded. Local.

    A name or pattern for which there is no file is returned as it is. The files of a pattern have no order.
    """
    return [file for name in token_file_patterns(deck) for file in glob(name) or [name]]  # noqa: PTH207


def tokens_exist(deck: Deck) -> bool:
    """Return True if each name and pattern of token files of a deck has a file. Local.

    It is also True for a deck with a dataset, which has no token files.
    """
    return all(os.path.lexists(name) or glob(name) for name in token_file_patterns(deck))  # noqa: PTH207


def tokens_key(deck: Deck) -> str:
    """Return the key of the deck that names its token files, "data.tokens" or "data.mixture"."""
    return "data.tokens" if deck.data.mixture is None else "data.mixture"


def tokens_title(deck: Deck, entry: DatasetEntry) -> str:
    """Return the words with which messages name the token files of an entry.

    They are "data.tokens", or such as 'data.mixture, entry "web": tokens'.
    """
    if deck.data.mixture is None:
        return "data.tokens"
    return f"data.mixture, entry {toml_value(entry.name)}: tokens"


def fill_mixture(tables: Mapping[str, dict[str, Any]]) -> None:
    """Set data.tokens to PLACEHOLDER, if it is missing, in place.

    Args:
        tables: Sections of a deck with `data.mixture`.
    """
    tables["data"].setdefault("tokens", PLACEHOLDER)


def token_file_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of data.tokens, or of the entries of data.mixture. Files are not read.

    A deck with a dataset and without a mixture has none.
    """
    entries = deck.data.mixture
    if entries is None:
        if deck.data.dataset is None and (wrong := _wrong_tokens(deck.data.tokens)):
            yield DeckProblem("data.tokens", wrong)
        return
    for key in ("data.tokens", "data.dataset"):
        if key in deck.sources.places:
            yield DeckProblem(key, "conflicts with data.mixture (leave one of them out)", (_MIXTURE,))
    if not 1 <= len(entries) <= _MOST_ENTRIES:
        yield DeckProblem(_MIXTURE, f"must have 1 to {_MOST_ENTRIES} entries, not {len(entries)}")
        return
    faults = [f"entry {number}: {each}" for number, entry in enumerate(entries, 1) for each in _wrong(entry)]
    yield from (DeckProblem(_MIXTURE, each) for each in faults)
    if faults:
        return
    for name, times in Counter(map(_name, entries)).items():
        if times > 1:
            several = f"has {times} entries called {toml_value(name)}"
            yield DeckProblem(_MIXTURE, f"{several} (use a different name for each)")
    total = sum(Fraction(str(entry["weight"])) for entry in entries)
    if not total:
        yield DeckProblem(_MIXTURE, "must have an entry with a weight above 0")
        return
    for number, (entry, share) in enumerate(zip(entries, _shares(entries), strict=True), 1):
        if not share:
            yield DeckProblem(
                _MIXTURE, f"entry {number}: weight = 0: must be above 0 (or leave the entry out)"
            )
        elif share < LEAST_SHARE:
            least = f"must be at least {float(LEAST_SHARE):g} of the sum of all weights"
            sentence = f"entry {number}: weight = {entry['weight']}: {least}, not {float(share):.2g}"
            yield DeckProblem(_MIXTURE, sentence)


def _wrong(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of one entry."""
    for name in entry:
        if name not in _NAMES:
            near = nearest(name, _NAMES)
            meant = f"did you mean {near}?" if near else "an entry has the keys tokens, weight and name"
            yield f"{clipped(toml_value(name))}: unknown key ({meant})"
    for name, wanted in (("tokens", "token files, as data.tokens"), ("weight", "a number above 0")):
        if name not in entry:
            yield f"{name} is missing: {wanted}"
    if "tokens" in entry and (wrong := _wrong_tokens(entry["tokens"])):
        yield f"tokens = {clipped(toml_value(entry['tokens']))}: {wrong}"
    weight = entry.get("weight", 1)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not isfinite(weight) or weight < 0:
        yield f"weight = {clipped(toml_value(weight))}: must be a number above 0"
    name = entry.get("name", "x")
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME:
        yield f"name = {clipped(toml_value(name))}: must be text of 1 to {_LONGEST_NAME} characters"
    elif problem := control_problem(name):
        yield f"name: {problem}"


def _wrong_tokens(tokens: object) -> str:
    """Return the problem of names of token files; "" if there is none."""
    names = [tokens] if isinstance(tokens, str) else tokens
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return "must be text in quotes, or a list of texts"
    if not names or not all(names):
        return "must name files; names must not be empty"
    return control_problem("".join(names))


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or PurePath(patterns_in_value(entry["tokens"])[0]).stem)


def _shares(entries: tuple[dict[str, Any], ...]) -> list[Fraction]:
    """Return the share of each entry. Weights are exact decimals: 0.1 is a tenth."""
    weights = [Fraction(str(entry["weight"])) for entry in entries]
    return [weight / sum(weights) for weight in weights]
