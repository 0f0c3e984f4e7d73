"""Saving while training goes on: the file of the moment it began, whatever happens to the values.

Tests of checkpoint/copy_on_write.py beside checkpoint/background.py.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.background import BackgroundSave
from hpctrain.checkpoint.checkpoint_index import StoredTensor
from hpctrain.checkpoint.copy_on_write import DraftSnapshot, HostBuffer
from hpctrain.checkpoint.create import temporary_name
from hpctrain.checkpoint.draft import Draft, DraftBox
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorBox
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from tests.checkpoint.conftest import LAYOUTS, Tensors, entry
from tests.checkpoint.test_save import contents
from tests.device_double import LateStream, on_gpu

CPU = torch.device("cpu")

STATE = {"step": 3, "deck": "[run]\n"}


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer", [200_000, 64 << 20])
def test_same_file_as_collective_although_values_change(
    layout: str, buffer: int, world: World, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    """A buffer that is too small for all, and one that is not."""
    group = world.everyone
    held = LAYOUTS[layout](tensors, group.rank, group.size)
    held = [replace(each, changes_in_step=crc32(each.dataset.encode()) % 2 == 0) for each in held]
    save(mpi_tmp_path / "a.h5", group, held, STATE)
    pending = BackgroundSave(mpi_tmp_path / "b.h5", group, held, STATE, HostBuffer(buffer, CPU))
    pending.protect(update=False)
    for each in held:
        if each.changes_in_step:
            each.values.zero_()
    pending.protect()
    for each in held:
        each.values.zero_()
    while not pending.poll():
        pass
    assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")
    verify(mpi_tmp_path / "b.h5", group)
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["a.h5", "b.h5"]


def pieces(values: Tensor, count: int) -> list[DraftBox]:
    """Equal pieces of a flat tensor."""
    held = entry("a", values)
    size = len(values) // count
    stored = StoredTensor("/model/a", "float32", (len(values),), 0, 0)
    return [DraftBox(held, TensorBox((n * size,), (size,), n * size, (1,)), stored) for n in range(count)]


def test_the_update_waits_only_for_what_the_buffer_cannot_hold() -> None:
    values = torch.arange(6 * 1024, dtype=torch.float32)
    expected = values.clone()
    parts = pieces(values, 6)
    snapshot = DraftSnapshot(parts, HostBuffer(3 * 4096, CPU))
    values = parts[0].entry.values
    assert isinstance(values, Tensor)
    found = [snapshot.take(0)]  # being written from where it is; 1, 2 and 3 fit into the buffer
    protected = threading.Event()

    def update() -> None:
        snapshot.protect()
        protected.set()
        values.zero_()

    thread = threading.Thread(target=update)
    thread.start()
    assert not protected.wait(0.2)
    found = [found[0].copy(), snapshot.take(1)]  # in the buffer until it is written
    assert not protected.wait(0.2)
    found = [found[0], found[1].copy(), snapshot.take(2)]  # 4 takes the place of 1, 5 must wait
    assert not protected.wait(0.2)
    found = [*found[:2], found[2].copy(), snapshot.take(3)]  # 5 takes the place of 2
    assert protected.wait(5)
    thread.join()
    found += [snapshot.take(number).copy() for number in (4, 5)]
    snapshot.close()
    assert np.array_equal(np.concatenate(found).view(np.float32), expected.numpy())


def test_a_step_waits_only_for_what_it_changes() -> None:
    """The writer is at the second of four pieces, of which a step changes three."""
    parts = pieces(torch.arange(4 * 1024, dtype=torch.float32), 4)
    parts[:3] = [replace(part, entry=replace(part.entry, changes_in_step=True)) for part in parts[:3]]
    snapshot = DraftSnapshot(parts, HostBuffer(3 * 4096, CPU))
    snapshot.take(0)
    values = snapshot.take(1)
    protected = threading.Event()

    def step() -> None:
        snapshot.protect(update=False)
        protected.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not protected.wait(0.2)
    assert np.array_equal(values.view(np.float32), np.arange(1024, 2048))
    third = snapshot.take(2)
    assert protected.wait(5)
    thread.join()
    memory = parts[0].entry.values
    assert isinstance(memory, Tensor)
    memory[: 3 * 1024] = 0
    assert np.array_equal(third.view(np.float32), np.arange(2048, 3072))
    snapshot.take(3)
    snapshot.protect(update=False)  # at once: what is being written is not changed by a step
    snapshot.close()


def test_what_a_gpu_holds_is_copied_beside_the_step() -> None:
    """Every copy is late: the writer and the update have to wait for it, and the step does not.

    The buffer has room for three of six pieces, of which the third is in the host's memory.
    """
    expected = torch.arange(6 * 1024, dtype=torch.float32)
    memory = expected.clone()
    parts = pieces(memory, 6)
    held = parts[0].entry.values
    assert isinstance(held, Tensor)
    on_device = replace(parts[0].entry, values=on_gpu(held))
    parts = [part if number == 2 else replace(part, entry=on_device) for number, part in enumerate(parts)]
    buffer, stream = HostBuffer(3 * 4096, CPU), LateStream()
    buffer.stream = stream  # type: ignore[assignment]
    snapshot = DraftSnapshot(parts, buffer)
    found = [snapshot.take(0).copy()]
    assert stream.events == ["start ", "start ", "wait "], "the second piece comes while the first is written"
    protected = threading.Event()

    def update() -> None:
        snapshot.protect()
        protected.set()
        held.zero_()

    thread = threading.Thread(target=update)
    thread.start()
    found += [snapshot.take(number).copy() for number in range(1, 6)]
    assert protected.wait(5)
    thread.join()
    snapshot.close()
    assert np.array_equal(np.concatenate(found).view(np.float32), expected.numpy())
    assert len(stream.started) == 5 and all(work.is_complete for work in stream.started)


def test_an_update_waits_on_the_gpu_for_copies_of_which_none_is_written() -> None:
    memory = torch.arange(2 * 1024, dtype=torch.float32)
    parts = pieces(memory, 2)
    held = parts[0].entry.values
    assert isinstance(held, Tensor)
    parts = [replace(part, entry=replace(part.entry, values=on_gpu(held))) for part in parts]
    buffer, stream = HostBuffer(4 * 4096, CPU), LateStream()
    buffer.stream = stream  # type: ignore[assignment]
    snapshot = DraftSnapshot(parts, buffer)
    snapshot.protect()
    held.zero_()
    found = np.concatenate([snapshot.take(0).copy(), snapshot.take(1).copy()])
    assert np.array_equal(found.view(np.float32), memory.numpy())
    assert stream.events == ["start ", "start ", "wait "]


def test_a_failed_writer_leaves_the_buffer_to_the_next_one() -> None:
    parts, buffer = pieces(torch.ones(2048), 2), HostBuffer(2 * 4096, CPU)
    failed = DraftSnapshot(parts, buffer)
    failed.protect()
    failed.close()
    snapshot = DraftSnapshot(parts, buffer)
    assert buffer.take(4096) is not None and buffer.take(4096) is not None
    snapshot.close()


def test_a_failed_writer_holds_nobody_up() -> None:
    parts = pieces(torch.ones(4096), 4)
    snapshot = DraftSnapshot(parts, HostBuffer(2 * 4096, CPU))
    snapshot.take(0)
    snapshot.close()
    snapshot.protect()


def test_the_buffer_is_a_ring() -> None:
    buffer = HostBuffer(1024, CPU)
    assert buffer.take(1025) is None
    first, second = buffer.take(500), buffer.take(448)  # 512 and 448 bytes
    assert first is not None and second is not None
    assert len(first) == 500
    assert buffer.take(128) is None
    buffer.release_oldest()
    third = buffer.take(512)
    assert third is not None
    assert third.ctypes.data == first.ctypes.data
    assert buffer.take(1) is None  # 64 bytes are free, but at the end, behind what is taken around it
    buffer.release_oldest()
    assert buffer.take(448) is not None


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("stage", ["store", "sync_and_verify", "publish"])
def test_errors_are_agreed_and_leave_nothing(
    stage: str, world: World, mpi_tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's disk fails: all ranks raise the same, and training could go on to the last checkpoint."""
    group = world.everyone
    held = LAYOUTS["flat"](tensors, group.rank, group.size)
    save(mpi_tmp_path / "a.h5", group, held, STATE)
    original = getattr(Draft, stage)
    failing = 0 if stage == "publish" else group.size - 1

    def refusing(draft: Draft, *arguments: Any) -> None:
        original(draft, *arguments)
        if group.rank == failing:
            raise OSError(5, os.strerror(5), str(draft.temporary))

    def silent(draft: Draft, total: Any) -> None:
        if group.rank == failing:
            raise OSError(5, os.strerror(5), str(draft.temporary))

    monkeypatch.setattr(Draft, stage, silent if stage == "publish" else refusing)
    pending = BackgroundSave(mpi_tmp_path / "b.h5", group, held, STATE, HostBuffer(1 << 20, CPU))
    pending.protect()
    with pytest.raises(InputOutputError, match=r"/b\.h5: Input/output error") as error:
        pending.poll(wait=True)
    assert len(set(group.all_gather_object(str(error.value)))) == 1
    group.barrier()
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["a.h5"]
    assert not temporary_name(mpi_tmp_path / "b.h5").exists()
