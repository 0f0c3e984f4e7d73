"""All ranks of a job: told by those alike as each by itself, and matched; a planted fault is found.

Tests of plan/rehearse/expert_loads.py beside plan/rehearse/rank_programmes.py.
"""

from __future__ import annotations

import pytest

from hpctrain.plan.rehearse.checks.matching import match_programmes
from hpctrain.plan.rehearse.programme import SEND, StepProgrammes
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from tests.engines import LLAMA, small_deck

VOCABULARY = 61
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=32", "model.experts.per_token=2")
SPLIT = ("layout.tensor=2", "layout.sequence_parallel=true")
LAYOUTS: list[tuple[int, int, tuple[str, ...]]] = [
    (4, 4, ("layout.zero=2", "memory.recompute=full")),
    (4, 2, ("layout.zero=3", "layout.zero_group=node", *SPLIT)),
    (6, 4, ("layout.pipeline=3", "layout.split=[2, 1, 1]", "model.layers=4", "layout.zero=1")),
    (8, 3, ("layout.pipeline=2", "layout.tensor=2", "layout.zero=3", "batch.global_size=16", *LLAMA)),
    (8, 8, ("layout.context=2", "layout.pipeline=2", "model.tied=true", "batch.global_size=16")),
    (8, 4, (*MIXTURE, *SPLIT, "layout.expert=2", "layout.expert_tensor=2", "batch.global_size=16")),
    (8, 8, (*MIXTURE, "layout.pipeline=2", "layout.expert=4", "batch.global_size=16")),
    (
        8,
        4,
        (
            "layout.pipeline=2",
            "layout.chunks=2",
            "layout.schedule=interleaved",
            "model.layers=4",
            "batch.global_size=32",
        ),
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "per_node", "keys"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_alike_ranks_are_told_as_each_by_itself(ranks: int, per_node: int, keys: tuple[str, ...]) -> None:
    deck = small_deck(*keys)
    alike = RankProgrammes(deck, ranks, VOCABULARY, per_node).job()
    each = RankProgrammes(deck, ranks, VOCABULARY, per_node).every_job()
    for rank in range(ranks):
        assert alike.programmes[alike.programme_of[rank]] == each.programmes[rank], each.place(rank)
    assert len(alike.programmes) < ranks
    one, other = match_programmes(alike), match_programmes(each)
    assert not one.faults
    assert not other.faults
    assert (one.events, one.messages, one.bytes) == (other.events, other.messages, other.bytes)


UNEVEN = (
    *MIXTURE,
    "model.experts.count=12",
    "layout.expert=4",
    "model.experts.per_token=3",
    "batch.micro_size=1",
)
FOLDED = (*MIXTURE, "layout.tensor=2", "layout.context=2", "model.experts.count=6", "layout.expert=3")
MUON = ("optimizer.name=muon", "layout.tensor=2")
ODD = (*MIXTURE, "layout.tensor=4", "batch.sequence=33", "batch.micro_size=1", "batch.global_size=16")
"""Rows that tensor ranks do not take as many of."""
UNLIKE: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "odd rows": (8, 8, (*ODD, "layout.expert=4", "layout.pipeline=2")),
    "odd rows of split experts": (8, 4, (*ODD, "layout.expert=2", "layout.expert_tensor=2")),
    "odd rows with room": (8, 4, (*ODD, "layout.expert=2", "model.experts.capacity=1.25", "layout.zero=1")),
    "uneven experts": (8, 4, (*MIXTURE, "model.experts.count=12", "layout.expert=4", "batch.global_size=16")),
    "muon": (8, 4, (*MUON, "layout.pipeline=2", "batch.global_size=16")),
    "experts over tensor ranks": (16, 8, (*UNEVEN, *SPLIT, "layout.zero=1", "batch.global_size=16")),
    "experts split": (16, 16, (*UNEVEN, *SPLIT, "layout.expert_tensor=2", "layout.zero=2")),
    "nodes that cut experts": (16, 3, (*UNEVEN, "layout.pipeline=2", "layout.zero=3")),
    "experts over context": (
        12,
        6,
        (*FOLDED, "layout.expert_tensor=2", "optimizer.name=muon", "batch.global_size=24"),
    ),
    "interleaved": (
        16,
        8,
        (
            *UNEVEN,
            *("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
            "batch.global_size=32",
        ),
    ),
    "few blocks": (24, 24, (*MUON, "layout.zero=1", "model.layers=3", "batch.global_size=24")),
    "blocks handed on": (24, 24, (*MUON, "model.layers=3", "batch.global_size=24")),
    "codes": (6, 6, ("communication.compress=int8", "layout.zero=1", "batch.global_size=24")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "per_node", "keys"), UNLIKE.values(), ids=UNLIKE)
def test_ranks_that_are_not_alike_fit_each_other(ranks: int, per_node: int, keys: tuple[str, ...]) -> None:
    """Experts that tokens do not come to as often, blocks of which each rank has others, and codes."""
    deck = small_deck(*keys)
    alike = RankProgrammes(deck, ranks, VOCABULARY, per_node).job()
    each = RankProgrammes(deck, ranks, VOCABULARY, per_node).every_job()
    for rank in range(ranks):
        assert alike.programmes[alike.programme_of[rank]] == each.programmes[rank], each.place(rank)
    assert not match_programmes(alike).faults


def test_compiled_functions_communicate_as_torch_does() -> None:
    keys = ("layout.tensor=2", "layout.pipeline=2")
    decks = [small_deck(*keys, f"machine.compile={each}") for each in ("true", "false")]
    jobs = [RankProgrammes(deck, 4, VOCABULARY, 2).job() for deck in decks]
    assert jobs[0].programmes == jobs[1].programmes and jobs[0].programmes


def test_a_forgotten_message_of_one_rank_is_found_among_many() -> None:
    """Of 64 ranks one leaves out what it sends third."""
    keys = ("layout.pipeline=4", "layout.tensor=2", "model.layers=4", "batch.global_size=32")
    job = RankProgrammes(small_deck(*keys, "batch.micro_size=1"), 64, VOCABULARY, 8).job()
    assert not match_programmes(job).faults
    assert match_programmes(job).classes == 4
    rank = 21
    events = list(job.programmes[job.programme_of[rank]])
    sent = [index for index, event in enumerate(events) if event.operation == SEND][2]
    kept = [
        event
        if event.call_index < sent
        else event.__class__("wait", call_index=event.call_index - 1, action=event.action)
        for index, event in enumerate(events)
        if index != sent and event.call_index != sent
    ]
    programme_of = job.programme_of.copy()
    programme_of[rank] = len(job.programmes)
    fault = match_programmes(
        StepProgrammes([*job.programmes, tuple(kept)], programme_of, job.groups, job.place)
    ).faults[0]
    assert fault.kind == "missing send"
    assert (fault.rank, fault.count) == (rank, 1)
    assert "rank 21 (pipeline 1, data 2, tensor 1)" in fault.sentence
    assert f"send {events[sent].what} of" in fault.sentence


def test_uneven_experts_are_told_apart_by_few_of_many_ranks() -> None:
    """Of 512 ranks 96 experts lie over 32 and 3 each: loads differ as these do, nothing along data does."""
    keys = ("model.experts.count=96", "model.experts.per_token=4", "layout.expert=32", "layout.zero=1")
    deck = small_deck(*MIXTURE, *keys, "batch.global_size=512", "batch.micro_size=1")
    asked: list[str] = []
    job = RankProgrammes(deck, 512, VOCABULARY, 8).job(asked.append)
    assert len(asked) < 100
    # 128 copies: one more for each of the first 32 experts, of which rank 10 has two.
    loads = [3] * 10 + [2] + [0] * 21
    assert len(job.programmes) == len(set(zip(job.programme_of.tolist(), loads * 16, strict=True))) == 3
