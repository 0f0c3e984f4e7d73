"""What a run that was stopped has in the memory of its nodes, found, verified, and written as a checkpoint.

Any ranks do this, on whatever nodes are left, each with some of the parts that lie in its node's memory. Of
each part there are two copies, on two nodes; a damaged one counts as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.mirror_folder import parts_here
from hpctrain.checkpoint.mirror_slot import MirrorPart, read_part
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.text import counted, ranges


@dataclass(frozen=True)
class RecoverableMirror:
    """The newest mirror of which all is there: of which step, in which nodes' memory, what of it this rank
    will write, and the state of the run.
    """

    step: int
    hosts: tuple[str, ...]
    entries: tuple[TensorRange, ...]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """A copy of a part, known to all: which rank found it, as its how many-th."""

    finder: int
    number: int
    host: str
    generation: int
    step: int
    rank: int
    ranks: int


def find_mirror(world: World, token: str) -> tuple[RecoverableMirror | None, list[str]]:
    """The newest mirror that a start has left whole in the memory of these ranks' nodes, and sentences of
    what newer ones lack, or why a copy is not used. Collective; the same on all ranks, but for entries.
    """
    parts, problems = _own_share(world, token)
    found = [
        _Copy(world.rank, number, world.hostname, part.generation, part.step, part.rank, part.ranks)
        for number, part in enumerate(parts)
    ]
    everyone = world.everyone.all_gather_object(([vars(each) for each in found], problems))
    copies = [_Copy(**each) for rows, _ in everyone for each in rows]
    sentences = [sentence for _, told in everyone for sentence in told]
    entries: dict[int, list[TensorRange]] = {}
    while copies:
        newest = max(copy.generation for copy in copies)
        chosen = {copy.rank: copy for copy in reversed(copies) if copy.generation == newest}
        any_of_it = next(iter(chosen.values()))
        missing = sorted(set(range(any_of_it.ranks)) - set(chosen))
        if missing:
            sentences.append(_lacking(any_of_it, missing))
            copies = [copy for copy in copies if copy.generation != newest]
            continue
        damaged: list[tuple[int, str]] = []
        mine = [copy.number for copy in chosen.values() if copy.finder == world.rank]
        for number in mine:
            try:
                entries.setdefault(number, parts[number].entries())
            except InputOutputError as error:
                damaged.append((number, error.problems[0]))
        bad = [
            (rank, number, told)
            for rank, rows in enumerate(world.everyone.all_gather_object(damaged))
            for number, told in rows
        ]
        if not bad:
            states = [parts[number].state for number in mine]
            state = next((each for each in states if each is not None), None)
            told = world.everyone.all_gather_object(state)
            held = tuple(entry for number in mine for entry in entries[number])
            hosts = tuple(sorted({copy.host for copy in chosen.values()}))
            whole = next(each for each in told if each is not None)
            return RecoverableMirror(any_of_it.step, hosts, held, whole), sentences
        sentences += [told for _, _, told in bad]
        lost = {(rank, number) for rank, number, _ in bad}
        copies = [copy for copy in copies if (copy.finder, copy.number) not in lost]
    return None, sentences


def write_mirror(found: RecoverableMirror, path: Path, world: World) -> None:
    """Write it as a checkpoint as any other; collective. Errors as in `save`."""
    save(path, world.everyone, found.entries, found.state)


def _own_share(world: World, token: str) -> tuple[list[MirrorPart], list[str]]:
    """The parts of this start in this node's memory that this one of its ranks looks at, and what is wrong
    with others. Alone.
    """
    parts: list[MirrorPart] = []
    problems: list[str] = []
    for path in parts_here(token)[world.local_rank :: world.local_size]:
        try:
            part = read_part(path)
        except InputOutputError as error:
            problems += error.problems
            continue
        if part is not None and part.run == token:
            parts.append(part)
    return parts, problems


def _lacking(copy: _Copy, missing: Sequence[int]) -> str:
    of_all = f"of {counted(copy.ranks, 'rank')}"
    which = f"rank{'s' * (len(missing) > 1)} {ranges(missing, ' to ')} {of_all}"
    return f"the mirror of step {copy.step} is incomplete: no remaining node has the state of {which}"
