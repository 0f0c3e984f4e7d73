"""Where a deck's layout puts the ranks that were started: their places on the mesh, and who crosses nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.doctor import Finding, Report
from hpctrain.comm.mesh import coordinates
from hpctrain.deck.read import read_deck
from hpctrain.engine.sizes import axis_sizes
from hpctrain.errors import HpctrainError


def map_deck(report: Report, path: Path, overrides: Sequence[str]) -> None:
    """Add to a report each rank's place on the deck's mesh, or what of the deck does not fit. Collective."""
    ranks = len(report.ranks)
    findings = []
    sizes = None
    try:
        deck = read_deck(path, overrides, ranks)
        sizes = axis_sizes(deck, ranks)
    except HpctrainError as error:
        findings = [
            Finding("deck", problem, "mend the deck, or start another number of ranks", fatal=True)
            for problem in error.problems
        ]
    if sizes is not None:
        report.coordinates = [coordinates(sizes, rank) for rank in range(ranks)]
        axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
        findings.append(_finding(report, f"{path}: {axes}", sizes["tensor"]))
    report.add(findings)


def _finding(report: Report, statement: str, tensor: int) -> Finding:
    hosts = [rank.hostname for rank in report.ranks]
    groups = [set(hosts[first : first + tensor]) for first in range(0, len(hosts), tensor)]
    if all(len(group) == 1 for group in groups):
        return Finding("deck", statement)
    remedy = (
        "tensor ranks of one group sit on several nodes and talk over the network in every layer: let "
        "layout.tensor divide the ranks of a node"
    )
    return Finding("deck", statement, remedy)
