"""Saving: the same file from every layout, whole or not there, whatever fails.

Tests of checkpoint/create.py and checkpoint/draft.py beside checkpoint/save.py.
"""

from __future__ import annotations

import json
import resource
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.create import create, temporary_name
from hpctrain.checkpoint.draft import Draft, saving_bytes
from hpctrain.checkpoint.load import load, read_state
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from tests.checkpoint.conftest import LAYOUTS, Tensors, entry, whole

CALL_BYTES = 100_000
STATE: dict[str, Any] = {"step": 7, "samples": 56, "loss_scale": 2.0, "deck": '[run]\ntitle = "träge"\n'}


def contents(path: Path) -> dict[str, bytes]:
    """Every dataset's bytes, as another program sees them."""
    found = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item[()]).tobytes() + str(dict(item.attrs)).encode()

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


class NoMpi:
    """What h5py.get_config() tells where it was built without MPI."""

    mpi = False


def same_on_all(world: World, text: str) -> bool:
    return len(set(world.everyone.all_gather_object(text))) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_file_holds_whole_tensors_whatever_the_layout(
    layout: str, world: World, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    group = world.everyone
    save(mpi_tmp_path / "a.h5", group, LAYOUTS[layout](tensors, group.rank, group.size), STATE, CALL_BYTES)
    save(mpi_tmp_path / "b.h5", group, whole(tensors, group.rank, group.size), STATE, 4096 + 1024 * 1024)
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["a.h5", "b.h5"]
    assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")
    with h5py.File(mpi_tmp_path / "a.h5", "r") as file:
        for name, tensor in tensors.items():
            dataset = file[f"/model/{name}"]
            marked = {torch.bfloat16: b"bfloat16", torch.bool: b"bool"}.get(tensor.dtype)
            assert dataset.attrs.get("dtype") == marked
            bits = tensor.reshape(tensor.shape or (1,))
            expected = bits.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else bits.numpy()
            assert np.array_equal(dataset[()], expected)
        assert json.loads(file["state"][()]) == {"step": 7, "samples": 56, "loss_scale": 2.0}
        assert file["deck"][()].decode() == STATE["deck"]
        assert file.attrs["format"] == b"hpctrain checkpoint"
        assert file.attrs["version"] == 1


def test_one_rank_needs_no_parallel_hdf5(
    world: World, tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h5py, "get_config", NoMpi)
    group = world.single_rank_world().everyone
    save(tmp_path / "a.h5", group, whole(tensors, 0, 1), STATE)
    state = read_state(tmp_path / "a.h5")
    assert state.pop("versions").keys() >= {"hpctrain", "torch", "h5py", "hdf5"}
    assert state == STATE


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_h5py_without_mpi_gives_the_same_file(
    layout: str, world: World, mpi_tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = world.everyone
    held = LAYOUTS[layout](tensors, group.rank, group.size)
    save(mpi_tmp_path / "a.h5", group, held, STATE, CALL_BYTES)
    monkeypatch.setattr(h5py, "get_config", NoMpi)
    save(mpi_tmp_path / "b.h5", group, held, STATE, CALL_BYTES)
    assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")


@pytest.mark.mpi
def test_missing_and_doubled_elements_are_refused(world: World, mpi_tmp_path: Path) -> None:
    group = world.everyone
    held = entry("a", torch.arange(10.0))
    for lacking in (held.part(0, 9) if group.rank == 0 else held.part(0, 0), held):
        if lacking is held and group.size == 1:
            continue
        with pytest.raises(RuntimeError, match="/model/a: the ranks have"):
            save(mpi_tmp_path / "a.h5", group, [lacking], {})
        assert not (mpi_tmp_path / "a.h5").exists()
        group.barrier()


@contextmanager
def small_disk(world: World, folder: Path, size: str) -> Iterator[Path]:
    """A folder on a file system of that size, for all ranks; skips where mounting is not allowed."""
    mounted = False
    place = folder / "disk"
    if world.rank == 0:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not world.everyone.broadcast_object(mounted):
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield place
    finally:
        world.everyone.barrier()
        if world.rank == 0:
            subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_full_disk_leaves_what_was_there(world: World, mpi_tmp_path: Path, tensors: Tensors) -> None:
    group = world.everyone
    held = whole(tensors, group.rank, group.size)
    with small_disk(world, mpi_tmp_path, "8m") as disk:
        save(disk / "step-00000001.h5", group, held, STATE)
        for name in ("step-00000001.h5", "step-00000002.h5"):
            with pytest.raises(
                InputOutputError, match=f"{name}: cannot write a checkpoint of .* No space left"
            ) as error:
                save(disk / name, group, held, STATE)
            assert len(error.value.problems) == 1
            assert same_on_all(world, str(error.value))
        group.barrier()
        assert [path.name for path in disk.iterdir()] == ["step-00000001.h5"]
        verify(disk / "step-00000001.h5", group)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("layout", ["columns", "flat"])
@pytest.mark.parametrize("who", ["all", "last"])
def test_write_errors_halfway_are_agreed(
    layout: str,
    who: str,
    world: World,
    mpi_tmp_path: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system refuses writes beyond a limit, set once the file is laid out."""
    group = world.everyone
    held = LAYOUTS[layout](tensors, group.rank, group.size)
    save(mpi_tmp_path / "a.h5", group, held, STATE, CALL_BYTES)
    original = Draft.store
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments: Any) -> Any:
        if who == "all" or group.rank == group.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            return original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(Draft, "store", limited)
    try:
        save(mpi_tmp_path / "a.h5", group, held, STATE | {"step": 8}, CALL_BYTES)
        failed = ""
    except InputOutputError as error:
        failed = str(error)
    assert same_on_all(world, failed)
    assert "a.h5: cannot write /model/" in failed
    group.barrier()
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["a.h5"]
    verify(mpi_tmp_path / "a.h5", group)
    assert read_state(mpi_tmp_path / "a.h5", group)["step"] == 7


@pytest.mark.mpi(min_size=1, max_size=2)
def test_damage_before_the_rename_is_noticed(
    world: World,
    mpi_tmp_path: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    flip: Callable[[Path, int], None],
) -> None:
    """A byte that the disk stores wrongly: the file never gets its name."""
    group = world.everyone
    held = whole(tensors, group.rank, group.size)
    original = Draft.sync_and_verify

    def spoiled(draft: Draft) -> None:
        if group.rank == 0:
            with h5py.File(draft.temporary, "r") as file:
                offset = file["/model/matrix"].id.get_offset()
            flip(draft.temporary, offset + 11)
        group.barrier()
        original(draft)

    monkeypatch.setattr(Draft, "sync_and_verify", spoiled)
    with pytest.raises(InputOutputError, match=r"a.h5: /model/matrix is damaged") as error:
        save(mpi_tmp_path / "a.h5", group, held, STATE)
    assert "tmp" not in error.value.problems[0].rpartition("/a.h5")[2]
    group.barrier()
    assert not list(mpi_tmp_path.iterdir())


def test_an_unwritable_folder_is_said(world: World, tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        InputOutputError, match=r"file/a.h5: cannot write a checkpoint of .* MB: (Not a dir|File exists)"
    ):
        save(tmp_path / "file" / "a.h5", world.single_rank_world().everyone, whole(tensors, 0, 1), STATE)


def test_leftovers_of_crashed_saves_are_removed(world: World, tmp_path: Path) -> None:
    group = world.single_rank_world().everyone
    temporary_name(tmp_path / "step-00000003.h5").write_bytes(b"half")
    (tmp_path / "other.txt").write_text("mine")
    save(tmp_path / "step-00000004.h5", group, [entry("a", torch.ones(3))], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", "step-00000004.h5"]


def test_no_tensors_and_no_state(world: World, tmp_path: Path) -> None:
    group = world.single_rank_world().everyone
    save(tmp_path / "a.h5", group, [], {})
    assert load(tmp_path / "a.h5", group, []).keys() == {"versions"}


@pytest.mark.mpi(min_size=1, max_size=1)
def test_saving_needs_the_planned_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"large": torch.arange(3 << 19, dtype=torch.float32), "small": torch.ones(3)}
    tracemalloc.start()
    monkeypatch.setattr(checksum, "_keys", checksum._Keys())
    monkeypatch.setattr(checksum, "_memory", checksum._ThreadBuffers())
    save(tmp_path / "a.h5", world.everyone, whole(tensors, 0, 1), STATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = saving_bytes(3 << 19, 4)
    assert planned == (4 << 20) + 8 * (1 << 20) + 8 * (1 << 18)
    assert planned < peak < planned + (2 << 20)


def test_headers_take_little_memory(tmp_path: Path) -> None:
    """The headers of 200 datasets of 200 kB are a few kB each, far apart in the file."""
    tracemalloc.start()
    create(tmp_path / "a.h5", {f"/model/{number}": ("float32", (50_000,)) for number in range(200)}, STATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 20_000
