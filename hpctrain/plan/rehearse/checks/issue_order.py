"""Check that ranks start the calls of all communicators that they share in one order, as NCCL demands.

A call of NCCL is a kernel that occupies the GPU until the other ranks run theirs. If two ranks start calls of
two communicators in different orders, each GPU may run a kernel that waits for the other GPU, without room
for the kernel that this one waits for. NCCL's guide, under "Using multiple NCCL communicators concurrently",
therefore asks for one order on all ranks.

Of messages, only sends are compared. The ranks of a ring send at the same place among their calls. Pipeline
stages do not, but two stages share no other communicator. Each direction between two neighbors has a channel
of its own, whose kernels take at most CHANNEL_BLOCKS = 8 blocks (`comm/transports/nccl.py`). A rank has at
most 4 channels along the pipeline axis and 4 along the context axis, which take 64 multiprocessors of 132 of
an H100 or 108 of an A100. Calls of all ranks, agreements and audits use MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from hpctrain.plan.rehearse.checks.rank_classes import RankClasses
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.programme import (
    AUDIT,
    NEW_GROUP,
    SEND,
    Numbers,
    Programme,
    RehearsedCall,
    StepProgrammes,
)

ON_MPI = frozenset({"world", "agreements"})
"""Names of groups whose calls use MPI even if the ranks compute on GPUs."""


def find_order_faults(job: StepProgrammes, classes: RankClasses) -> Iterator[RehearsalFault]:
    """Yield a fault for each two communicators whose calls some ranks start in different orders. Local.

    Args:
        job: Programmes whose messages and calls match (`match_programmes`).
        classes: Classes of its ranks.
    """
    names = sorted({event.group for events in job.programmes for event in events if _is_ordered(event)})
    numbers = {name: number for number, name in enumerate(names)}
    programme_of = job.programme_of[np.array(classes.firsts)]
    sequences = {each: _sequence(job.programmes[each], numbers) for each in set(programme_of.tolist())}
    for pair in combinations(names, 2):
        orders: dict[bytes, int] = {}
        order_of = np.full(len(job.programmes), -1, dtype=np.int64)
        for programme, sequence in sequences.items():
            both = sequence[np.isin(sequence, [numbers[name] for name in pair])]
            if len(np.unique(both)) == 2:
                order_of[programme] = orders.setdefault(both.tobytes(), len(orders))
        if len(orders) > 1:
            yield from _faults(job, classes, pair, order_of[programme_of][classes.of_rank])


def _faults(
    job: StepProgrammes, classes: RankClasses, pair: tuple[str, str], order_of: Numbers
) -> Iterator[RehearsalFault]:
    """Yield the first fault among the ranks that share both communicators; `order_of` is by rank."""
    first, second = (job.groups[name] for name in pair)
    first_ranks: dict[tuple[int, int], int] = {}
    for rank in np.flatnonzero(order_of >= 0).tolist():
        other = first_ranks.setdefault((int(first.row_of[rank]), int(second.row_of[rank])), rank)
        if order_of[other] != order_of[rank]:
            count = int(classes.counts[classes.of_rank[rank]])
            yield RehearsalFault(
                "swapped order",
                rank,
                count,
                f"{job.place(rank)} starts calls of {pair[0]} and of {pair[1]} in another order than "
                f"{job.place(other)}; NCCL requires that ranks start the calls of all communicators that "
                "they share in one order",
            )
            return


def _is_ordered(event: RehearsedCall) -> bool:
    is_call = event.is_collective or event.operation == SEND
    uses_mpi = event.group in ON_MPI or event.group.startswith(AUDIT)
    return is_call and event.operation != NEW_GROUP and not uses_mpi


def _sequence(events: Programme, numbers: dict[str, int]) -> Numbers:
    """Return the number of the group of each call that has to be in order."""
    return np.array([numbers[event.group] for event in events if _is_ordered(event)], dtype=np.int64)
