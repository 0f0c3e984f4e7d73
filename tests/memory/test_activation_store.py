"""Saved activations in files, and in fewer bits: training is the same, and memory is freed meanwhile.

Tests of memory/offload_store.py, memory/activation_store.py and engine/choices/activation_policy.py.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import InputOutputError
from hpctrain.memory.activation_store import (
    SEGMENTS_IN_FLIGHT,
    ActivationStore,
    SavedSegment,
    StoredActivation,
)
from hpctrain.memory.offload_store import DeviceCopies, DiskOffloadStore
from hpctrain.memory.recompute import Recompute
from hpctrain.memory.scratch import ScratchFiles
from tests.device_double import LateStream
from tests.engines import LLAMA, Trainer, small_deck, trainer

STEPS = 2
SIZES = ("model.layers=5", "batch.global_size=8", "model.dropout=0.1")
CPU = torch.device("cpu")


@pytest.fixture
def disk(mpi_tmp_path: Path, world: World) -> Iterator[DiskOffloadStore]:
    """Return a store that is too small at first, so that it must grow."""
    scratch = ScratchFiles(mpi_tmp_path / "offload", world.rank)
    yield DiskOffloadStore(scratch, 100_000, CPU)
    scratch.close()


def layouts(ranks: int) -> list[tuple[str, ...]]:
    return {
        1: [()],
        2: [
            ("layout.zero=3",),
            ("layout.tensor=2", "layout.sequence_parallel=true"),
            ("layout.pipeline=2", "layout.schedule=zb-h1"),
        ],
        4: [
            ("layout.context=2", "layout.zero=3"),
            ("layout.tensor=2", "layout.sequence_parallel=true", "layout.zero=3"),
            ("layout.pipeline=2", "layout.schedule=zb-v", "layout.chunks=2", "layout.zero=3"),
        ],
    }.get(ranks, [("layout.zero=3",)])


def storing(world: World, deck: Deck, store: ActivationStore | None) -> Trainer:
    if store is None:
        return trainer(world, deck)
    training = trainer(world, deck.with_keys(memory={"activations": "disk"}))
    keeping = training.engine.stage.layer_context.saved_policy
    assert isinstance(keeping, Recompute)
    keeping.store = store
    return training


def in_file(store_on_disk: DiskOffloadStore) -> ActivationStore:
    store = ActivationStore(smallest=16)
    store.offload_store = store_on_disk
    return store


def test_pinned_memory_is_not_read_into_before_its_copy_is_complete(tmp_path: Path) -> None:
    scratch = ScratchFiles(tmp_path / "offload", 0)
    store, stream = DiskOffloadStore(scratch, 100_000, CPU), LateStream()
    store.copies = DeviceCopies(CPU)
    store.copies.stream = stream  # type: ignore[assignment]
    values = [torch.full((1000,), number, dtype=torch.uint8) for number in (1, 2, 3)]
    handles = [store.put(each) for each in values]
    for handle in handles:
        handle.finish_offload()
    fetched = [handle.fetch() for handle in handles]
    stream.precede()
    for found, expected in zip(fetched, values, strict=True):
        assert torch.equal(found, expected)
    scratch.close()


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "2"])
def test_offloading_to_a_file_changes_no_bit(
    world: World, disk: DiskOffloadStore, model: str, recompute: str
) -> None:
    if world.size > 1 and (model == "gpt2") != (recompute in {"none", "selective"}):
        pytest.skip("one rank has tried every pair")
    for layout in layouts(world.size):
        sizes = (*SIZES, *layout, f"memory.recompute={recompute}", *(LLAMA if model == "llama" else ()))
        kept = storing(world, small_deck(*sizes), None)
        losses = [step.loss for step in kept.train(STEPS)]
        waiting = storing(world, small_deck(*sizes), in_file(disk))
        assert [step.loss for step in waiting.train(STEPS)] == losses, layout
        parameters = kept.parameters()
        for name, values in waiting.parameters().items():
            assert torch.equal(values, parameters[name]), (layout, name)
    assert not living()


def living() -> list[StoredActivation]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is StoredActivation]


def one_loss(training: Trainer) -> torch.Tensor:
    micro = training.deck.batch.micro_size
    batch = training.step.prepare(
        next(training.step.batches.step(0, micro, 0, 1, micro)),
        torch.ones(()),
        training.step.dropout_source(training.state, 0),
    )
    training.engine.stage.synchronizer.start(1)
    model = training.engine.model
    return model.predict(model(batch.inputs), batch.losses).total


@pytest.mark.mpi(max_size=1)
def test_only_the_last_segments_stay_in_memory(world: World, disk: DiskOffloadStore) -> None:
    training = storing(world.single_rank_world(), small_deck(*SIZES, "model.layers=8"), in_file(disk))
    loss = one_loss(training)
    held = living()
    of_segment = {id(stored.segment): 0 for stored in held}
    for stored in held:
        of_segment[id(stored.segment)] += stored.length * stored.dtype.itemsize
    assert len(of_segment) == 8 and len(set(of_segment.values())) == 1
    in_memory = sum(stored.values.nbytes for stored in held if stored.values is not None)
    assert in_memory == SEGMENTS_IN_FLIGHT * next(iter(of_segment.values()))
    regions = disk.bytes
    del held, stored
    loss.backward()
    assert not living()
    one_loss(training).backward()
    assert disk.bytes == regions, "places are used again"


@pytest.mark.mpi(max_size=1)
def test_a_truncated_file_raises_an_error_in_backward(world: World, disk: DiskOffloadStore) -> None:
    training = storing(world.single_rank_world(), small_deck(*SIZES), in_file(disk))
    loss = one_loss(training)
    for file in disk.scratch.folder.iterdir():
        os.truncate(file, 100)
    with pytest.raises(InputOutputError, match=r"activations-\d+: .* was truncated"):
        loss.backward()


@pytest.mark.sampled(2)
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compressed_activations_change_losses_slightly(
    world: World, disk: DiskOffloadStore, form: str, recompute: str
) -> None:
    deck = small_deck(*SIZES, f"memory.recompute={recompute}", "batch.global_size=16")
    exact = [step.loss for step in storing(world, deck, None).train(4)]
    in_memory = [step.loss for step in storing(world, deck, ActivationStore(form, 16)).train(4)]
    assert in_memory[0] == exact[0]  # forward is exact
    assert in_memory[1:] != exact[1:]
    assert in_memory == pytest.approx(exact, abs=1e-3 if form == "bf16" else 1e-2)
    store = ActivationStore(form, 16)
    store.offload_store = disk
    assert [step.loss for step in storing(world, deck, store).train(4)] == in_memory


def test_only_activations_are_compressed() -> None:
    rows, micro, hidden, heads = 32, 2, 16, 4
    segment = SavedSegment(torch.zeros(rows, micro, hidden), [], None)
    compressed = [(rows, micro, hidden), (2 * rows, micro, 5), (micro, heads, rows, 4)]
    exact = [(rows, micro, 1), (micro, heads, rows), (micro, heads, rows, 1), (rows,), (heads, 3)]
    for shape in (*compressed, *exact):
        view = segment.pack(torch.zeros(shape), "int8", 0)
        assert not isinstance(view, torch.Tensor)
        assert view.stored.form == ("int8" if shape in compressed else "exact"), shape
    for dtype in (torch.bool, torch.int64):
        view = segment.pack(torch.zeros(rows, micro, hidden, dtype=dtype), "int8", 0)
        assert not isinstance(view, torch.Tensor) and view.stored.form == "exact"


def test_a_storage_is_offloaded_once_and_small_or_shared_ones_stay_in_memory() -> None:
    shared, x = torch.randn(8, 4), torch.randn(8, 2, 64)
    segment = SavedSegment(x, [shared], None)
    first, second = (segment.pack(view, "exact", 1024) for view in (x[:, :, :32], x.transpose(0, 1)))
    assert not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor)
    assert first.stored is second.stored
    assert torch.equal(first.unpack(), x[:, :, :32]) and torch.equal(second.unpack(), x.transpose(0, 1))
    small = torch.randn(3)
    assert segment.pack(shared, "exact", 0) is shared
    assert segment.pack(small, "exact", 1024) is small


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_deck_offloads_activations_to_its_folder(world: World, mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path / "offload"
    model = ("model.hidden=128", "batch.sequence=128", "model.layers=4")
    kept = trainer(world, small_deck(*model, "memory.recompute=2"))
    losses = [step.loss for step in kept.train(STEPS)]
    deck = small_deck(*model, "memory.recompute=2", "memory.activations=disk", f"memory.offload_dir={folder}")
    waiting = trainer(world, deck)
    assert [step.loss for step in waiting.train(STEPS)] == losses
    files = [file for own in folder.iterdir() if own.is_dir() for file in own.iterdir()]
    world.everyone.barrier()
    assert len(files) == world.size
    assert {file.stat().st_size for file in files} == {2 * 4 * 128 * 2 * 128}, "two segments' inputs"
    assert all(file.read_bytes().strip(b"\0") for file in files)
    world.everyone.barrier()
    waiting.engine.close()
    world.everyone.barrier()
    assert not folder.exists() or not list(folder.iterdir())
