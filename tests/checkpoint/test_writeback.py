"""Telling the system early what to write changes nothing but time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import draft, writeback
from hpctrain.checkpoint.checkpoint_index import StoredTensor, examine
from hpctrain.checkpoint.save import save
from hpctrain.comm.world import World
from tests.checkpoint.conftest import entry


@pytest.mark.parametrize(("start", "shape"), [((0, 0), (5, 7)), ((2, 3), (1, 4)), ((1, 2), (4, 3))])
def test_a_span_reaches_from_the_first_element_to_the_last(
    start: tuple[int, int], shape: tuple[int, int]
) -> None:
    numbers = np.arange(35).reshape(5, 7)[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
    stored = StoredTensor("/model/a", "bfloat16", (5, 7), 1000, 0)
    length = int(numbers.max() - numbers.min()) + 1
    assert stored.span(start, shape) == (1000 + 2 * int(numbers.min()), 2 * length)


def test_the_system_hears_of_large_writes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others are still to come."""
    size = 1 << 20
    values = torch.arange(6 * size, dtype=torch.float32)
    held = [entry(name, part) for name, part in zip("abc", values.split(2 * size), strict=True)]
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(draft, "start_writing", lambda _, *span: written.append(span))
    path = tmp_path / "a.h5"
    save(path, world.single_rank_world().everyone, held, {})
    places = [stored.offset for stored in examine(path).datasets.values()]
    assert written == [(place, 8 * size) for place in places]


def test_the_hint_is_taken_by_this_system(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with path.open("r+b") as stream:
        writeback.start_writing(stream.fileno(), 0, 3)
        start = writeback._sync_file_range()
        assert start is None or start(stream.fileno(), 0, 3, writeback._START) == 0
    assert path.read_bytes() == b"abc"
