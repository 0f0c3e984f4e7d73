"""Output of `hpctrain plan --search`: table, JSON, picture and deck."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import failing_as
from hpctrain.files import check_output, require_writable, write_atomically
from hpctrain.plan.option_conflicts import required_ranks
from hpctrain.plan.search.deck_search import DeckSearch, SearchOptions, search_deck, trade_offs
from hpctrain.plan.search.layout_sentences import changed
from hpctrain.plan.search.search_space import Values
from hpctrain.plan.search.search_text import search_text
from hpctrain.report.bar import progress_bar
from hpctrain.report.figures import require_picture_suffix, write_figure
from hpctrain.report.pareto import LayoutCandidate, draw_pareto


@dataclass(frozen=True)
class SearchFiles:
    """Files and format of the output.

    Attributes:
        write: File for the deck with the fastest layout; None for none.
        force: True to replace that file.
        plot: File for a picture; None for none.
        as_json: True for JSON instead of a table.
    """

    write: Path | None
    force: bool
    plot: Path | None
    as_json: bool


def search_output(
    deck: Path, ranks: int | None, overrides: Sequence[str], options: SearchOptions, output: SearchFiles
) -> str:
    """Return the table or the JSON of a search, and write its deck and its picture.

    Args:
        deck: File of the deck.
        ranks: Number of ranks; None is an error.
        overrides: Arguments of `--set`.
        options: Options of the search.
        output: Files and format of the output.

    Raises:
        HpctrainError: A file cannot be written. Nothing has been searched.
    """
    ranks = required_ranks(ranks)
    if output.write is not None:
        require_writable(output.write)
        check_output(output.write, output.force)
    if output.plot is not None:
        require_picture_suffix(output.plot)
    with progress_bar(None, "layouts examined") as progress:
        result = search_deck(deck, ranks, overrides, options, progress)
        more = trade_offs(result, options) if output.plot is not None else []
    if output.write is not None:
        with failing_as(f"{output.write}: cannot be written"):
            write_atomically(output.write, result.text)
    if output.plot is not None:
        candidates = [
            LayoutCandidate(_label(result, each.changes), each.seconds, each.memory_bytes)
            for each in (*result.result.best, *more)
        ]
        write_figure(output.plot, lambda: draw_pareto(_title(result), candidates))
    return json.dumps(result.row(), indent=1) if output.as_json else search_text(result)


def _label(result: DeckSearch, changes: Values) -> str:
    own = changed(result.deck, changes)
    return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in own.items()) or "as the deck is"


def _title(result: DeckSearch) -> str:
    return f"{result.deck.run.title} on {result.ranks} ranks, {result.machine.name}"
