"""Where a step waits for its device: once to know loss and norm, and once where experts' rows travel.

Tests of host/streams.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.host.streams import start_copy
from hpctrain.parallel.experts.grouped_products import count_numbers
from tests.device_double import on_gpu
from tests.engines import LLAMA, small_deck, trainer
from tests.host_waits import HostWaits

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.per_token=2")
AGREE = "train/step.py agree"
LAYERS, MICRO_BATCHES = 2, 2
ON_HOST = {
    "comm": "transports of CPUs",
    "data": "batches are read on the host",
    "objective/objective.py count": "tokens of batches on the host",
    "parallel/experts/grouped_products.py __iter__": "products of experts on a CPU, one after the other",
    "train/step.py read": "counts of tokens on the host",
}
"""What works on the host on a machine with GPUs, too, or works on CPUs alone."""


def waits(world: World, *keys: str) -> Counter[str]:
    """Return the calls of a third step that would wait."""
    deck = small_deck(
        *keys, f"model.layers={LAYERS}", "batch.micro_size=2", f"batch.global_size={4 * world.size}"
    )
    training = trainer(world, deck)
    training.train(2)
    with HostWaits() as found:
        training.train(1)
    return Counter(
        {where: count for where, count in found.calls.items() if not where.startswith(tuple(ON_HOST))}
    )


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(
    "keys",
    [
        ("optimizer.clip=1.0",),
        (*LLAMA, "precision.compute=bf16", "memory.recompute=full"),
        ("optimizer.name=muon", "model.tied=false"),
        ("precision.compute=fp8",),
        MIXTURE,
        (*MIXTURE, "model.experts.balance=bias"),
    ],
    ids=["gpt2", "llama", "muon", "fp8", "mixture", "bias"],
)
def test_a_step_waits_for_its_loss_and_norm_alone(world: World, keys: tuple[str, ...]) -> None:
    assert waits(world, *keys) == {AGREE: 1}


@pytest.mark.mpi(max_size=1)
def test_a_capacity_makes_each_pass_wait_once(world: World) -> None:
    found = waits(world, *MIXTURE, "model.experts.capacity=1.0")
    assert found == {AGREE: 1, "parallel/experts/dispatch.py __init__": LAYERS * MICRO_BATCHES}


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_of_experts_wait_once_in_a_pass(world: World) -> None:
    found = waits(world, *MIXTURE, "layout.expert=2")
    assert found == {AGREE: 1, "parallel/experts/dispatch.py _exchange_counts": LAYERS * MICRO_BATCHES}


def test_counts_of_experts_are_those_of_bincount() -> None:
    numbers = torch.tensor([3, 0, 3, 5])
    expected = torch.bincount(numbers, minlength=7)
    assert torch.equal(count_numbers(numbers, 7), expected)
    with HostWaits() as found:
        counts = count_numbers(on_gpu(numbers), 7).as_subclass(torch.Tensor)
    assert torch.equal(counts, expected) and not found.calls


def test_what_is_on_its_device_is_not_copied() -> None:
    tensor = torch.ones(2)
    assert start_copy(tensor, torch.device("cpu")) is tensor
    assert start_copy(tensor, torch.device("meta")).is_meta
