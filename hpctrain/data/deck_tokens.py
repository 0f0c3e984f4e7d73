"""Opening of the token files that a deck names: those of one corpus, or of each entry of its mixture."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.error_messages import raise_together
from hpctrain.data.token_files import Tokens, open_tokens, paths_of, require_one_tokenizer
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import DatasetEntry, dataset_entries, tokens_key, tokens_title
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.files import file_identity


def open_entries(deck: Deck) -> tuple[Tokens, ...]:
    """Open the tokens of each entry.

    Raises:
        HpctrainError: With all problems of all files, each after the line of the deck that names the file.
            Files with too few tokens are not a problem here.
    """
    tokens: list[Tokens] = []
    problems: list[HpctrainError] = []
    for entry in dataset_entries(deck):
        try:
            tokens.append(open_tokens(entry.tokens, tokens_title(deck, entry)))
        except HpctrainError as error:
            line = _line_of_tokens(deck)
            problems.append(type(error)([f"{line}{problem}" for problem in error.problems]))
    raise_together(problems)
    require_one_tokenizer(tokens)
    require_distinct_files(deck, tokens)
    return tuple(tokens)


def _line_of_tokens(deck: Deck) -> str:
    """Return `deck.toml:13: `, where the deck names its token files, or "" if no line of a file does."""
    place = deck.sources.place(tokens_key(deck))
    return "" if place.line is None else f"{place.prefix}: "


def require_distinct_files(deck: Deck, tokens: Sequence[Tokens]) -> None:
    """Check that no file belongs to two entries, since each epoch would contain its samples twice.

    Raises:
        HpctrainError: With each file that does.
    """
    entries = dataset_entries(deck)
    first: dict[object, DatasetEntry] = {}
    problems = []
    for entry, each in zip(entries, tokens, strict=True):
        for path in map(str, paths_of(each)):
            before = first.setdefault(file_identity(path), entry)
            if before is not entry:
                both = f"entries {toml_value(before.name)} and {toml_value(entry.name)} both contain it"
                would = "use one entry with the sum of their weights"
                problems.append(f"data.mixture: {path}: {both} ({would})")
    if problems:
        raise HpctrainError(problems)


def vocabulary_of(deck: Deck) -> int:
    """Return the vocabulary of a deck, or else that of its token files, with the errors of `open_entries`."""
    return deck.model.vocabulary or open_entries(deck)[0].vocabulary
