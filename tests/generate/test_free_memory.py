"""The number of texts that share a cache, by the free memory."""

from __future__ import annotations

import pytest

from hpctrain.comm.world import World
from hpctrain.generate.free_memory import fitting_slot_count, free_bytes_per_rank


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(None, 32), (6400, 32), (6399, 16), (1600, 8), (200, 1), (0, 1)]
)
def test_cache_takes_at_most_half_of_the_free_memory(free_bytes: int | None, expected: int) -> None:
    assert fitting_slot_count(32, lambda count: 100 * count, free_bytes) == expected


@pytest.mark.mpi(min_size=1, max_size=2)
def test_ranks_of_a_node_share_its_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.generate.free_memory.available_bytes", lambda: 1001 + world.rank)
    assert free_bytes_per_rank(world) == 1001 // world.size
    unknown = None if world.rank == world.size - 1 else 1001
    monkeypatch.setattr("hpctrain.generate.free_memory.available_bytes", lambda: unknown)
    assert free_bytes_per_rank(world) is None
