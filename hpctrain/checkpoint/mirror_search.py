"""Search for the newest complete mirror of a run that was stopped, and writing of it as a checkpoint.

The ranks may be on any of the remaining nodes. Each one reads some of the parts in the memory of its node.
Each part has two copies on two nodes. A damaged copy is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.mirror_folder import local_parts
from hpctrain.checkpoint.mirror_slot import MirrorPart, read_part
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.text import counted, ranges


@dataclass(frozen=True)
class RecoverableMirror:
    """Newest mirror of which all parts were found.

    Attributes:
        step: Its step.
        hosts: Nodes in whose memory the parts are.
        entries: Ranges that this rank has found and writes.
        state: Training state.
    """

    step: int
    hosts: tuple[str, ...]
    entries: tuple[TensorRange, ...]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """Copy of a part, which all ranks know.

    Attributes:
        finder: Rank that has found it.
        number: Its number among the parts of this rank.
        host: Name of the node.
        generation: Number of the mirror in its run.
        step: Step of the mirror.
        rank: Rank that has made the part.
        ranks: Number of ranks of the run.
    """

    finder: int
    number: int
    host: str
    generation: int
    step: int
    rank: int
    ranks: int


def find_mirror(world: World, token: str) -> tuple[RecoverableMirror | None, list[str]]:
    """Find the newest complete mirror in the memory of the nodes. Collective.

    Args:
        world: The ranks.
        token: Token of the start that made it.

    Returns:
        The mirror, or None; the same on all ranks except for `entries`. Messages about parts that newer
        mirrors lack, and about damaged copies.
    """
    parts, problems = _read_share(world, token)
    local = [
        _Copy(world.rank, number, world.hostname, part.generation, part.step, part.rank, part.ranks)
        for number, part in enumerate(parts)
    ]
    gathered = world.everyone.all_gather_object(([vars(each) for each in local], problems))
    copies = [_Copy(**each) for rows, _ in gathered for each in rows]
    sentences = [sentence for _, messages in gathered for sentence in messages]
    entries: dict[int, list[TensorRange]] = {}
    while copies:
        newest = max(copy.generation for copy in copies)
        chosen = {copy.rank: copy for copy in reversed(copies) if copy.generation == newest}
        any_copy = next(iter(chosen.values()))
        missing = sorted(set(range(any_copy.ranks)) - set(chosen))
        if missing:
            sentences.append(_describe_missing(any_copy, missing))
            copies = [copy for copy in copies if copy.generation != newest]
            continue
        damaged: list[tuple[int, str]] = []
        numbers = [copy.number for copy in chosen.values() if copy.finder == world.rank]
        for number in numbers:
            try:
                entries.setdefault(number, parts[number].entries())
            except InputOutputError as error:
                damaged.append((number, error.problems[0]))
        bad = [
            (rank, number, message)
            for rank, rows in enumerate(world.everyone.all_gather_object(damaged))
            for number, message in rows
        ]
        if not bad:
            states = [parts[number].state for number in numbers]
            local_state = next((each for each in states if each is not None), None)
            states_of_ranks = world.everyone.all_gather_object(local_state)
            state = next(each for each in states_of_ranks if each is not None)
            hosts = tuple(sorted({copy.host for copy in chosen.values()}))
            found = tuple(entry for number in numbers for entry in entries[number])
            return RecoverableMirror(any_copy.step, hosts, found, state), sentences
        sentences += [message for _, _, message in bad]
        unusable = {(rank, number) for rank, number, _ in bad}
        copies = [copy for copy in copies if (copy.finder, copy.number) not in unusable]
    return None, sentences


def write_mirror(mirror: RecoverableMirror, path: Path, world: World) -> None:
    """Write a mirror as a checkpoint. Collective; errors as in `save`."""
    save(path, world.everyone, mirror.entries, mirror.state)


def _read_share(world: World, token: str) -> tuple[list[MirrorPart], list[str]]:
    """Return the parts of this rank's share of those on its node, and messages about damaged ones. Local."""
    parts: list[MirrorPart] = []
    problems: list[str] = []
    for path in local_parts(token)[world.local_rank :: world.local_size]:
        try:
            part = read_part(path)
        except InputOutputError as error:
            problems += error.problems
            continue
        if part is not None and part.run == token:
            parts.append(part)
    return parts, problems


def _describe_missing(copy: _Copy, missing: Sequence[int]) -> str:
    """Return a message about the ranks whose parts are missing."""
    of_all = f"of {counted(copy.ranks, 'rank')}"
    which = f"rank{'s' * (len(missing) > 1)} {ranges(missing, ' to ')} {of_all}"
    return f"the mirror of step {copy.step} is incomplete: no remaining node has the state of {which}"
