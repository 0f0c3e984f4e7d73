"""Coordinates of ranks on the mesh of a deck, and axes that communicate between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.comm.mesh import AXES, coordinates, sizes_text
from hpctrain.deck.read import read_deck
from hpctrain.engine.mesh_sizes import axis_sizes, spans_nodes
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_of_run
from hpctrain.host.doctor import DoctorFinding, DoctorReport
from hpctrain.host.launcher import core_warning
from hpctrain.host.topology import Topology, ranks_per_node_of
from hpctrain.text import counted


def map_deck(report: DoctorReport, path: Path, overrides: Sequence[str]) -> None:
    """Add the coordinates of all ranks on the deck's mesh to a report, or the errors of the deck. Collective.

    If a rank does not have the deck's device, this is a fatal finding, since a run would fail.
    """
    ranks = len(report.ranks)
    try:
        deck = read_deck(path, overrides, ranks)
        sizes = axis_sizes(deck, ranks)
    except HpctrainError as error:
        remedy = "correct the deck, or start another number of ranks"
        report.add([DoctorFinding("deck", problem, remedy, fatal=True) for problem in error.problems])
        return
    report.coordinates = [coordinates(sizes, rank) for rank in range(ranks)]
    axes = sizes_text(sizes, 2) or "one rank"
    remedy = (
        "tensor groups span several nodes and communicate over the network in every layer: "
        "use a layout.tensor that divides the ranks of a node"
    )
    topology = Topology([rank.node for rank in report.ranks])
    topology.emulate(deck.communication.ranks_per_node)
    crossing = spans_nodes(topology.nodes, sizes["tensor"])
    report.add([DoctorFinding("deck", f"{path}: {axes}", remedy if crossing else "")])
    report.add(_device_problems(deck.run.device, report.ranks[report.rank].local_rank))
    if len(set(topology.nodes)) > 1:
        report.add([DoctorFinding("topology", axis_links(topology, report.coordinates))])
    threads = deck.run.threads
    core_problem = core_warning(threads, [(rank.hostname, rank.cores) for rank in report.ranks])
    report.add([DoctorFinding("threads", f"run.threads = {threads} per rank", core_problem)])


def _device_problems(name: str, local_rank: int) -> list[DoctorFinding]:
    """Return why a run could not compute on its device here; an empty list if it can. Local."""
    try:
        device_of_run(name, local_rank)
    except HpctrainError as error:
        problem, _, remedy = str(error).partition("; ")
        return [DoctorFinding("deck", problem, remedy, fatal=True)]
    return []


def axis_links(topology: Topology, rank_coordinates: Sequence[Mapping[str, int]]) -> str:
    """Describe how the ranks along each axis of a mesh reach each other.

    Args:
        topology: Node of each rank.
        rank_coordinates: Coordinates of each rank.
    """
    emulation = "" if topology.emulated_ranks_per_node is None else ", emulated"
    texts = [f"{counted(len(set(topology.nodes)), 'node')}{emulation}"]
    for axis in rank_coordinates[0]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for node, position in zip(topology.nodes, rank_coordinates, strict=True):
            other_coordinates = tuple(
                number for name, number in position.items() if name != axis and name in AXES
            )
            groups.setdefault(other_coordinates, []).append(node)
        sizes = {(len(set(nodes)), ranks_per_node_of(nodes)) for nodes in groups.values()}
        (count, together), *more = sorted(sizes, reverse=True)
        if axis not in AXES or all(len(nodes) == 1 for nodes in groups.values()):
            continue
        if count == 1:
            texts.append(f"{axis} inside a node")
        elif together > 1 and not more:
            texts.append(f"{axis} over {count} nodes, with {together} neighbours on each")
        else:
            texts.append(f"{axis} over {count} nodes by messages")
    return "; ".join(texts)
