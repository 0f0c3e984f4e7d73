"""Which ranks are alike: not only in what they do, but in whom they do it with.

Ranks of a class have one programme, and groups of the same classes: whatever one of them can do next, the
others can too, so that one stands for all. Classes are split until that holds (as colours are refined: each
round tells ranks apart by the classes around them), whatever ranks they began with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.rehearse.programme import Numbers, StepProgrammes


@dataclass(frozen=True)
class Classes:
    """The class of each rank [ranks], and of each class its first rank."""

    of_rank: Numbers
    firsts: tuple[int, ...]

    @property
    def counts(self) -> Numbers:
        """Ranks of each class."""
        return np.bincount(self.of_rank, minlength=len(self.firsts))


def find_classes(job: StepProgrammes) -> Classes:
    """The fewest classes of a job's ranks."""
    of_rank = np.unique(job.programme_of, return_inverse=True)[1].reshape(-1)
    while True:
        keys = [of_rank]
        for group, step in sorted(set().union(*job.used)):
            membership = job.groups[group]
            using = np.array([(group, step) in used for used in job.used])[job.programme_of]
            absent = using & (membership.row_of < 0)
            assert not absent.any(), f"rank {int(absent.argmax())} is in no group {group}"
            key = np.full(job.ranks, -1, dtype=np.int64)
            here = np.flatnonzero(using)
            if step:
                key[here] = of_rank[membership.peers(here, step)]
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
    return Classes(of_rank, tuple(int(first) for first in firsts))
