"""The step of a run: what watches it changes no bit of it, and no layout mistakes one weight for another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.comm.hangs.watchdog import Watchdog
from hpctrain.comm.timeline import Timeline
from hpctrain.comm.world import World
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.model.test_against_transformers import llama_reference

STEPS = 3
DISK = ("memory.activations=disk", "memory.optimizer=disk", "memory.offload_buffer=12000")
WAYS: dict[str, tuple[str, ...]] = {
    "stage 0": ("layout.zero=0", "model.dropout=0.1"),
    "stage 1": ("layout.zero=1", "precision.compute=bf16"),
    "stage 2": ("layout.zero=2", *LLAMA, "memory.recompute=selective"),
    "stage 3": ("layout.zero=3",),
    "stage 3, kept": ("layout.zero=3", *LLAMA, "memory.keep_gathered=1", "memory.recompute=full"),
    "stage 3, files": ("layout.zero=3", "memory.recompute=2", "memory.parameters=disk", *DISK),
    "stage 0, files": ("layout.zero=0", *DISK),
    "int8": ("layout.zero=3", *LLAMA, "memory.activation_format=int8"),
    "recompute": ("memory.recompute=full", "model.dropout=0.1"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true", "memory.recompute=selective"),
    "context": ("layout.context=2", "layout.zero=3"),
    "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=full"),
    "v-schedule": ("layout.pipeline=2", "layout.schedule=zb-v", *DISK),
}


@contextmanager
def watched(world: World, folder: Path) -> Iterator[None]:
    """All that a run can be watched by, besides what every run is."""
    world.compare_calls(True)
    world.ledger.timeline = Timeline(STEPS, 10_000)
    try:
        world.hang.set_limit(30.0)
        world.hang.report_to(folder, lambda _: None)
        with Watchdog(world), world.hang.training_steps():
            yield
    finally:
        world.ledger.timeline = None
        world.compare_calls(False)


def outcome(training: Trainer, results: list[object]) -> dict[str, object]:
    """Figures of the steps, gradients of the last one, parameters after it; as bytes."""
    found: dict[str, object] = {"figures": results}
    for name, pieces in (("gradient", training.gradients()), ("parameter", training.parameters())):
        found |= {
            f"{name} of {key}": piece.view(torch.uint8).numpy().tobytes() for key, piece in pieces.items()
        }
    training.engine.close()
    return found


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_watched_step_has_the_bits_of_one_that_is_not(world: World, mpi_tmp_path: Path, way: str) -> None:
    deck = small_deck("model.layers=4", f"memory.offload_dir={mpi_tmp_path}", *WAYS[way])
    plain = trainer(world, deck)
    figures = [plain.step(plain.state, deck.batch.global_size) for _ in range(STEPS)]
    expected = outcome(plain, list(figures))
    with watched(world, mpi_tmp_path):
        training = trainer(world, deck)
        found = outcome(training, list(training.train(STEPS)))
    assert training.activations.bytes
    assert [name for name in expected if expected[name] != found[name]] == []


DECK = """
[run]
title = "rough"
steps = 4
[model]
from = "{folder}/theirs"
[data]
tokens = "{folder}/tokens.h5"
validation = 0.0
[batch]
global_size = 4
sequence = 24
[learning_rate]
decay_steps = 4
[optimizer]
epsilon = 1e-3
[communication]
bucket_bytes = 20000
[checkpoint]
every = 2
[machine]
peak_flops = 1e10
"""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "stage-0": (),
    "stage-1": ("layout.zero=1",),
    "stage-2": ("layout.zero=2",),
    "stage-3": ("layout.zero=3",),
    "stage-3-files": ("layout.zero=3", "memory.parameters=disk", *DISK),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "context": ("layout.context=2", "layout.zero=3"),
    "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1"),
}
SAME_BITS = {"stage-0", "stage-1", "stage-2", "stage-3", "stage-3-files"}


def prepared(world: World, folder: Path) -> Path:
    """A deck that starts from a model whose norm weights all differ."""
    path = folder / "deck.toml"
    torch.manual_seed(3)
    model, _ = llama_reference()
    if world.rank == 0:
        model.save_pretrained(folder / "theirs")
        path.write_text(DECK.format(folder=folder))
        (folder / "text.txt").write_text("".join(chr(32 + 7 * n * n % 89) for n in range(3000)))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return path


def figures_of(world: World, folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, on all ranks."""
    rows = []
    if world.rank == 0:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: list[tuple[float, float]] = world.everyone.broadcast_object(
        [(r["loss"], r["grad_norm"]) for r in rows]
    )
    return found


def weights(world: World, folder: Path, step: int) -> dict[str, np.ndarray]:
    """The model of a checkpoint."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(folder / f"checkpoints/step-{step:08}.h5") as file:
        file["model"].visititems(
            lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    world.everyone.barrier()
    return found


@pytest.mark.mpi(min_size=2, max_size=2)
def test_runs_from_rough_weights_are_those_of_one_rank(world: World, mpi_tmp_path: Path) -> None:
    path = prepared(world, mpi_tmp_path)
    keys = ["model.vocabulary=260"]
    for rank in range(world.size):  # one rank's run, by one rank: its folder is its own
        if rank == 0 == world.rank:
            run_deck(world.single_rank_world(), path, [*keys, f"run.dir={mpi_tmp_path / 'one'}"])
    world.everyone.barrier()
    expected, last = figures_of(world, mpi_tmp_path / "one"), weights(world, mpi_tmp_path / "one", 4)
    assert len(expected) == 4 and expected[0] != expected[1]
    bits = {}
    for name, layout in LAYOUTS.items():
        folder = mpi_tmp_path / name
        run_deck(world, path, [*keys, *layout, f"run.dir={folder}"])
        found, own = figures_of(world, folder), weights(world, folder, 4)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
        for tensor, values in last.items():
            assert np.abs(own[tensor] - values).max() <= 1e-5 * np.abs(values).max(), (name, tensor)
        if name in SAME_BITS:
            bits[name] = (found, {tensor: values.tobytes() for tensor, values in own.items()})
        # Half of it again, from the checkpoint between.
        if world.rank == 0:
            (folder / "checkpoints/step-00000004.h5").unlink()
        world.everyone.barrier()
        resume(world, folder, [])
        assert figures_of(world, folder)[2:] == found[2:], name
        again = weights(world, folder, 4)
        assert [tensor for tensor in own if own[tensor].tobytes() != again[tensor].tobytes()] == [], name
        said: list[str] = []
        assert replay(world, folder / "checkpoints/step-00000002.h5", None, [], None, said.append) == 0
        assert world.rank or "bit for bit" in said[-1], (name, said)
    first = bits["stage-0"]
    assert [name for name in bits if bits[name] != first] == []
