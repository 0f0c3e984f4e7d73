"""The section [data], the keys of a user's own dataset, and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hpctrain.deck.code import is_target, resolve_target
from hpctrain.deck.key import PathText, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import GIVEN, Conflicts, Relations, Requires

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class Data(Section):
    """Training data."""

    tokens: PathText | Annotated[tuple[PathText, ...], Field(strict=False)] = key(
        "Token file of `hpctrain prepare`, or several as one: a list, or a pattern such as *.h5.",
        min_length=1,
    )
    mixture: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] | None = key(
        "Instead of tokens, a weighted mixture: tables [[data.mixture]] with tokens, weight and, "
        "optionally, name.",
        None,
        derived="none: data.tokens alone",
    )
    dataset: PathText | None = key(
        "Instead of tokens, a dataset for your own module: function that makes it, named like model.module.",
        None,
        derived="none: a token file",
        min_length=3,
    )
    arguments: dict[str, Any] | None = key(
        "Table of keyword arguments for the function of data.dataset: [data.arguments].",
        None,
        derived="nothing",
    )
    collate: PathText | None = key(
        "Function that collates a list of items into a dict of arrays [b, ...]; named like model.module.",
        None,
        derived="none: items of equal shape are stacked",
        min_length=3,
    )
    workers: int = key(
        "Loader processes of each rank, which prefetch items; 0: the rank itself loads them.", 0, ge=0, le=256
    )
    inputs: tuple[str, ...] | None = key(
        "Batch entries passed to the module: by name, or in this order if its arguments have other names.",
        None,
        derived='all of its arguments by name, except "targets" and "labels"',
        strict=False,
    )
    other_tokenizer: bool = key(
        "Allow training data of another tokenizer than that of the initial weights or the checkpoint.", False
    )
    document_mask: bool = key(
        "Whether attention stays within a document, and the last token of a document has no target.", False
    )
    pack: bool = key(
        "Whether to pack several conversations into a sequence, masked from each other; false: one each.",
        True,
    )
    validation: float = key("Share of the sequences held out for evaluation.", 0.01, ge=0, lt=1)


PLACEHOLDERS: Mapping[str, Any] = {"data.tokens": "none", "batch.sequence": 1, "model.vocabulary": 2}
"""Placeholder values of keys about token files, which a deck with a dataset does not use.

A sample counts as a sequence of one token.
"""

RELATIONS: Relations = (
    *(
        Requires(f"data.{name}", "data.dataset", GIVEN)
        for name in ("arguments", "collate", "workers", "inputs")
    ),
    Requires("data.dataset", "model.module", GIVEN, because="built-in models read token files"),
    Conflicts("data.document_mask", "model.module", because="document masks support built-in models only"),
)


def fill_dataset(tables: Mapping[str, dict[str, Any]], deck_name: str) -> None:
    """Make the files of a dataset's functions absolute, and set placeholders for missing keys, in place.

    The placeholders are those of PLACEHOLDERS: data.tokens, batch.sequence and model.vocabulary. They stay in
    the deck, and `deck_text` leaves them out. The files need not exist.

    Args:
        tables: Sections of a deck, which must have `data.dataset`. [data], [batch] and [model] must be there.
        deck_name: Path of the deck, to whose folder the files are relative.
    """
    data = tables["data"]
    for name in ("dataset", "collate"):
        if isinstance(data.get(name), str):
            data[name] = resolve_target(data[name], deck_name)
    for full, value in PLACEHOLDERS.items():
        section, _, name = full.partition(".")
        tables[section].setdefault(name, value)


def dataset_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of a deck with `data.dataset`; none for other decks. Nothing is imported.

    These are functions that are not named as FILE.py:FUNCTION or PACKAGE:FUNCTION, and keys about token files
    that the deck gives in addition.
    """
    if deck.data.dataset is None:
        return
    for name in ("dataset", "collate"):
        if not is_target(getattr(deck.data, name)):
            yield DeckProblem(f"data.{name}", 'must be "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"')
    why = {
        "data.tokens": "conflicts with data.dataset (leave one of them out)",
        "data.other_tokenizer": "has no effect with data.dataset: it applies to token files (leave it out)",
        "batch.sequence": "has no effect with data.dataset, whose samples are counted instead of "
        "tokens (leave it out)",
        "model.vocabulary": "has no effect with data.dataset: it applies to token files (leave it out)",
    }
    for full, sentence in why.items():
        place = deck.sources.places.get(full)
        if place is not None and not place.note:
            yield DeckProblem(full, sentence, ("data.dataset",))
