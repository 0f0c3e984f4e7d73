"""Rehearsal by NCCL's rules: planted faults are found, and every layout comes to its end.

Tests of plan/rehearse/checks/stream_deadlock.py and plan/rehearse/checks/issue_order.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from hpctrain.comm.mesh import AXES, connected_axes
from hpctrain.plan.rehearse.call_recorder import RecordedMesh
from hpctrain.plan.rehearse.checks import stream_deadlock
from hpctrain.plan.rehearse.checks.matching import match_programmes
from hpctrain.plan.rehearse.programme import RECEIVE, WAIT, RehearsedCall, StepProgrammes
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from tests.engines import LLAMA, small_deck
from tests.plan.rehearse.checks.test_matching import PAIR, Rows, job_of, receive, send, total, wait

SIZES = ("model.layers=4", "model.heads=4", "batch.global_size=16", "batch.micro_size=1", "run.device=cuda")
EXPERTS = ("model.experts.count=4", "model.experts.mlp=32", "model.experts.per_token=2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "zero-1": (4, ("layout.zero=1", "precision.compute=bf16")),
    "zero-2": (4, ("layout.zero=2", "layout.tensor=2")),
    "zero-3": (4, ("layout.zero=3", "layout.tensor=2", "layout.sequence_parallel=true")),
    "hybrid": (8, ("layout.zero=3", "layout.zero_group=2")),
    "1f1b": (4, ("layout.pipeline=4", "model.tied=true")),
    "gpipe": (4, ("layout.pipeline=4", "layout.schedule=gpipe")),
    "interleaved": (4, ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2")),
    "zb-h1": (8, ("layout.pipeline=4", "layout.schedule=zb-h1", "layout.tensor=2")),
    "zb-v": (8, ("layout.pipeline=2", "layout.schedule=zb-v", "layout.zero=1", "model.tied=true")),
    "ring": (8, ("layout.context=4", "layout.context_form=ring", "layout.zero=3", *LLAMA)),
    "all_to_all": (4, ("layout.context=4", "layout.context_form=all_to_all")),
    "stages of rings": (8, ("layout.pipeline=2", "layout.context=2", "layout.tensor=2")),
    "muon": (4, ("layout.zero=1", "optimizer.name=muon")),
    "experts": (8, (*LLAMA, *EXPERTS, "layout.expert=4", "layout.zero=1")),
    "stages of experts": (8, (*LLAMA, *EXPERTS, "layout.expert=2", "layout.pipeline=2", "layout.tensor=2")),
}


def kinds(job: StepProgrammes) -> list[str]:
    return [fault.kind for fault in match_programmes(job, on_streams=True).faults]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_to_its_end(name: str) -> None:
    ranks, keys = LAYOUTS[name]
    matched = match_programmes(
        RankProgrammes(small_deck(*SIZES, *keys), ranks, 61, ranks).job(), on_streams=True
    )
    assert matched.faults == ()
    assert matched.events > 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_receives_are_posted_ahead(schedule: str) -> None:
    """A GPU of a stage receives its next message while it computes, and never has a third receive posted."""
    keys = "layout.pipeline=4", f"layout.schedule={schedule}", "model.layers=8", "model.tied=false"
    chunks = ("layout.chunks=2",) if schedule == "interleaved" else ()
    job = job_of_schedule(*keys, *chunks)
    for programme in job.programmes:
        posted: dict[int, list[int]] = defaultdict(list)
        most: dict[int, int] = defaultdict(int)
        for index, event in enumerate(programme):
            if event.operation == RECEIVE and event.group == "pipeline":
                posted[event.offset].append(index)
                most[event.offset] = max(most[event.offset], len(posted[event.offset]))
            elif event.operation == WAIT:
                for waiting in posted.values():
                    if event.call_index in waiting:
                        waiting.remove(event.call_index)
        assert set(most.values()) == {2}, schedule  # the next one is posted when one is awaited


def test_pipelines_need_a_channel_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one communicator for both directions, a posted receive would delay the send of the same stage."""
    job = job_of_schedule("layout.pipeline=4")
    assert kinds(job) == []
    monkeypatch.setattr(stream_deadlock._StreamRun, "_stream", lambda _, event: event.group or None)
    assert kinds(job) == ["cyclic wait"]


