"""Copies of state in memory: how many there are, which one is when, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hpctrain.checkpoint.state_snapshots as snapshots
from hpctrain.checkpoint.state_snapshots import SnapshotHistory, StateSnapshot, snapshot_count
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.state import StateTensor
from tests.device_double import GPU, on_gpu


class Values:
    """Two tensors of state, of two types."""

    def __init__(self) -> None:
        self.tensors = [torch.arange(12.0), torch.arange(5).to(torch.bfloat16)]

    def state(self) -> Iterator[StateTensor]:
        for number, values in enumerate(self.tensors):
            yield StateTensor(
                "model", Shard.replicated(f"w{number}", tuple(values.shape)), values, 0, (0, 1), True
            )


def test_what_was_there_is_there_again() -> None:
    values, stored = Values(), {"step": 4, "losses": [1.0]}
    before = [each.clone() for each in values.tensors]
    held = SnapshotHistory(4)
    held.take(4, values.state(), stored)
    stored["losses"].append(2.0)  # type: ignore[attr-defined]
    for each in values.tensors:
        each.zero_()
    (copy,) = held.all
    assert copy.is_unchanged()
    copy.restore(values.state())
    assert all(torch.equal(one, other) for one, other in zip(before, values.tensors, strict=True))
    assert copy.stored == {"step": 4, "losses": [1.0]}


def test_copies_of_every_device_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor may be on the host, as of an offloaded optimizer, while a GPU is still copying."""
    values, waited = Values(), []
    values.tensors[0] = on_gpu(values.tensors[0])
    monkeypatch.setattr(snapshots, "synchronize_stream", waited.append)
    monkeypatch.setattr(
        snapshots, "empty_host_tensor", lambda shape, dtype, _: torch.empty(shape, dtype=dtype)
    )
    StateSnapshot(1, {}).take(values.state())
    assert set(waited) == {GPU, torch.device("cpu")}


def test_a_copy_that_a_run_went_back_to_tells_what_it_goes_on_with() -> None:
    """That of step 12 was made because there was none; others are due every 50 steps."""
    values, held = Values(), SnapshotHistory(50)
    assert held.due(12)
    held.take(12, values.state(), {"samples": 96})
    assert not held.due(13)
    assert held.due(12)
    held.take(12, values.state(), {"samples": 136})
    assert [copy.stored for copy in held.all] == [{"samples": 136}]


def test_a_copy_that_changed_is_not_good() -> None:
    values, copy = Values(), StateSnapshot(1, {})
    copy.take(values.state())
    assert copy.is_unchanged()
    copy._values[1].view(torch.int16)[3] ^= 1
    assert not copy.is_unchanged()


@pytest.mark.parametrize("every", [1, 3, 10, 25])
@pytest.mark.parametrize("back", [0, 1, 3, 20, 25])
def test_there_is_always_one_that_is_old_enough(every: int, back: int) -> None:
    """Brute force over the steps of a run, as its loop makes copies."""
    values, held = Values(), SnapshotHistory(every, back)
    most = 0
    for step in range(200):
        if held.due(step):
            held.take(step, values.state(), {})
        most = max(most, len(held.all))
        # The step that follows is number step + 1.
        if step + 1 - back >= 0:
            assert any(copy.step <= step + 1 - back for copy in held.all), step
        assert held.all[-1].step > step - every
    assert most == snapshot_count(every, back) == held.most


def test_without_any_none_is_due_but_the_first() -> None:
    values, held = Values(), SnapshotHistory(10)
    assert held.due(37)
    held.take(37, values.state(), {})
    assert not held.due(38)
    assert held.due(40)
    assert not SnapshotHistory(0).due(0)
    assert snapshot_count(0, 100) == 0


def test_memory_of_the_oldest_is_used_again() -> None:
    values, held = Values(), SnapshotHistory(1)
    held.take(1, values.state(), {})
    memory = held.all[0]._values[0].data_ptr()
    held.take(2, values.state(), {})
    assert [copy.step for copy in held.all] == [2]
    assert held.all[0]._values[0].data_ptr() == memory


def test_what_never_was_is_forgotten() -> None:
    values, held = Values(), SnapshotHistory(2, 6)
    for step in (0, 2, 4, 6):
        held.take(step, values.state(), {"at": step})
    held.discard_after(4)
    assert [copy.step for copy in held.all] == [0, 2, 4]
    held.take(4, values.state(), {"at": "again"})
    assert [copy.stored["at"] for copy in held.all] == [0, 2, "again"]
