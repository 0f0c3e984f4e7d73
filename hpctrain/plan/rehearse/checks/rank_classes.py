"""Classes of ranks that behave alike, so that the simulation of one rank of a class is valid for all of it.

The ranks of a class run the same programme, and their groups and messages connect them with ranks of the same
classes. At first, the ranks with the same programme form a class. A class is split as long as its ranks
communicate with different classes; this is color refinement of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.rehearse.programme import Numbers, RehearsedCall, StepProgrammes


@dataclass(frozen=True)
class RankClasses:
    """Division of the ranks of a job into classes that behave alike.

    Attributes:
        of_rank: Number of the class of each rank, [ranks].
        firsts: First rank of each class, by number of the class.
    """

    of_rank: Numbers
    firsts: tuple[int, ...]

    @property
    def counts(self) -> Numbers:
        """Number of ranks of each class, [classes]."""
        return np.bincount(self.of_rank, minlength=len(self.firsts))


def find_classes(job: StepProgrammes) -> RankClasses:
    """Return the smallest number of classes of the ranks of a job. Local.

    Args:
        job: Programmes of the ranks. A rank that uses a group to which it does not belong is an
            AssertionError.
    """
    of_rank = np.unique(job.programme_of, return_inverse=True)[1].reshape(-1)
    while True:
        keys = [of_rank]
        for group, offset in sorted(set().union(*job.used_groups)):
            membership = job.groups[group]
            using = np.array([(group, offset) in used for used in job.used_groups])[job.programme_of]
            absent = using & (membership.row_of < 0)
            assert not absent.any(), f"rank {int(absent.argmax())} is in no group {group}"
            key = np.full(job.ranks, -1, dtype=np.int64)
            here = np.flatnonzero(using)
            if offset:
                key[here] = of_rank[membership.peers(here, offset)]
            else:
                kinds = np.sort(of_rank[membership.rows], axis=1)
                of_row = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
                key[here] = of_row[membership.row_of[here]]
            keys.append(key)
        refined = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        if refined.max() == of_rank.max():
            break
        of_rank = refined
    firsts = np.unique(of_rank, return_index=True)[1]
    return RankClasses(of_rank, tuple(int(first) for first in firsts))


class ClassRelations:
    """Classes that the ranks of each class communicate with. Methods are local and keep their results.

    Args:
        job: Programmes and groups of the ranks.
        classes: Classes of its ranks.
    """

    def __init__(self, job: StepProgrammes, classes: RankClasses) -> None:
        self._job, self._classes = job, classes
        self._members: dict[tuple[int, str], list[int]] = {}
        self._peers: dict[tuple[int, str, int], int] = {}

    def members(self, number: int, group: str) -> list[int]:
        """Return the numbers of the classes in the groups of class `number`, in rising order."""
        key = number, group
        if key not in self._members:
            ranks = self._job.groups[group].group_of(self._classes.firsts[number])
            self._members[key] = np.unique(self._classes.of_rank[ranks]).tolist()
        return self._members[key]

    def peer_rank(self, number: int, message: RehearsedCall) -> int:
        """Return the rank that exchanges a message with the first rank of class `number`."""
        key = number, message.group, message.offset
        if key not in self._peers:
            first = np.array([self._classes.firsts[number]])
            self._peers[key] = int(self._job.groups[message.group].peers(first, message.offset)[0])
        return self._peers[key]

    def peer(self, number: int, message: RehearsedCall) -> int:
        """Return the number of the class that exchanges a message with class `number`."""
        return int(self._classes.of_rank[self.peer_rank(number, message)])
