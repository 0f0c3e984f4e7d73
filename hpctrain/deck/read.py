"""Reading of decks: from TOML text and `--set` arguments to a validated Deck.

All problems of a deck are reported in one error. Each names the file and line, or the `--set` argument, that
it comes from. All functions are local calls. A stored deck is one that a run left in its folder or in a
checkpoint; it may call only code that the user trusts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hpctrain.deck.code import CodeEntry, CodeTrust, Overrides, code_entries
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.reading.deck_input import DeckInput
from hpctrain.deck.reading.defaults import is_default
from hpctrain.deck.reading.nested import Tables, leaf_names, look_up
from hpctrain.deck.reading.old_keys import rename_keys
from hpctrain.deck.reading.validate import DeckValidator, SourceReader
from hpctrain.deck.rows import place_and_message
from hpctrain.deck.run_length import CompletedWork
from hpctrain.deck.schema import Deck, sections
from hpctrain.deck.sources import Place
from hpctrain.deck.toml import is_utf8
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launched_rank

FileCheck = Callable[[Deck, int | None], Iterable[DeckProblem]]
"""Function that takes a valid deck and the number of ranks, or None, and returns problems of files it names.

An HpctrainError that it raises is reported with the problems of the deck.
"""


def read_deck(
    path: str | Path,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    read_source: SourceReader | None = None,
    check_files: FileCheck | None = None,
    for_search: bool = False,
) -> Deck:
    """Read and validate the deck in a file, and return it with all defaults. Local.

    Each rank that calls this reads the files itself; MPI need not be initialized. Old names of keys are
    logged as warnings on rank 0, once per process. The deck counts as the user's own, so that all code that
    it names may be called, whatever the type of `overrides` is.

    Args:
        path: Path of the file, which may include others.
        overrides: `--set` arguments, such as "batch.micro_size=4", which take precedence over the files.
        ranks: Number of ranks that the deck is checked against; None if it is not known. A deck with
            layout.auto is not checked against it, since its layout is chosen later.
        read_source: Reader of the model that `model.from` names; None to take that key as it is.
        check_files: Check of the files that a valid deck names, which is called only if there are no
            problems.
        for_search: True to ignore problems that depend on a key that a search chooses and the deck does not
            give. Such keys have their defaults in the result, which may not fit: run it only after the
            search.

    Raises:
        HpctrainError: The deck has problems; all are reported.
        InputOutputError: The only problems are files that cannot be read.
    """
    deck_input = DeckInput(str(path))
    if not is_utf8(str(path)):
        raise HpctrainError(f"{path}: the name of a deck must be UTF-8 text")
    deck_input.read_file(Path(path), str(path))
    return _validated(deck_input, overrides, ranks, read_source, check_files, for_search)


def parse_deck(
    text: str,
    overrides: Sequence[str] = (),
    name: str = "deck.toml",
    ranks: int | None = None,
    read_source: SourceReader | None = None,
    includes: bool = True,
    completed: tuple[int, int] = (0, 0),
) -> Deck:
    """Parse and validate the text of a deck, and return the deck with all defaults. Local.

    Old names of keys are logged as warnings on rank 0, once per process; those in the text are not if
    `includes` is False.

    Args:
        text: Text of the deck.
        overrides: `--set` arguments. `Overrides` also tell which code a stored deck may call; with any other
            sequence, the deck may call all code that it names.
        name: Name of the deck in messages, to whose folder included files are relative.
        ranks: Number of ranks that the deck is checked against; None if it is not known. A deck with
            layout.auto is not checked against it.
        read_source: Reader of the model that `model.from` names; None to take that key as it is.
        includes: False for the deck of an earlier run: an `include` in the text is a problem then. Checks
            that concern only new decks are left out.
        completed: Steps and sequences that the run has done, in this order, for a length in tokens or epochs.
            They are part of that length, and the steps are part of run.steps of the result.

    Raises:
        HpctrainError: The deck has problems; all are reported.
        InputOutputError: The only problems are files that cannot be read.
    """
    deck_input = DeckInput(name, includes)
    deck_input.read_text(text, Path(name), name)
    if not includes:
        _rename_stored_keys(deck_input)
    if isinstance(overrides, Overrides):
        deck_input.trusted_code = _trusted_code(deck_input, overrides, overrides.trust)
    return _validated(deck_input, overrides, ranks, read_source, completed=completed)


def parse_stored_deck(
    text: str,
    overrides: Overrides,
    name: str,
    read_source: SourceReader,
    completed: tuple[int, int],
    defaults_written: bool,
) -> Deck:
    """Parse and validate the deck of a checkpoint, without checks that depend on the number of ranks. Local.

    Old keys in the text get their new names without a warning; those in `overrides` are logged as warnings on
    rank 0. Code that the deck may not call is no problem here: it is in `untrusted_code` of the result.

    Args:
        text: Text of the deck.
        overrides: `--set` arguments, and which code the deck may call.
        name: Name of the deck in messages, to whose folder paths of code are relative.
        read_source: Reader of the model that `model.from` names.
        completed: Steps and sequences that the run has done, as for `parse_deck`.
        defaults_written: True if the text does not tell defaults from other keys. Keys with values that they
            would get from other keys then count as defaults.

    Raises:
        HpctrainError: The deck has problems; all are reported.
        InputOutputError: The only problem is that `read_source` cannot read a file.
    """
    deck_input = DeckInput(name, includes=False)
    deck_input.read_text(text, Path(name), name)
    _rename_stored_keys(deck_input)
    if defaults_written:
        _remove_defaults(deck_input)
    deck_input.trusted_code = _trusted_code(deck_input, overrides, overrides.trust)
    return _validated(deck_input, overrides, None, read_source, completed=completed)


def read_stored_deck(path: Path, trust: CodeTrust, read_source: SourceReader | None = None) -> Deck:
    """Read and validate the `deck.toml` that a run left in its folder. Local.

    It is not checked against a number of ranks. Old keys get their new names without a warning. Code that the
    deck may not call is no problem here: it is in `untrusted_code` of the result. If run.tokens gives the
    length, run.steps is that of a run from the beginning, without completed work.

    Args:
        path: Path of the file.
        trust: Which code that the deck names may be called.
        read_source: Reader of the model that `model.from` names; None to take that key as it is. A run writes
            the sizes of that model into its deck, so that they are not missing.

    Raises:
        HpctrainError: The deck has problems; all are reported.
        InputOutputError: The only problem is a file that cannot be read.
    """
    deck_input = DeckInput(str(path), includes=False)
    deck_input.read_file(path, str(path))
    _rename_stored_keys(deck_input)
    deck_input.trusted_code = _trusted_code(deck_input, (), trust)
    return _validated(deck_input, (), None, read_source)


def read_code_entries(path: Path) -> frozenset[CodeEntry]:
    """Return the code that the user's deck in a file, and files that it includes, name. Local.

    The paths of files in the result are absolute; those of code in included files are relative to the folder
    of the deck. Nothing else of the deck is checked, and the code is not imported.

    Raises:
        HpctrainError: The file, or one that it includes, cannot be parsed.
        InputOutputError: The only problems are files that cannot be read.
    """
    deck_input = DeckInput(str(path))
    deck_input.read_file(path, str(path))
    deck_input.raise_problems()
    return code_entries(deck_input.values, str(path))


def changed_deck(
    deck: Deck,
    changes: Sequence[str],
    ranks: int | None,
    name: str = "deck.toml",
    read_source: SourceReader | None = None,
    from_user: bool = False,
) -> Deck:
    """Return a deck with other values of keys, which is validated anew. `deck` itself is not changed. Local.

    Defaults that follow from changed keys change with them. Code that the deck may not call stays so; it is
    no problem here, but in `untrusted_code` of the result, as is code that only `changes` name if `from_user`
    is False. The result has no runtime choices: if those of `deck` fit it, pass them to its
    `with_runtime_choices`.

    Args:
        deck: The deck to change.
        changes: Values of keys in the form of `--set`, such as "batch.micro_size=4". Of several values of one
            key, the last one counts. Old names are allowed, and logged as warnings on rank 0.
        ranks: Number of ranks that the deck is checked against; None if it is not known.
        name: Name of the deck in messages, to whose folder paths of code in `changes` are relative. Pass
            `deck.sources.name` if the changes may name code.
        read_source: Reader of the model that `model.from` names; None to take that key as it is.
        from_user: True if the user gave the changes, so that a stored deck may call code which they name. A
            deck that the user passed may call it in any case.

    Raises:
        HpctrainError: The changed deck has problems; all are reported.
    """
    deck_input = DeckInput(name, includes=deck.sources.trusted_code is None)  # a stored deck has no includes
    deck_input.read_text(deck_text(deck), Path(name), name)
    deck_input.places = {key: _first_place(deck, key, place) for key, place in deck_input.places.items()}
    deck_input.trusted_code = deck.sources.trusted_code
    if deck_input.trusted_code is not None and from_user:
        deck_input.trusted_code |= _trusted_code(deck_input, changes, CodeTrust())
    return _validated(deck_input, changes, ranks, read_source)


def _first_place(deck: Deck, key: str, place: Place) -> Place:
    """Return the place of a key in the text of `deck` with the file and line from which `deck` has it."""
    first = deck.sources.place(key)
    if first.override is None:
        return replace(place, file=first.file, line=first.line)
    return replace(place, file=first.prefix, line=None)


def _trusted_code(deck_input: DeckInput, overrides: Sequence[str], trust: CodeTrust) -> frozenset[CodeEntry]:
    """Return the code of a stored deck that may be called."""
    from_user = DeckInput(deck_input.name)
    for argument in overrides:
        from_user.apply_override(argument)
    stored = code_entries(deck_input.values, deck_input.name) if trust.everything else frozenset()
    return code_entries(from_user.values, deck_input.name) | trust.entries | stored


def _rename_stored_keys(deck_input: DeckInput) -> None:
    """Give old keys of a stored deck their new names, and remove those that have no effect."""
    rename_keys(deck_input.values, deck_input.places, lambda _: False)
    deck_input.renamed.clear()


def _remove_defaults(deck_input: DeckInput) -> None:
    """Remove keys that have the values that they would get from other keys."""
    values: Tables = {
        section: dict(table) if isinstance(table := deck_input.values.get(section), dict) else {}
        for section in sections()
    }
    for key in [key for key in leaf_names(values) if is_default(values, key)]:
        deck_input.remove(key)


def _validated(
    deck_input: DeckInput,
    overrides: Sequence[str],
    ranks: int | None,
    read_source: SourceReader | None,
    check_files: FileCheck | None = None,
    for_search: bool = False,
    completed: tuple[int, int] = (0, 0),
) -> Deck:
    """Return the deck of the keys in `deck_input`, or raise all problems as one error."""
    readable = not deck_input.problems
    sequence = look_up(deck_input.values, "batch.sequence")
    work = CompletedWork(*completed, sequence if isinstance(sequence, int) else 0)
    for argument in overrides:
        deck_input.apply_override(argument)
    deck = DeckValidator(deck_input, readable, read_source, for_search, work).validate(ranks)
    if deck is not None and check_files is not None and not deck_input.problems:
        try:
            for problem in check_files(deck, ranks):
                deck_input.add_problem(*place_and_message(deck, problem))
        except HpctrainError as error:
            deck_input.report_error(Place(deck_input.name), error)
    deck_input.raise_problems()
    assert deck is not None
    if launched_rank(os.environ) == 0:
        for renamed in deck_input.renamed:
            _warn_once(renamed.warning)
    return deck


@cache
def _warn_once(sentence: str) -> None:
    """Log a warning about an old key, once per process: a command may read a deck several times."""
    logging.getLogger("hpctrain").warning("%s", sentence)
