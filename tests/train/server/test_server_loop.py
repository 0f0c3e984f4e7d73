"""What servers make of pushes: corrections of stale ones, what is not finite, what is sent and kept.

Tests of train/server/server_loop.py, train/server/worker_loop.py and train/server/server_messages.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.plan.server_plan import served_bytes
from hpctrain.train.hook import Hook
from hpctrain.train.server.push_queue import QueuedPush
from hpctrain.train.server.server_loop import ReceivedPush, Server
from hpctrain.train.server.server_messages import Push
from hpctrain.train.server.server_trainer import ServedTrainer
from hpctrain.train.server.share_assignment import SampleShare
from hpctrain.train.step import ReadBatches, TrainState
from tests.train.server.served import served, served_deck, values

SGD = ("optimizer.name=sgd", "optimizer.weight_decay=0", "optimizer.clip=0", "learning_rate.warmup=0")


def slowly(monkeypatch: pytest.MonkeyPatch, pause: Callable[[], float]) -> None:
    """Have samples read after a pause."""
    reading = Batches.step

    def late(batches: Batches, *arguments: int) -> Iterator[MicroBatch]:
        time.sleep(pause())
        return reading(batches, *arguments)

    monkeypatch.setattr(Batches, "step", late)


def steps(training: ServedTrainer, count: int) -> None:
    """So many steps in one stretch."""
    training._make_steps(training.state.step + count, lambda: False)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_nobody_is_further_ahead_than_the_distance(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pauses by chance, by what workers say to have begun and done."""
    distance = 2
    chance = Random(world.rank)
    slowly(monkeypatch, lambda: chance.choice((0.0, 0.0, 0.02)))
    training = served(world, served_deck("stale", 1, f"communication.server.staleness={distance}"))
    begun: list[tuple[float, int]] = []
    done: list[tuple[float, int]] = []
    if training.worker is not None:
        worker, compute, push = training.worker, training.worker._compute, training.worker._push

        def beginning(state: TrainState, share: SampleShare) -> None:
            begun.append((time.monotonic(), share.step))
            compute(state, share)

        def pushing(step: int, *others: Any) -> None:
            done.append((time.monotonic(), step))
            push(step, *others)

        monkeypatch.setattr(worker, "_compute", beginning)
        monkeypatch.setattr(worker, "_push", pushing)
    steps(training, 12)
    histories = world.everyone.all_gather_object([begun, done])[1:]
    for moment, step in (each for here, _ in histories for each in here):
        for _, others in histories:
            assert step - sum(when < moment for when, _ in others) <= distance
    if training.update_log is not None:
        assert max(training.update_log.staleness) <= distance
        assert sum(training.update_log.staleness.values()) == 12 * 3
        assert training.server is not None and training.server.max_queued <= 3 * (distance + 1)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(("mode", "tied"), [("sync", True), ("async", False)])