def test_axes_without_channels_are_rehearsed_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal reads from the table of transports which axes have channels."""
    monkeypatch.setattr(stream_deadlock, "POINT_TO_POINT_AXES", frozenset({("pipeline",)}))
    ranks, keys = LAYOUTS["ring"]
    job = RankProgrammes(small_deck(*SIZES, *keys), ranks, 61, ranks).job()
    assert "cyclic wait" in kinds(job)


def job_of_schedule(*keys: str) -> StepProgrammes:
    return RankProgrammes(small_deck(*SIZES, *keys), 4, 61, 4).job()


def test_messages_have_no_tags() -> None:
    """MPI tells them apart by their tags, NCCL only by their order."""
    first = [send("F0", tag=1), send("F1", tag=2)]
    second = [receive("F1", tag=2, blocking=False), receive("F0", tag=1), wait(0)]
    job = job_of([[replace(each, blocking=False) for each in first], second], pipeline=PAIR)
    assert match_programmes(job).faults == ()
    assert kinds(job) == ["swapped order"]


def test_both_neighbors_send_first() -> None:
    """Each direction has a channel, but a blocking send keeps the stream that computes from receiving."""
    blocking = job_of([[send("F0"), receive("B0", 1)], [send("B0"), receive("F0")]], pipeline=PAIR)
    assert kinds(blocking) == ["cyclic wait"]
    started = [
        [send("F0", blocking=False), receive("B0", 1)],
        [send("B0", blocking=False), receive("F0")],
    ]
    assert kinds(job_of(started, pipeline=PAIR)) == []


def test_messages_without_a_channel_follow_each_other() -> None:
    """Ranks 0 and 2 of four are no neighbors, so that both directions are on one communicator."""

    def message(operation: str, blocking: bool) -> RehearsedCall:
        return RehearsedCall(operation, "pipeline", 8, 2, what="X", blocking=blocking)

    row: Rows = [[0, 1, 2, 3]]
    both = [message("send", False), message("recv", True)]
    assert kinds(job_of([both, [], both, []], pipeline=row)) == ["cyclic wait"]
    assert kinds(job_of([both, [], both[::-1], []], pipeline=row)) == []


def test_calls_of_two_communicators_in_other_order() -> None:
    """With blocking calls, and with a wait between started ones, the streams wait in a cycle."""
    groups: dict[str, Rows] = {"a": PAIR, "b": PAIR}
    a, b = total(group="a"), total(group="b")
    assert kinds(job_of([[a, b], [b, a]], **groups)) == ["cyclic wait"]
    started_a, started_b = (replace(each, blocking=False) for each in (a, b))
    assert kinds(job_of([[started_a, wait(0), started_b], [started_b, wait(0), started_a]], **groups)) == [
        "cyclic wait"
    ]


def test_started_calls_of_two_communicators_in_other_order() -> None:
    """Streams may run them in any order, but a GPU may have no room for both kernels, which NCCL warns of."""
    a, b, c = (total(group=group, blocking=False) for group in "abc")
    rows: dict[str, Rows] = {"a": [[0, 1], [2, 3]], "b": [[0, 1], [2, 3]], "c": [[0, 2], [1, 3]]}
    ab, ba = [a, b, wait(0), wait(1)], [b, a, wait(0), wait(1)]
    job = job_of([ab, ba, ab, ab], **rows)
    (fault,) = match_programmes(job, on_streams=True).faults
    assert (fault.kind, fault.rank, fault.count) == ("swapped order", 1, 1)
    assert "rank 1 starts calls of a and of b in another order than rank 0" in fault.sentence
    assert match_programmes(job).faults == ()  # MPI has no such rule
    # Ranks 0 and 2 share only c, so their calls of a and b may be in any order.
    assert kinds(job_of([ab, ab, ba, ba], **rows)) == []
    ac, ca = [a, c, wait(0), wait(1)], [c, a, wait(0), wait(1)]
    assert kinds(job_of([ac, ca, ac, ca], **rows)) == []


def test_a_started_call_needs_no_waiting_rank() -> None:
    """Streams go on by themselves, other than calls that MPI carries, which this rank has to help on."""
    begun, later = total(blocking=False), total(4)
    assert kinds(job_of([[begun, wait(0), later], [begun, later, wait(0)]], all=PAIR)) == []


def test_a_receive_that_is_posted_early_delays_later_ones() -> None:
    """A collective behind a receive on the same communicator waits until the message comes."""
    early = RehearsedCall("recv", "pipeline", 8, 2, what="X", blocking=False)
    late = RehearsedCall("send", "pipeline", 8, 2, what="X", blocking=False)
    call = total(group="pipeline", blocking=True)
    row: Rows = [[0, 1, 2, 3]]
    assert kinds(job_of([[early, call], [call], [call, late], [call]], pipeline=row)) == ["cyclic wait"]
    assert kinds(job_of([[early, call], [call], [late, call], [call]], pipeline=row)) == []


def test_communicators_are_created_by_all_their_ranks() -> None:
    """Groups of the mesh are created first, groups of ZeRO when an engine is built. Every rank takes part."""
    keys = "layout.zero=3", "layout.zero_group=2", "layout.pipeline=2"
    job = RankProgrammes(small_deck(*SIZES, *keys), 8, 61, 8).every_job()
    created = [event.what for event in job.programmes[0] if event.operation == "new_group"]
    assert created[:4] == [*AXES]
    assert created[4:6] == ["data x context/2", "replicas of data x context/2"]
    assert kinds(job) == []
    first, *others = job.programmes
    for name in ("tensor", "data x context/2"):
        place = created.index(name)
        kept = first[:place] + first[place + 1 :]
        without = [
            replace(event, call_index=event.call_index - 1) if event.operation == WAIT else event
            for event in kept
        ]
        (fault,) = match_programmes(
            replace(job, programmes=[tuple(without), *others]), on_streams=True
        ).faults
        assert fault.kind == "missing call"
        assert f"new_group {name}" in fault.sentence, fault.sentence


def test_a_rank_that_makes_a_mesh_without_one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal follows the code that makes a mesh, on each rank."""
    record = RecordedMesh.record_creation

    def without_tensor(mesh: RecordedMesh) -> None:
        record(mesh)
        if mesh.rank == 5:
            created = mesh.recorder.creations
            created[:] = [event for event in created if event.what != "tensor"]

    monkeypatch.setattr(RecordedMesh, "record_creation", without_tensor)
    job = RankProgrammes(small_deck(*SIZES, "layout.tensor=2"), 8, 61, 8).every_job()
    faults = match_programmes(job, on_streams=True).faults
    assert [(fault.kind, fault.rank) for fault in faults] == [("missing call", 5)]
    assert "call 4 of world is " in faults[0].sentence
    assert "and new_group tensor on rank 0 " in faults[0].sentence


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"data": 4}, []),
        ({"data": 2, "context": 2}, ["data x context"]),
        ({"context": 2, "tensor": 2}, ["context x tensor"]),
        ({"data": 2, "tensor": 2, "expert": 2}, ["expert_data", "expert"]),
        (
            {"data": 4, "expert": 2, "expert_tensor": 2},
            ["expert", "expert_tensor", "expert x expert_tensor"],
        ),
    ],
)
def test_communicators_of_a_mesh(sizes: dict[str, int], axes: list[str]) -> None:
    """Each axis has one, and joined axes only if several have several ranks."""
    all_sizes = dict.fromkeys(AXES, 1) | ({"expert_tensor": 1} if "expert" in sizes else {}) | sizes
    connected = [" x ".join(each) for each in connected_axes(all_sizes)]
    assert connected == [*AXES, *axes]


