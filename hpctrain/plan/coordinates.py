"""Where a deck's layout puts the ranks that were started: at which coordinates, and who crosses nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.doctor import Finding, Report
from hpctrain.comm.mesh import coordinates, sizes_text
from hpctrain.deck.read import read_deck
from hpctrain.engine.sizes import axis_sizes, crosses
from hpctrain.errors import HpctrainError


def map_deck(report: Report, path: Path, overrides: Sequence[str]) -> None:
    """Add to a report the ranks' coordinates on the deck's mesh, or what of it does not fit. Collective."""
    ranks = len(report.ranks)
    try:
        sizes = axis_sizes(read_deck(path, overrides, ranks), ranks)
    except HpctrainError as error:
        remedy = "mend the deck, or start another number of ranks"
        report.add([Finding("deck", problem, remedy, fatal=True) for problem in error.problems])
        return
    report.coordinates = [coordinates(sizes, rank) for rank in range(ranks)]
    axes = sizes_text(sizes, 2) or "one rank"
    remedy = (
        "tensor ranks of one group sit on several nodes and talk over the network in every layer: let "
        "layout.tensor divide the ranks of a node"
    )
    crossing = crosses([rank.hostname for rank in report.ranks], sizes["tensor"])
    report.add([Finding("deck", f"{path}: {axes}", remedy if crossing else "")])
