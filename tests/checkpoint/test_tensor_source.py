"""Pieces on their way from a file: cut anywhere, several at once, and none left when one fails."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint import load as load_module
from hpctrain.checkpoint import tensor_source
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.tensor_source import ReadRequest, open_tensors
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.memory.scratch import ScratchFiles, ScratchTensor
from tests.checkpoint.conftest import Tensors, columns, entry, rows, split, whole

KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def group(world: World) -> Group:
    return world.single_rank_world().everyone


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is a whole number of pieces, and no piece a whole number of rows."""
    monkeypatch.setattr(tensor_source, "_READ_BYTES", 104)


@pytest.fixture
def nothing_doubted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read is right by the sums of its pieces alone: nothing is read for the verdict."""
    doubted: list[object] = []
    original = load_module.verify_pieces
    monkeypatch.setattr(
        load_module, "verify_pieces", lambda *given: (doubted.extend(given[2]), original(*given))
    )
    yield
    assert doubted == []


def random(kind: torch.dtype, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    size = torch.empty(0, dtype=kind).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=draw, dtype=torch.uint8).view(
        kind
    )


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def places(path: Path) -> dict[str, range]:
    """Where in the file the tensors' bytes lie, by HDF5."""
    found = {}
    with h5py.File(path, "r") as file:
        for name in file["model"]:
            dataset = file["model"][name].id
            found[name] = range(dataset.get_offset(), dataset.get_offset() + dataset.get_storage_size())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_pieces")
