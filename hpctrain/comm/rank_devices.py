"""Devices of the ranks of a job, which must be of one type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.host.device import describe_setting
from hpctrain.text import ranges


class RankDevice(NamedTuple):
    """Device that a rank has found for a run.

    Attributes:
        hostname: Name of its node.
        kind: torch's type of the device, such as "cuda"; any if there is a problem.
        problem: Why the rank cannot compute on the device that the deck names; "" if it can.
    """

    hostname: str
    kind: str
    problem: str


def device_problems(name: str, devices: Sequence[RankDevice], setting: str = "run.device") -> list[str]:
    """Return why the ranks of a job cannot compute together; an empty list if they can. Local.

    Args:
        name: Name of the device that the user gave.
        devices: Device of each rank, the same on all ranks.
        setting: Key of the deck, or option, by which the user gave it.
    """
    problems = list(dict.fromkeys(each.problem for each in devices if each.problem))
    if len(problems) == 1 and all(each.problem for each in devices):
        return problems
    if problems:
        return [
            f"{_places([each.problem == some for each in devices], devices)}: {some}" for some in problems
        ]
    kinds = list(dict.fromkeys(each.kind for each in devices))
    if len(kinds) == 1:
        return []
    parts = [f'"{kind}" on {_places([each.kind == kind for each in devices], devices)}' for kind in kinds]
    return [
        f"{describe_setting(setting, name)}: the ranks find different types of devices: {', '.join(parts)}; "
        'start all of them where torch finds a GPU, or use "cpu"'
    ]


def _places(chosen: Sequence[bool], devices: Sequence[RankDevice]) -> str:
    """Return the chosen ranks and their nodes, such as "ranks 0-3 (node1, node2)"."""
    ranks = [rank for rank, is_chosen in enumerate(chosen) if is_chosen]
    nodes = ", ".join(dict.fromkeys(devices[rank].hostname for rank in ranks))
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks, ',')} ({nodes})"
