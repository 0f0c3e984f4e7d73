"""Bytes of one step, by axis, operation and phase, equal to the closed forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.model.count import count
from tests.data.preparing import prepare
from tests.engines import LLAMA, Trainer, small_deck, trainer

FP32 = 4

SEVENTEEN_MILLION = """
[run]
steps = 2
[model]
family = "gpt2"
layers = 5
hidden = 512
heads = 8
[data]
tokens = "tokens.h5"
[batch]
global_size = 4
micro_size = 4
sequence = 64
[memory]
activations = "disk"
"""
"""The smallest model of which plans are promised."""


def test_peak_resident_memory_is_the_planned_one(world: World, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"some text\n" * 2000)
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path)])
    (tmp_path / "deck.toml").write_text(SEVENTEEN_MILLION, encoding="utf-8")
    # A process of its own, which has held nothing before.
    command = [sys.executable, "-m", "hpctrain", "run", "deck.toml"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    places = {**outside, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=places, check=True, capture_output=True)
    row = json.loads((tmp_path / "runs" / "deck" / "plan.json").read_text(encoding="utf-8"))
    (planned,), (measured,) = row["predicted"]["stages"], row["measured"]
    assert planned["total_bytes"] == pytest.approx(measured["total_bytes"], rel=0.1)
    assert planned["activation_bytes"] == pytest.approx(measured["activation_bytes"], rel=0.01)


def one_step(world: World, deck: Deck) -> tuple[Trainer, dict[tuple[str, str, str], tuple[int, int]]]:
    """(axis, operation, phase) -> (calls, bytes) of one step."""
    run = trainer(world, deck)
    world.ledger.reset()
    run.train(1)
    return run, {(e.axis, e.operation, e.phase): (e.calls, e.bytes) for e in world.ledger.rows()}


def micro_batches(run: Trainer) -> int:
    return run.deck.batch.global_size // run.engine.mesh.size("data") // run.deck.batch.micro_size


def activations(run: Trainer) -> int:
    """Bytes of b s h of one micro-batch on one rank of the context axis."""
    batch, context = run.deck.batch, run.engine.mesh.size("context")
    return batch.micro_size * batch.sequence // context * run.engine.shape.hidden * FP32


def partial_bytes(run: Trainer) -> int:
    """Bytes of the parameters whose gradients are partial over the tensor axis."""
    segments = [s for bucket in run.engine.stage.buckets for s in bucket.segments]
    return FP32 * sum(s.length for s in segments if "tensor" in s.parameter.shard.partial)


def loss_bytes(run: Trainer) -> int:
    """Maximum, sum and target logit of every token, from every tensor rank."""
    batch, mesh = run.deck.batch, run.engine.mesh
    return 3 * FP32 * batch.micro_size * batch.sequence // mesh.size("context") * mesh.size("tensor")


@pytest.mark.mpi(min_size=2)
def test_data_parallel_moves_two_phi(world: World) -> None:
    run, moved = one_step(world, small_deck())
    phi = sum(bucket.length for bucket in run.engine.stage.buckets)
    assert moved["data x context", "all_reduce", "backward"] == (
        len(run.engine.stage.buckets),
        2 * phi * FP32,
    )
    padding = phi - count(run.engine.shape).parameters
    assert 0 <= padding < 64 * world.size * len(run.engine.stage.buckets)
    assert len(run.engine.stage.buckets) > 2
    assert {axis for axis, _, _ in moved} <= {"data", "data x context", "world"}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_tensor_parallel_reduces_twice_a_layer_and_pass(world: World, family: tuple[str, ...]) -> None:
    run, moved = one_step(world, small_deck(*family, "layout.tensor=2"))
    layers, micro, size = run.engine.shape.layers, micro_batches(run), activations(run)
    # Beside the layers, the embedding reduces once in forward and the head once in backward.
    calls = micro * (2 * layers + 1)
    assert moved["tensor", "all_reduce", "forward"] == (calls, calls * 2 * size)
    assert moved["tensor", "all_reduce", "backward"] == (calls, calls * 2 * size)
    assert moved["tensor", "all_gather", "forward"] == (micro, micro * loss_bytes(run))
    assert {key for key in moved if key[0] == "tensor"} == {
        ("tensor", "all_reduce", "forward"),
        ("tensor", "all_reduce", "backward"),
        ("tensor", "all_gather", "forward"),
    }


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_sequence_parallel_gathers_and_scatters_the_same_total(world: World, family: tuple[str, ...]) -> None:
    run, moved = one_step(world, small_deck(*family, "layout.tensor=2", "layout.sequence_parallel=true"))
    layers, micro, size = run.engine.shape.layers, micro_batches(run), activations(run)
    pairs = micro * (2 * layers + 1)
    # In forward the head gathers and the embedding scatters; the loss gathers its three rows.
    assert moved["tensor", "all_gather", "forward"] == (pairs + micro, pairs * size + micro * loss_bytes(run))
    assert moved["tensor", "reduce_scatter", "forward"] == (pairs, pairs * size)
    # In backward each pair gathers once, as forward does, and once more what was not kept.
    again = micro * 2 * layers
    assert moved["tensor", "all_gather", "backward"] == (pairs + again, (pairs + again) * size)
    assert moved["tensor", "reduce_scatter", "backward"] == (pairs, pairs * size)
    assert moved["tensor", "all_reduce", "backward"][1] == 2 * partial_bytes(run)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_ring_passes_keys_and_values_of_the_others(world: World, family: tuple[str, ...]) -> None:
    context = world.size
    run, moved = one_step(world, small_deck(*family, f"layout.context={context}"))
    shape, batch = run.engine.shape, run.deck.batch
    keys_and_values = 2 * batch.micro_size * batch.sequence * shape.key_value_heads * shape.head_size * FP32
    passes = micro_batches(run) * shape.layers
    block = keys_and_values // context
    rounds = passes * (context - 1)
    assert moved["context", "send", "forward"] == (rounds, rounds * block)
    assert moved["context", "send", "backward"] == (2 * rounds, 2 * rounds * block)
    assert rounds * block == passes * keys_and_values * (context - 1) // context
    assert {operation for axis, operation, _ in moved if axis == "context"} == {"send", "recv"}


@pytest.mark.mpi(min_size=2)
def test_all_to_all_exchanges_four_tensors_a_layer_and_pass(world: World) -> None:
    context = world.size
    run, moved = one_step(world, small_deck(f"layout.context={context}", "layout.context_form=all_to_all"))
    exchanges = 4 * micro_batches(run) * run.engine.shape.layers
    for phase in ("forward", "backward"):
        assert moved["context", "all_to_all", phase] == (exchanges, exchanges * activations(run))
    assert {operation for axis, operation, _ in moved if axis == "context"} == {"all_to_all"}
