"""From what `hpctrain plan --search` is asked for to its table, JSON, picture and deck."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import InputOutputError
from hpctrain.files import check_output, require_writable
from hpctrain.plan.option_conflicts import required_ranks
from hpctrain.plan.search.deck_search import DeckSearch, SearchOptions, search_deck, trade_offs
from hpctrain.plan.search.layout_sentences import changed
from hpctrain.plan.search.search_space import Values
from hpctrain.plan.search.search_text import search_text
from hpctrain.report.bar import progress_bar
from hpctrain.report.figures import require_picture_suffix, write_figure
from hpctrain.report.pareto import LayoutCandidate, draw_pareto


def searched(
    deck: Path,
    ranks: int | None,
    overrides: Sequence[str],
    wished: SearchOptions,
    write: Path | None,
    as_json: bool,
    *,
    force: bool,
    plot: Path | None,
) -> str:
    """The table of the best layouts, or their JSON; the deck of the quickest and a picture are written, too.

    HpctrainError, before anything is planned, where something is wrong with a file to be written.
    """
    ranks = required_ranks(ranks)
    if write is not None:
        require_writable(write)
        check_output(write, force)
    if plot is not None:
        require_picture_suffix(plot)
    with progress_bar(None, "layouts looked at") as looked:
        found = search_deck(deck, ranks, overrides, wished, looked)
        more = trade_offs(found, wished) if plot is not None else []
    if write is not None:
        _write(write, found.text)
    if plot is not None:
        shown = [
            LayoutCandidate(_label(found, each.changes), each.seconds, each.memory_bytes)
            for each in (*found.found.best, *more)
        ]
        write_figure(plot, lambda: draw_pareto(_title(found), shown))
    return json.dumps(found.row(), indent=1) if as_json else search_text(found)


def _label(found: DeckSearch, changes: Values) -> str:
    own = changed(found.deck, changes)
    return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in own.items()) or "as the deck is"


def _title(found: DeckSearch) -> str:
    return f"{found.deck.run.title} on {found.ranks} ranks, {found.machine.name}"


def _write(path: Path, text: str) -> None:
    """The whole file, or none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputOutputError(f"{path}: cannot be written: {error.strerror or error}") from error