def test_the_ledger_counts_pushes_and_pulls_by_the_closed_form(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str, tied: bool
) -> None:
    """Of an untied table the rows that a share touches travel alone, with their numbers."""
    keys = (f"model.tied={str(tied).lower()}", "precision.compute=bf16", "model.vocabulary=61")
    deck = served_deck(mode, 1, *keys)
    training = served(world, deck, masked=0.0)
    training.train_step()  # the first pull is of all
    touched: list[int] = []
    if training.worker is not None:
        reading = training.worker.step.read_and_count

        def noted(*arguments: int) -> tuple[list[MicroBatch], int]:
            read, count = reading(*arguments)
            touched.append(len(torch.cat([each.tokens.flatten() for each in read]).unique()))
            return read, count

        training.worker.step.read_and_count = noted  # type: ignore[method-assign]
    world.ledger.reset()
    payloads: list[int] = []
    telling = Hook()
    monkeypatch.setattr(telling, "after_step", lambda done: payloads.append(done.payload))
    training.hooks.append(telling)
    training.train_step()
    sent = sum(row.bytes for row in world.ledger.rows() if row.axis == "server" and row.operation == "send")
    total = sum(world.everyone.all_gather_object(sent))
    counts: list[int] = [count for each in world.everyone.all_gather_object(touched) for count in each]
    parameters = sum(each.numel() for each in values(training).values())
    dense = parameters if tied else parameters - 61 * 32
    # Besides, each worker asks once and is told once to pause.
    meeting = 3 * 8 * (2 + 4)
    letters = 3 * served_bytes(0, 1, 1, rows=[] if tied else [(0, 32)])
    rows = 0 if tied else sum(counts) * (32 * 6 + 8)
    assert total == 3 * dense * 6 + rows + letters + meeting
    # All of it passes the one server, and its figures tell so to all.
    assert payloads == [total]
    assert tied or 0 < max(counts) < 61
    assert 3 * served_bytes(dense, 1, 1, 4, 2, rows=[] if tied else [(0, 32)]) == 3 * dense * 6 + letters


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("correction", ["scale", "compensate"])
@pytest.mark.parametrize("mode", ["async", "stale"])
def test_stale_pushes_are_corrected_as_the_papers_say(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, correction: str
) -> None:
    """With SGD, by the formula: every update is worked out from what was pulled and what was pushed.

    A push that is a part of an update has a part of the step's mean: the mean over its share is that over
    the part that its tokens are of all. The last worker begins when the two others have pushed three times.
    """
    keys = [f"communication.server.correction={correction}", *SGD, "model.layers=1"]
    keys += ["communication.server.compensation=500.0"] if correction == "compensate" else []
    six_pushed = mpi_tmp_path / "six"

    def until_six() -> float:
        give_up = time.monotonic() + 60
        while world.rank == 3 and not six_pushed.exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        return 0.0

    slowly(monkeypatch, until_six)
    keys += ["communication.server.staleness=2"] if mode == "stale" else []
    training = served(world, served_deck(mode, 1, *keys))
    server = training.server
    seen: list[int] = []
    if server is not None:
        send, push, apply = server._send, server._push, server._apply
        pulled: dict[int, torch.Tensor] = {}
        computed_with: dict[Push, torch.Tensor] = {}

        def sent(worker: int) -> None:
            pulled[worker] = torch.cat(server._masters)
            send(worker)

        def came(sender: int, pushed: Push) -> None:
            computed_with[pushed] = pulled[sender - 1]
            push(sender, pushed)
            if len(computed_with) == 6:
                six_pushed.touch()

        def applied(pushed: Sequence[QueuedPush[ReceivedPush]]) -> None:
            before = torch.cat(server._masters)
            of_step = pushed[0].payload.push.step
            step = server._first + server._pushes // 3 if mode == "async" else of_step
            rate = training.engine.control.learning_rate.at(step, 4)
            tokens = sum(each.payload.push.tokens for each in pushed)
            change = torch.zeros_like(before)
            for each in pushed:
                assert each.payload.gradients is not None
                gradient, share = each.payload.gradients.clone(), each.payload.push.tokens / tokens
                if correction == "scale":
                    gradient /= max(1, each.staleness)
                if correction == "compensate":
                    drift = before - computed_with[each.payload.push]
                    gradient += share * 500.0 * (gradient / share) ** 2 * drift
                    assert bool(drift.any()) == (each.staleness > 0)
                change += gradient
            apply(pushed)
            seen.extend(each.staleness for each in pushed)
            torch.testing.assert_close(
                torch.cat(server._masters), before - rate * change, rtol=1e-5, atol=1e-7
            )

        monkeypatch.setattr(server, "_send", sent)
        monkeypatch.setattr(server, "_push", came)
        monkeypatch.setattr(server, "_apply", applied)
    steps(training, 5)
    assert server is None or (len(seen) == 15 and max(seen) > 1), seen


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_is_not_finite_is_skipped_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Of one worker one push, without a word of its gradients; or, in step, the whole step."""
    training = served(world, served_deck(mode, 2))
    training.train_step()
    before = values(training)
    if world.rank == 3:
        assert training.worker is not None
        accumulate = training.worker.step.accumulate

        def broken(*arguments: object) -> tuple[torch.Tensor, ReadBatches]:
            sums, read = accumulate(*arguments)  # type: ignore[arg-type]
            training.engine.stage.buckets[0].gradients[0] = float("inf")
            return sums, read

        monkeypatch.setattr(training.worker.step, "accumulate", broken)
    result = training.train_step()
    after = values(training)
    assert all(bool(each.isfinite().all()) for each in after.values())
    if mode == "sync":
        assert result.skipped and training.state.skipped == 1
        assert all(torch.equal(before[name], each) for name, each in after.items())
    else:
        left_out = world.everyone.broadcast_object(
            training.update_log.discarded_pushes if training.update_log else 0
        )
        assert not result.skipped and training.state.skipped == 0 and left_out >= 1
        assert any(not torch.equal(before[name], each) for name, each in after.items())
    assert training.state.step == 2


@pytest.mark.mpi(min_size=4, max_size=4)
def test_no_correction_makes_a_push_infinite(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient of 1e18 the square times how far the weights have moved is beyond fp32."""
    keys = ("communication.server.correction=compensate", "communication.server.compensation=1e6")
    training = served(world, served_deck("async", 1, *keys))
    training.train_step()
    if training.worker is not None:
        accumulate = training.worker.step.accumulate

        def huge(*arguments: object) -> tuple[torch.Tensor, ReadBatches]:
            sums, read = accumulate(*arguments)  # type: ignore[arg-type]
            for bucket in training.engine.stage.buckets:
                bucket.gradients[:8] = 1e18
            return sums, read

        monkeypatch.setattr(training.worker.step, "accumulate", huge)
    steps(training, 3)
    assert all(bool(each.isfinite().all()) for each in values(training).values())
    assert training.update_log is None or max(training.update_log.staleness) > 0


