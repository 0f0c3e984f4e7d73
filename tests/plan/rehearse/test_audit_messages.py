"""Rehearsal of the check for silent faults: all its messages match, and a rank that leaves one out is found.

Tests of plan/rehearse/audit_messages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.plan.rehearse.checks.matching import match_programmes
from hpctrain.plan.rehearse.programme import AUDIT, RECEIVE, SEND, WAIT, Programme, RehearsedCall
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from tests.engines import small_deck
from tests.plan.rehearse.checks.test_stream_deadlock import LAYOUTS, SIZES


def without(events: Programme, is_left_out: Callable[[RehearsedCall], bool]) -> Programme:
    """Return a programme without the first event of a kind, and without the wait for it."""
    place = next(index for index, event in enumerate(events) if is_left_out(event))
    return tuple(
        replace(event, call_index=event.call_index - (event.call_index > place))
        for index, event in enumerate(events)
        if index != place and event.call_index != place
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", ["cheap", "full"])
@pytest.mark.parametrize("name", ["zero-3", "hybrid", "1f1b", "zb-v", "ring", "experts"])
def test_audits_of_every_layout_come_to_their_end(name: str, depth: str) -> None:
    ranks, keys = LAYOUTS[name]
    deck = small_deck(*SIZES, *keys, f"stability.corruption={depth}")
    job = RankProgrammes(deck, ranks, 61, ranks).job()
    assert [match_programmes(job, on_streams).faults for on_streams in (True, False)] == [(), ()]
    has_checksums = any(e.is_message and e.group.startswith(AUDIT) for e in job.programmes[0])
    assert has_checksums == (depth == "full" and name in {"1f1b", "zb-v", "ring"})
    exchanges = [e for e in job.programmes[0] if e.is_collective and e.group.startswith(AUDIT)]
    assert {event.action for event in exchanges} == ({"agree"} if depth == "cheap" else {"agree", "check"})


@pytest.mark.parametrize("on_streams", [True, False])
@pytest.mark.parametrize(
    ("rank", "operation", "group", "kind"),
    [
        (1, SEND, "pipeline", "missing send"),
        (1, RECEIVE, "pipeline", "missing receive"),
        (2, "all_to_all", "world", "missing call"),
    ],
)
def test_a_rank_that_leaves_out_a_message_of_the_audit(
    rank: int, operation: str, group: str, kind: str, on_streams: bool
) -> None:
    deck = small_deck(*SIZES, "layout.pipeline=4", "model.tied=false", "stability.corruption=full")
    job = RankProgrammes(deck, 4, 61, 4).every_job()
    programmes = list(job.programmes)
    programmes[rank] = without(
        programmes[rank], lambda event: (event.operation, event.group) == (operation, AUDIT + group)
    )
    (fault,) = match_programmes(replace(job, programmes=programmes), on_streams).faults
    assert (fault.kind, fault.rank, fault.count) == (kind, rank, 1)
    assert f"{AUDIT}{group}" in fault.sentence


def test_a_rank_that_checks_another_number_of_calls() -> None:
    """The number of records is part of the exchange."""
    deck = small_deck(*SIZES, "stability.corruption=cheap")
    job = RankProgrammes(deck, 4, 61, 4).every_job()
    programmes = [
        tuple(
            replace(e, what="of 9 records") if rank == 3 and e.group == f"{AUDIT}data" else e for e in events
        )
        for rank, events in enumerate(job.programmes)
    ]
    (fault,) = match_programmes(replace(job, programmes=programmes)).faults
    assert (fault.kind, fault.rank) == ("other operation", 3)
    assert all(
        event.call_index < len(events) for events in programmes for event in events if event.operation == WAIT
    )
