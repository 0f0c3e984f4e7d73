"""Optimizer state and parameters in files: the same bits, less memory, and reported faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.costs.update_bytes import update_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.offload_allocators import host_allocator
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.engine.stages.stage import Stage
from hpctrain.errors import EXIT_INPUT_OUTPUT, EXIT_USER, HpctrainError, InputOutputError
from hpctrain.memory.scratch import Flat, ScratchTensor
from hpctrain.optim.offload import PIECE_BUFFERS, CopyStreams, OffloadedOptimizer, piece_elements
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.sharding.state import MASTER
from tests.device_double import LateStream
from tests.engines import LLAMA, Trainer, small_deck, trainer

STEPS = 3
SMALL_BUFFER = "memory.offload_buffer=12000"


def layouts(ranks: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(), ("layout.zero=1",)]
    if ranks >= 2:
        found += [("layout.zero=3",)]
    if ranks >= 4:
        found += [
            ("layout.zero=3", "layout.tensor=2", "layout.sequence_parallel=true"),
            ("layout.zero=2", "layout.pipeline=2", "layout.schedule=zb-h1"),
            ("layout.zero=3", "layout.zero_group=2"),
        ]
    return found


def contents(flat: Flat) -> Tensor:
    return flat if isinstance(flat, Tensor) else flat.load()


def assert_same_state(one: Trainer, other: Trainer) -> None:
    expected = one.parameters()
    for name, values in other.parameters().items():
        assert torch.equal(values, expected[name]), name
    for mine, theirs in zip(
        other.engine.stage.optimizer.states, one.engine.stage.optimizer.states, strict=True
    ):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(contents(mine[kind]), contents(theirs[kind])), kind


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_files_change_nothing(
    world: World, mpi_tmp_path: Path, compute: str, family: tuple[str, ...]
) -> None:
    if world.size > 1 and (family == ()) != (compute == "bf16"):
        pytest.skip("one rank has tried every pair")
    for number, layout in enumerate(layouts(world.size)):
        deck = (*family, *layout, f"precision.compute={compute}", "optimizer.clip=0.5")
        plain = trainer(world, small_deck(*deck))
        losses = [step.loss for step in plain.train(STEPS)]
        places = [("memory.optimizer=disk",)]
        if "layout.zero=3" in layout:
            places.append((*places[0], "memory.parameters=disk"))
        for place in places:
            folder = mpi_tmp_path / f"{number}-{len(place)}"
            files = trainer(world, small_deck(*deck, *place, SMALL_BUFFER, f"memory.offload_dir={folder}"))
            assert isinstance(files.engine.stage.optimizer, OffloadedOptimizer)
            assert len(files.engine.stage.optimizer._pieces) > 2 * len(files.engine.stage.buckets)
            assert [step.loss for step in files.train(STEPS)] == losses, (layout, place)
            assert_same_state(plain, files)
            files.engine.close()
            world.everyone.barrier()
            assert not folder.exists()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_state_and_parameters_are_in_files(world: World, mpi_tmp_path: Path) -> None:
    """State, and parameters if requested, are in files."""
    deck = small_deck(
        "layout.zero=3",
        "precision.compute=bf16",
        "memory.optimizer=disk",
        "memory.parameters=disk",
        f"memory.offload_dir={mpi_tmp_path / 'offload'}",
    )
    engine = trainer(world, deck).engine
    for bucket, moments in zip(engine.stage.buckets, engine.stage.optimizer.states, strict=True):
        assert bucket.values is None
        for flat in (bucket.owned_values, *moments.values()):
            assert isinstance(flat, ScratchTensor)
            assert flat.numel() == bucket.length // world.size
    (scratch,) = engine.scratch
    on_disk = sum(path.stat().st_size for path in scratch.folder.iterdir())
    assert on_disk == sum(bucket.length for bucket in engine.stage.buckets) // world.size * (12 + 2)
    engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_checkpoints_of_files_and_of_memory_are_the_same(
    world: World, mpi_tmp_path: Path, compute: str
) -> None:
    """Save from files and load into memory, and the other way round, with padded tables."""
    layout: tuple[str, ...] = () if world.size == 1 else ("layout.tensor=2",)
    layout = layout if world.size < 4 else (*layout, "layout.zero=3")
    deck = (*layout, f"precision.compute={compute}")
    disk = ("memory.optimizer=disk", SMALL_BUFFER)
    disk += ("memory.parameters=disk",) if "layout.zero=3" in layout else ()
    for number, (before, after) in enumerate([(disk, ()), ((), disk)]):
        path = mpi_tmp_path / f"{number}.h5"
        one, other = (
            trainer(world, small_deck(*deck, *place, f"memory.offload_dir={mpi_tmp_path / str(n)}"))
            for n, place in enumerate((before, after))
        )
        one.train(3)
        save(path, world.everyone, entries(one, writing=True), {}, piece_bytes=10_000)
        load(path, world.everyone, entries(other), buffer_bytes=10_000)
        other.engine.stage.optimizer.copy_to_parameters()
        other.engine.stage.optimizer.updates = one.engine.stage.optimizer.updates
        other.state = one.state
        assert_same_state(one, other)
        one.state, copied = type(one.state)(**vars(one.state)), one.state
        other.state = copied
        one.train(2)
        other.train(2)
        assert_same_state(one, other)
        one.engine.close()
        other.engine.close()


def entries(training: Trainer, writing: bool = False) -> list:
    engine = training.engine
    return training_entries(engine.state(), writing)


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_state_in_host_memory_gives_the_same_bits(world: World, compute: str) -> None:
    one = trainer(world, small_deck(f"precision.compute={compute}"))
    other = trainer(world, small_deck(f"precision.compute={compute}"))
    plain = one.engine.stage.optimizer
    assert isinstance(plain, ResidentOptimizer)
    hosted = OffloadedOptimizer(plain.rule, other.engine.stage.buckets, host_allocator, 40_000)
    for moments, bucket, start in zip(hosted.states, other.engine.stage.buckets, plain.states, strict=True):
        if moments[MASTER] is not bucket.owned_values:
            contents(moments[MASTER]).copy_(start[MASTER])
    other.engine.stage.optimizer = hosted
    assert [step.loss for step in one.train(5)] == [step.loss for step in other.train(5)]
    assert_same_state(one, other)


def planned(deck: Deck, training: Trainer) -> Stage:
    """Return the stage without memory."""
    engine = training.engine
    mesh = PlannedMesh(engine.mesh.sizes, 0, 1)
    split, device = engine.placement.split, torch.device("cpu")
    return plan_stage(deck, engine.shape, mesh, PipelinePosition(engine.schedule, split, 0), device)


def test_pieces_fit_into_the_buffer_and_begin_where_vector_instructions_do() -> None:
    elements = piece_elements(14, 1_000_000)
    assert elements % 64 == 0
    assert 1_000_000 - PIECE_BUFFERS * 64 * 14 < PIECE_BUFFERS * elements * 14 <= 1_000_000


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("fault", ["removed", "truncated"])
def test_all_ranks_raise_the_error_of_one_rank(world: World, mpi_tmp_path: Path, fault: str) -> None:
    deck = small_deck("memory.optimizer=disk", f"memory.offload_dir={mpi_tmp_path / 'offload'}", SMALL_BUFFER)
    training = trainer(world, deck)
    training.train(2)
    (scratch,) = training.engine.scratch
    if world.rank == world.size - 1:
        file = sorted(scratch.folder.iterdir())[-1]
        file.unlink() if fault == "removed" else os.truncate(file, 100)
    with pytest.raises(InputOutputError, match=rf"optimizer-\d+: .* {fault}") as caught:
        training.train(1)
    assert caught.value.exit_code == EXIT_INPUT_OUTPUT
    assert len(caught.value.problems) == 1
    assert world.is_agreed(caught.value)
    training.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_impossible_decks_are_refused_at_the_start(world: World, mpi_tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"memory.optimizer=host: requires GPUs") as caught:
        trainer(world, small_deck("memory.optimizer=host"))
    assert caught.value.exit_code == EXIT_USER
    if world.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    world.everyone.barrier()
    deck = small_deck("memory.optimizer=disk", f"memory.offload_dir={mpi_tmp_path / 'file' / 'x'}")
    with pytest.raises(HpctrainError, match="cannot be written to") as caught:
        trainer(world, deck)
    assert caught.value.exit_code == EXIT_USER
    assert len(caught.value.problems) == 1


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("buffer", [SMALL_BUFFER, "memory.offload_buffer=100 MB"], ids=["small", "ample"])
def test_memory_of_pieces_is_planned(world: World, mpi_tmp_path: Path, buffer: str, compute: str) -> None:
    for place in ((), ("layout.zero=3", "memory.parameters=disk"))[: min(2, world.size)]:
        deck = small_deck(
            "memory.optimizer=disk",
            f"precision.compute={compute}",
            f"memory.offload_dir={mpi_tmp_path / 'offload'}",
            buffer,
            *place,
        )
        training = trainer(world, deck)
        training.train(1)
        optimizer = training.engine.stage.optimizer
        assert isinstance(optimizer, OffloadedOptimizer)
        held = update_bytes(optimizer)
        if world.rank == 0:  # as which a plan is made; the pieces of others end elsewhere
            assert held == update_bytes(planned(deck, training).optimizer)
        assert held <= deck.memory.offload_buffer
        training.engine.close()


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("gradients", ["fp32", "compute"])
def test_pieces_of_a_gpu_are_copied_while_others_are_updated(world: World, gradients: str) -> None:
    """Copies are delayed as long as possible. A missing wait would change bits."""
    deck = small_deck("precision.compute=bf16", f"precision.gradients={gradients}", "optimizer.clip=0.5")
    one, other = trainer(world, deck), trainer(world, deck)
    plain, buckets = one.engine.stage.optimizer, other.engine.stage.buckets
    assert isinstance(plain, ResidentOptimizer)
    events: list[str] = []
    to_host, to_device = LateStream("gradients", events), LateStream("parameters", events)
    streams = CopyStreams(to_host, to_device)  # type: ignore[arg-type]
    offloaded = OffloadedOptimizer(
        plain.rule, buckets, host_allocator, 40_000, location="gpu", streams=streams
    )
    for state, start in zip(offloaded.states, plain.states, strict=True):
        contents(state[MASTER]).copy_(start[MASTER])
    other.engine.stage.optimizer = offloaded
    assert [step.loss for step in one.train(3)] == [step.loss for step in other.train(3)]
    assert_same_state(one, other)
    pieces = len(offloaded._pieces)
    assert pieces > 2 * PIECE_BUFFERS and len(to_host.started) == len(to_device.started) == 3 * pieces
    last = len(events) - 1 - events[::-1].index("start gradients")
    assert events[last + 1] == "wait gradients", (
        "the last piece's gradients come while the one before is updated"
    )
    assert events[:3] == ["start gradients", "start gradients", "wait gradients"]
    assert update_bytes(offloaded) <= 40_000
