"""Tensors of a checkpoint, opened lazily: against h5py, and against what was saved, in any place of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.checkpoint import lazy
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.save import save
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from tests.checkpoint.conftest import LAYOUTS, Tensors, whole

HISTORY = {
    "title": "a", "run_dir": "runs/a", "ranks": 4, "layout": {"data": 4}, "first_step": 1, "last_step": 7,
    "versions": {}, "commit": None, "started": "2026-03-01T12:00:00Z",
}  # fmt: skip


@pytest.fixture
def path(world: World, tmp_path: Path, tensors: Tensors) -> Path:
    alone = world.single_rank_world()
    save(tmp_path / "a.h5", alone.everyone, whole(tensors, 0, 1), {"step": 7, "history": [HISTORY]})
    return tmp_path / "a.h5"


@pytest.mark.mpi(max_size=4)
@pytest.mark.parametrize("layout", ["flat", "columns", "stages"])
def test_what_any_layout_wrote_is_whole(
    layout: str, world: World, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    group = world.everyone
    save(mpi_tmp_path / "a.h5", group, LAYOUTS[layout](tensors, group.rank, group.size), {"step": 3})
    with hpctrain.open_checkpoint(mpi_tmp_path / "a.h5") as checkpoint:
        assert checkpoint.step == 3
        assert set(checkpoint.model) == set(tensors) and set(checkpoint) == {f"model/{n}" for n in tensors}
        for name, tensor in tensors.items():
            found = checkpoint.model[name]
            assert found.dtype == tensor.dtype and found.shape == (tensor.shape or (1,))
            assert torch.equal(found.torch(), tensor.reshape(found.shape)), name
    world.everyone.barrier()


PLACES: list[Any] = [
    0, -1, (3, 2), slice(2, 5), slice(None, None, 2), (slice(1, 6, 3), slice(-4, None)), (..., 0), (1, ...),
    (slice(5, 2), 1), (slice(None), slice(3, 4)), (np.int64(2), slice(0, 400)), ...,
    (slice(-2, 99), slice(1, 9, 4)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["matrix", "large.weight", "layers.0.cube", "counts", "double"])
def test_slices_are_those_of_torch(name: str, path: Path, tensors: Tensors) -> None:
    tensor, stored = tensors[name], hpctrain.open_checkpoint(path).model[name]
    for place in PLACES:
        assert torch.equal(stored[place], tensor[place]), place
        assert stored[place].is_contiguous()
    for index in np.ndindex(*(min(size, 3) for size in tensor.shape)):
        assert stored[index] == tensor[index]


def test_values_are_those_that_hdf5_reads(path: Path) -> None:
    checkpoint = hpctrain.open_checkpoint(path)
    with h5py.File(path) as file:
        for name in ("matrix", "half", "double", "counts", "int", "nothing"):
            assert np.array_equal(checkpoint[f"model/{name}"].numpy(), file[f"model/{name}"][()]), name
        bits = file["model/layers.0.cube"][()].astype(np.uint32) << 16
    assert np.array_equal(np.asarray(checkpoint.model["layers.0.cube"]), bits.view(np.float32))
    assert np.asarray(checkpoint.model["matrix"], np.float64).dtype == np.float64


def test_a_slice_reads_what_it_gives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, read = hpctrain.open_checkpoint(path), [0]
    real = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    large = checkpoint.model["large.weight"]
    for place, bytes_of in (
        ((slice(5, 7),), 2 * 801 * 4),
        ((9, slice(3, 5)), 8),
        ((slice(4), 1), 4 * 801 * 4),
    ):
        read[0] = 0
        assert large[place].numel() and read[0] <= bytes_of, (place, read)


def test_whole_reads_are_compared_with_their_checksums(path: Path, flip: Callable[[Path, int], None]) -> None:
    stored = examine(path).datasets["/model/large.weight"]
    flip(path, stored.offset + 4 * (1 << 20) + 5)
    checkpoint = hpctrain.open_checkpoint(path)
    for read in (checkpoint.model["large.weight"].torch, checkpoint.model["large.weight"].numpy):
        with pytest.raises(InputOutputError, match=r"/model/large.weight is damaged: elements 1048576 to"):
            read()
    assert len(checkpoint.model["matrix"].torch()) == 37


def test_names_that_are_not_there_tell_near_ones(path: Path) -> None:
    checkpoint = hpctrain.open_checkpoint(path)
    for name, told in (
        ("model/matrx", "did you mean 'model/matrix'"),
        ("matrix", "did you mean 'model/matrix'"),
        ("q" * 500, "it has 11 tensors, such as"),
    ):
        with pytest.raises(HpctrainError, match=told) as caught:
            checkpoint[name]
        assert isinstance(caught.value, KeyError) and name not in checkpoint
        assert str(caught.value).startswith(str(path))
    assert checkpoint.get("away") is None
    with pytest.raises(HpctrainError, match="did you mean 'model/matrix'"):
        checkpoint.model["matrik"]


WRONG: dict[Any, str] = {
    37: r"index 37 is out of range \[-37, 37\) along dim 0",
    (0, -20): r"index -20 is out of range \[-19, 19\) along dim 1",
    (0, 0, 0): "has 2 dims, but got an index of 3",
}


def test_places_that_are_not_there_are_told(path: Path) -> None:
    matrix = hpctrain.open_checkpoint(path).model["matrix"]
    for place, told in WRONG.items():
        with pytest.raises(HpctrainError, match=told) as caught:
            matrix[place]
        assert isinstance(caught.value, IndexError)
    for unread, told in (
        ([1, 2], "but got a list"), (None, "but got None"), (True, "but got a bool"),
        (slice(None, None, -1), "a slice with step -1"),
    ):  # fmt: skip
        with pytest.raises(HpctrainError, match=told):
            matrix[unread]  # type: ignore[index]
    assert len(list(matrix)) == 37  # as of any sequence


def test_it_stays_readable_until_it_is_closed(path: Path, tensors: Tensors) -> None:
    checkpoint = hpctrain.open_checkpoint(path)
    path.unlink()  # as a run does, which keeps a few
    assert torch.equal(checkpoint.model["matrix"].torch(), tensors["matrix"])
    assert [run.ranks for run in checkpoint.history] == [4]
    assert (
        "step 7, 11 tensors" in repr(checkpoint) and repr(checkpoint.model["int"]) == "<model/int: int32 [6]>"
    )
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(HpctrainError, match="is closed, so model/matrix cannot be read"):
        checkpoint.model["matrix"][0]


def test_of_a_run_the_newest_complete_one_is_opened(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(InputOutputError, match="run: contains no complete checkpoint"):
        hpctrain.open_checkpoint(tmp_path / "run")
    (folder / "step-00000007.h5").write_bytes(path.read_bytes())
    (folder / "step-00000009.h5").write_bytes(path.read_bytes()[:5000])
    assert hpctrain.open_checkpoint(str(tmp_path / "run")).path.name == "step-00000007.h5"


def test_what_is_no_checkpoint_is_told(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("no checkpoint, but some text")
    for name, told in (("away", "no such checkpoint or run folder"), ("text", "not an HDF5 file")):
        with pytest.raises(HpctrainError, match=told):
            hpctrain.open_checkpoint(tmp_path / name)
    with pytest.raises(
        HpctrainError, match="path: must be the path of a checkpoint or a run's folder, not a dict"
    ):
        hpctrain.open_checkpoint({})  # type: ignore[arg-type]
    with pytest.raises(HpctrainError, match="contains no deck"):
        _ = hpctrain.open_checkpoint(path).deck
    monkeypatch.setattr(lazy, "_SMALL_BYTES", 0)
    monkeypatch.setattr(lazy, "obtainable_bytes", lambda _: 1000)
    with pytest.raises(HpctrainError, match="but 1 kB of memory are free; read a slice"):
        hpctrain.open_checkpoint(path).model["matrix"].torch()


def test_one_that_is_replaced_while_it_is_opened_is_not_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else checksums of one file would be compared with the tensors of another."""
    target, new = tmp_path / "a.h5", tmp_path / "new.h5"
    for each in (target, new):
        each.write_bytes(path.read_bytes())
    examine = lazy.examine

    def replaced(opened: Path) -> object:
        structure = examine(opened)
        new.replace(target)
        return structure

    monkeypatch.setattr(lazy, "examine", replaced)
    with pytest.raises(InputOutputError, match=r"a\.h5: was replaced while it was opened; open it again"):
        hpctrain.open_checkpoint(target)