@pytest.mark.mpi(min_size=4, max_size=4)
def test_rows_that_travel_alone_change_no_bit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pushes and pulls of whole tables; slices of two servers cut the table within a row."""
    deck = served_deck("sync", 2, "model.tied=false", "model.hidden=24", "model.vocabulary=67")
    sparse = served(world, deck)
    results = [sparse.train_step() for _ in range(3)]
    after = values(sparse)
    if sparse.worker is not None:
        assert all(wire.tables for wire in sparse.worker.wires)
    monkeypatch.setattr("hpctrain.train.server.wire_format.embedding_row_sizes", lambda _: {})
    dense = served(world, deck)
    assert [dense.train_step().metrics for _ in range(3)] == [result.metrics for result in results]
    assert all(torch.equal(after[name], each) for name, each in values(dense).items())


def test_a_push_says_what_it_said() -> None:
    push = Push(7, True, False, 1.5, 99, 0.25, True, (3.5, 1.0), (4, 0, 2))
    assert Push.of(tuple(push.numbers())) == push


@pytest.mark.mpi(min_size=4, max_size=4)
def test_a_slow_worker_slows_itself_alone(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One computes its first share until the others have done all of the rest, in the same steps."""
    training, count = served(world, served_deck("async", 1)), 4
    done = mpi_tmp_path / "done"
    if training.server is not None:
        server, apply = training.server, training.server._apply

        def applied(pushed: Sequence[QueuedPush[ReceivedPush]]) -> None:
            apply(pushed)
            if server._pushes == 3 * count - 1:
                done.touch()

        monkeypatch.setattr(server, "_apply", applied)
    shares: list[int] = []
    if training.worker is not None:
        compute = training.worker._compute

        def computed(state: TrainState, share: SampleShare) -> None:
            while world.rank == 3 and not done.exists():
                time.sleep(0.01)
            shares.append(share.number)
            compute(state, share)

        monkeypatch.setattr(training.worker, "_compute", computed)
    steps(training, count)
    taken = list(map(len, world.everyone.all_gather_object(shares)))
    assert taken[3] == 1 and sum(taken) == 3 * count


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_slow_worker_makes_no_server_keep_pushes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each worker one push is under way: the next is computed with what is answered behind it."""
    training = served(world, served_deck("async", 1))
    slow = Server._apply
    monkeypatch.setattr(Server, "_apply", lambda server, pushed: (time.sleep(0.02), slow(server, pushed))[1])
    steps(training, 4)
    assert training.server is None or training.server.max_queued == 1
