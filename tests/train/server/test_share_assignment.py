"""Who computes what next, and when pushes are applied: decisions of servers, by a seeded scheduler.

Tests of train/server/share_assignment.py and train/server/push_queue.py.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from hpctrain.train.server.push_queue import PushQueue
from hpctrain.train.server.share_assignment import SampleShare, ShareAssignment


@dataclass
class Play:
    """Workers and servers that do what they may in an order by chance: letters of a pair stay in theirs."""

    seed: int
    workers: int
    servers: int
    distance: int | None
    steps: int
    first: int = 0
    applied: list[list[tuple[int, SampleShare]]] = field(default_factory=list)
    stale: list[list[int]] = field(default_factory=list)
    computing: dict[int, SampleShare] = field(default_factory=dict)
    begun: list[SampleShare] = field(default_factory=list)
    most_kept: int = 0

    def run(self, pause_after: int | None = None) -> ShareAssignment:
        """Play to the end; after so many shares begun all are to pause."""
        chance = random.Random(self.seed)
        turns = ShareAssignment(self.workers, self.distance, self.first, self.first + self.steps)
        version = 0 if self.distance is None else self.first
        intakes: list[PushQueue[SampleShare]] = [
            PushQueue(self.workers, self.distance, version) for _ in range(self.servers)
        ]
        self.applied, self.stale = [[] for _ in intakes], [[] for _ in intakes]
        letters: dict[tuple[int, int], list[tuple[str, SampleShare]]] = {
            (worker, server): [] for worker in range(self.workers) for server in range(self.servers)
        }
        answered: dict[int, set[int]] = {}
        speeds = [chance.choice((1, 1, 5)) for _ in range(self.workers)]
        for worker in range(self.workers):
            turns.ask(worker, pushed=False)
        asked_to_pause = False
        while not turns.is_finished or any(letters.values()):
            for worker, share in turns.answers():
                if share is not None:
                    self._begin(worker, share)
                    answered[worker] = set()
                    for server in range(self.servers):
                        letters[worker, server].append(("pull", share))
            for server, intake in enumerate(intakes):
                for worker in intake.answers():
                    answered[worker].add(server)
            if pause_after is not None and len(self.begun) >= pause_after and not asked_to_pause:
                turns.pause()
                asked_to_pause = True
            ready = [w for w, came in answered.items() if len(came) == self.servers]
            events = [("push", worker, 0) for worker in ready if chance.randrange(speeds[worker]) == 0]
            events += [("letter", *pair) for pair, waiting in letters.items() if waiting]
            if not events:
                assert ready or turns.answers() == [], "nobody can go on"
                continue
            kind, worker, server = chance.choice(events)
            if kind == "push":
                share = self.computing.pop(worker)
                del answered[worker]
                for each in range(self.servers):
                    letters[worker, each].append(("push", share))
                continue
            what, share = letters[worker, server].pop(0)
            intake = intakes[server]
            if what == "pull":
                intake.pull(worker, share.step)
                continue
            if server == 0:
                turns.ask(worker, pushed=True)
            for pushed in intake.push(worker, share.step, share):
                self.most_kept = max(self.most_kept, intake.size + len(pushed))
                assert self.most_kept <= intake.bound
                self.applied[server] += [(each.worker, each.payload) for each in pushed]
                self.stale[server] += [each.staleness for each in pushed]
                intake.finish_update()
        return turns

    def _begin(self, worker: int, share: SampleShare) -> None:
        self.computing[worker] = share
        self.begun.append(share)
        if self.distance is not None:
            steps = [each.step for each in self.computing.values()]
            # Who computes nothing has done all steps before the one that waits for it.
            assert max(steps) - min(steps) <= self.distance


@pytest.mark.parametrize("distance", [None, 0, 1, 3])
def test_every_push_is_applied_once_in_any_interleaving(distance: int | None) -> None:
    for seed in range(200):
        chance = random.Random(1000 + seed)
        workers, servers, steps = chance.randrange(1, 5), chance.randrange(1, 4), chance.randrange(1, 6)
        play = Play(seed, workers, servers, distance, steps, first=chance.randrange(3))
        play.run()
        every = {SampleShare(play.first + step, number) for step in range(steps) for number in range(workers)}
        for applied, stale in zip(play.applied, play.stale, strict=True):
            assert Counter(share for _, share in applied) == Counter(every)
            if distance is not None:
                # In the order of steps, and of workers in each, whoever was first.
                assert applied == [(s.number, s) for s in sorted(every, key=lambda s: (s.step, s.number))]
                assert max(stale) <= distance


@pytest.mark.parametrize("distance", [None, 0, 2])
def test_a_pause_comes_after_whole_steps_and_soon(distance: int | None) -> None:
    for seed in range(100):
        play = Play(seed, 3, 2, distance, 50, first=4)
        turns = play.run(pause_after=7)
        ahead = 3 * (1 if distance is None else distance + 1)
        for applied in play.applied:
            steps = Counter(share.step for _, share in applied)
            assert set(steps.values()) == {3} and len(applied) <= 7 + ahead
            assert max(steps) == turns.end - 1


def test_a_distance_is_used() -> None:
    """Else a worker that always waits for the others would pass for one that may be ahead."""
    play = Play(5, 3, 1, 2, 30)
    play.run()
    assert set(play.stale[0]) == {0, 1, 2}


def test_a_slow_worker_slows_itself_alone_without_a_distance() -> None:
    turns = ShareAssignment(workers=2, distance=None, step=0, end=3)
    turns.ask(0, pushed=False)
    turns.ask(1, pushed=False)
    assert turns.answers() == [(0, SampleShare(0, 0)), (1, SampleShare(0, 1))]
    for step, number in ((1, 0), (1, 1), (2, 0), (2, 1)):
        turns.ask(0, pushed=True)
        assert turns.answers() == [(0, SampleShare(step, number))]
    turns.ask(0, pushed=True)
    assert turns.answers() == [(0, None)] and not turns.is_finished
    turns.ask(1, pushed=True)
    assert turns.answers() == [(1, None)] and turns.is_finished


def test_the_fastest_waits_at_its_distance() -> None:
    turns = ShareAssignment(workers=2, distance=1, step=0, end=9)
    turns.ask(0, pushed=False)
    turns.ask(1, pushed=False)
    assert turns.answers() == [(0, SampleShare(0, 0)), (1, SampleShare(0, 1))]
    turns.ask(0, pushed=True)
    assert turns.answers() == [(0, SampleShare(1, 0))]
    turns.ask(0, pushed=True)
    assert turns.answers() == []
    turns.ask(1, pushed=True)
    assert turns.answers() == [(0, SampleShare(2, 0)), (1, SampleShare(1, 1))]


def test_after_an_error_nothing_is_given_out() -> None:
    for distance in (None, 2):
        turns = ShareAssignment(workers=2, distance=distance, step=3, end=9)
        turns.ask(0, pushed=False)
        turns.ask(1, pushed=False)
        assert len(turns.answers()) == 2
        turns.stop()
        turns.ask(0, pushed=False)
        turns.ask(1, pushed=True)
        assert turns.answers() == [(0, None), (1, None)] and turns.is_finished


def test_staleness_counts_the_updates_between_pull_and_push() -> None:
    """By hand: the second worker's push comes after two updates of the first one's."""
    intake: PushQueue[str] = PushQueue(workers=2, distance=None)
    intake.pull(0, 0)
    intake.pull(1, 0)
    assert intake.answers() == [0, 1]

    def push(worker: int) -> int:
        ((pushed,),) = intake.push(worker, 0, "")
        intake.finish_update()
        return pushed.staleness

    assert push(0) == 0
    intake.pull(0, 0)
    intake.answers()
    assert push(0) == 0
    assert push(1) == 2
    intake.pull(0, 1)
    intake.answers()
    ((skipped,),) = intake.push(0, 1, "")  # of which no update is made
    assert skipped.staleness == 0 and intake.version == 3


def test_a_pull_waits_for_the_version_that_its_step_needs() -> None:
    intake: PushQueue[str] = PushQueue(workers=2, distance=1, version=10)
    intake.pull(0, 10)
    intake.pull(1, 10)
    assert intake.answers() == [0, 1]
    assert list(intake.push(0, 10, "a")) == []
    intake.pull(0, 11)
    assert intake.answers() == [0]
    assert list(intake.push(0, 11, "b")) == [] and intake.size == 2
    intake.pull(0, 12)
    assert intake.answers() == []
    (pushed,) = intake.push(1, 10, "c")
    assert [(each.worker, each.payload, each.staleness) for each in pushed] == [(0, "a", 0), (1, "c", 0)]
    intake.finish_update()
    assert intake.answers() == [0]
    intake.pull(1, 11)
    intake.answers()
    (later,) = intake.push(1, 11, "d")
    assert [each.staleness for each in later] == [1, 0]