def test_groups_that_share_a_communicator_make_their_calls_in_one_order() -> None:
    """With one context rank, data x context uses the communicator of data."""
    groups: dict[str, Rows] = {"data": PAIR, "data x context": PAIR}
    short, long = total(4, group="data"), total(8, group="data x context")
    assert kinds(job_of([[short, long], [short, long]], **groups)) == []
    assert kinds(job_of([[short, long], [long, short]], **groups)) == ["swapped order"]


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        ([total(4), total(8)], "swapped order"),
        ([total(8)], "missing call"),
        ([total(8), total(5)], "wrong size"),
        ([total(8), RehearsedCall("all_gather", "all", 4, what="sum")], "other operation"),
    ],
)
def test_calls_that_do_not_match(second: list[RehearsedCall], kind: str) -> None:
    assert kinds(job_of([[total(8), total(4)], second], all=PAIR)) == [kind]


def test_the_fault_names_who_waits_for_what() -> None:
    job = job_of([[send("F0"), receive("B0", 1)], [send("B0"), receive("F0")]], pipeline=PAIR)
    (fault,) = match_programmes(job, on_streams=True).faults
    assert fault.count == 2
    assert "rank 0 waits for its send of F0 of 8 bytes along pipeline to rank 1" in fault.sentence
    assert "rank 1 waits for its send of B0" in fault.sentence