def test_ranges_with_any_ends(kind: torch.dtype, group: Group, tmp_path: Path) -> None:
    """Of every length around that of a piece, from every element of one on."""
    path = tmp_path / "a.h5"
    tensor = random(kind, 17, 19)
    save(path, group, [entry("a", tensor)], {})
    structure = examine(path)
    stored = structure.datasets["/model/a"]
    one = 104 // stored.item_bytes
    expected = tensor.reshape(-1)
    with open_tensors(path, 1200) as source:
        for first in range(0, one + 1, max(1, one // 13)):
            for count in {1, one - 1, one, one + 1, 2 * one, 2 * one + 1, 3 * one - 1}:
                held = entry("a", torch.zeros_like(tensor)).part(first, first + count)
                source.fill([ReadRequest(held, stored, None)])
                assert same(held.values, expected[first : first + count]), (first, count)


@pytest.mark.parametrize("layout", [whole, rows, columns])
@pytest.mark.parametrize("buffer_bytes", [1, 700, 1 << 20])
@pytest.mark.usefixtures("small_pieces", "nothing_doubted")
def test_sums_of_small_pieces(
    layout: Callable[[Tensors, int, int], list[TensorRange]], buffer_bytes: int, group: Group, tmp_path: Path
) -> None:
    """All ranks' parts, read by one: they add up to what the file says, whatever the memory for gaps."""
    path = tmp_path / "a.h5"
    tensors = {str(kind): random(kind, 11, 7, 5) for kind in KINDS}
    save(path, group, whole(tensors, 0, 1), {})
    parts = [part for rank in range(3) for part in layout(tensors, rank, 3)]
    found = [replace(part, values=torch.full_like(part.values, 7)) for part in parts]
    load(path, group, found, buffer_bytes=buffer_bytes)
    for one in found:
        assert same(one.values.view(one.shard.local), one.shard.take(tensors[one.shard.name])), one.shard


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("cut", [None, -1])
def test_a_flipped_byte_in_any_piece(
    cut: int | None, group: Group, tmp_path: Path, flip: Callable[[Path, int], None]
) -> None:
    path = tmp_path / "a.h5"
    tensors = {"a": random(torch.float32, 9, 31), "b": random(torch.bfloat16, 3, 40)}
    save(path, group, whole(tensors, 0, 1), {})
    for name, place in places(path).items():
        for offset in (*place[::100], place[-1]):
            flip(path, offset)
            with pytest.raises(InputOutputError, match=f"/model/{name} is damaged: elements 0 to"):
                load(path, group, halves(tensors, cut), strict=False)
            flip(path, offset)
    load(path, group, halves(tensors, cut))


def halves(tensors: Tensors, cut: int | None) -> list[TensorRange]:
    """Memory for all tensors, whole or cut in two along a dimension."""
    shards = [
        split(name, tuple(tensor.shape), cut % tensor.dim(), part, 2) if cut is not None else None
        for name, tensor in tensors.items()
        for part in range(1 if cut is None else 2)
    ]
    names = [name for name in tensors for _ in range(1 if cut is None else 2)]
    return [
        entry(name, torch.zeros_like(tensors[name]), shard) for name, shard in zip(names, shards, strict=True)
    ]


@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_ends_in_any_piece(group: Group, tmp_path: Path) -> None:
    """While it is read: what it held when it was opened is not there any more."""
    path = tmp_path / "a.h5"
    save(path, group, [entry("a", random(torch.float32, 301))], {})
    structure, content, place = examine(path), path.read_bytes(), places(path)["a"]
    for length in (*range(place.start, place.stop, 100), place.stop - 1):
        path.write_bytes(content[:length])
        with pytest.raises(InputOutputError, match=f"truncated: it ends at byte {length}$"):
            load(structure, group, [entry("a", torch.zeros(301))])


@pytest.mark.mpi
@pytest.mark.usefixtures("small_pieces")
def test_a_read_that_fails_is_everyones_and_leaves_nothing_open(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mpi_tmp_path / "a.h5"
    tensors = {"a": random(torch.float32, 40, 31)}
    save(path, world.everyone, whole(tensors, world.rank, world.size), {})
    reads = under_way = 0
    original = os.preadv
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    def failing(*arguments: Any) -> int:
        nonlocal reads, under_way
        reads, under_way = reads + 1, under_way + 1
        try:
            if reads == 5 and world.rank == world.size - 1:
                raise OSError(5, "Input/output error")
            time.sleep(0.1 * (reads > 5))  # the failure is known before the read beside it ends
            return original(*arguments)
        finally:
            under_way -= 1

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(InputOutputError, match=r"a.h5: cannot be read at byte \d+: Input/output error"):
        load(path, world.everyone, whole(tensors, world.rank, world.size))
    assert under_way == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    world.everyone.barrier()
    monkeypatch.undo()
    load(path, world.everyone, whole(tensors, world.rank, world.size))


@pytest.mark.usefixtures("small_pieces")
def test_what_is_added_and_what_lies_in_files(group: Group, tmp_path: Path) -> None:
    """Neither takes the bytes as they come; both come in small pieces, several under way."""
    path = tmp_path / "a.h5"
    ours, theirs = (torch.arange(900.0).view(30, 30) * factor for factor in (1, 1000))
    save(path, group, [entry("a", ours), entry("b", theirs)], {})
    sums = entry("a", torch.zeros(30, 30))
    load(path, group, [sums, replace(entry("b", theirs), values=sums.values, added=True)])
    assert torch.equal(sums.values, (ours + theirs).reshape(-1))
    scratch = ScratchFiles(tmp_path / "offload", 0)
    for shard in (split("a", (30, 30), 1, 1, 4), split("a", (30, 30), 0, 3, 4)):  # with padding
        file = scratch.file(f"optimizer-{shard.start[0]}", 4 * shard.elements)
        values = ScratchTensor(file, 0, shard.elements, torch.float32)
        load(path, group, [replace(entry("a", ours, shard), values=values)], strict=False)
        assert torch.equal(values.load().view(shard.local), shard.take(ours))
    scratch.close()


def test_own_shares_come_first_and_all_comes_once(group: Group, tmp_path: Path, tensors: Tensors) -> None:
    """What ranks hold in common each begins with another part of: these are all of it."""
    path = tmp_path / "a.h5"
    save(path, group, whole(tensors, 0, 1), {})
    structure = examine(path)

    sizes = {name: stored.elements for name, stored in structure.datasets.items()}
    added_up = {name: np.zeros(size, int) for name, size in sizes.items()}
    for rank in range(3):
        sums, touched = np.zeros(len(structure.sums), np.uint64), np.zeros(len(structure.sums), np.int64)
        found = list(load_module._read_requests(structure, whole(tensors, rank, 3), sums, touched))
        own = [each.sums is not None for each in found]
        assert own == sorted(own, reverse=True)
        assert touched.all()
        every = {name: np.zeros(size, int) for name, size in sizes.items()}
        for each in found:
            entry = each.entry
            part = slice(entry.offset, entry.offset + entry.values.numel())
            every[entry.dataset][part] += 1
            added_up[entry.dataset][part] += each.sums is not None
        assert all((times == 1).all() for times in every.values())
    assert all((times == 1).all() for times in added_up.values())


def test_memory_stays_within_the_buffer(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of short rows with gaps between, in the file and where they go: nothing is read to where it stays."""
    path = tmp_path / "a.h5"
    tensors = {"a": random(torch.float32, 800, 501)}
    save(path, group, whole(tensors, 0, 1), {})
    buffer, alive, most = 200_000, 0, 0

    class Counted(tensor_source._BoxRead):
        def __init__(self, *arguments: object) -> None:
            nonlocal alive, most
            super().__init__(*arguments)  # type: ignore[arg-type]
            alive += self.words.nbytes
            most = max(most, alive)

        def finish(self) -> None:
            nonlocal alive
            super().finish()
            alive -= self.words.nbytes

    monkeypatch.setattr(tensor_source, "_BoxRead", Counted)
    held = entry("a", tensors["a"], split("a", (800, 501), 1, 3, 4))
    stored = examine(path).datasets["/model/a"]
    tracemalloc.start()
    with open_tensors(path, buffer) as source:
        source.fill([ReadRequest(held, stored, None)])
    gaps = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same(held.values, held.shard.take(tensors["a"]).reshape(-1))
    assert buffer / 12 < most < buffer / 2
    assert buffer / 4 < gaps < buffer / 2 + 50_000  # and Python's own
    assert alive == 0
