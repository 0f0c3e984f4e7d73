"""Tests that plans assume GPUs if a deck, an option or a machine file says that nodes have them."""

from __future__ import annotations

import pytest

from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.time.machine_rates import read_machine
from tests.engines import small_deck


@pytest.mark.parametrize(
    ("keys", "option", "device"),
    [
        ((), None, "auto"),
        ((), 4, "cuda"),
        (("machine.gpus_per_node=4",), None, "cuda"),
        (("machine.gpus_per_node=4",), 0, "auto"),
        (("machine.gpu_memory=80 GB",), None, "cuda"),
        (("machine.gpu_memory=80 GB", "machine.gpus_per_node=0"), None, "auto"),
        (("machine.gpus_per_node=4", "run.device=cpu"), None, "cpu"),
    ],
)
def test_assumed_device(keys: tuple[str, ...], option: int | None, device: str) -> None:
    assert assume_planned_device(small_deck(*keys), option).run.device == device


@pytest.mark.parametrize(("chosen", "device"), [("auto", "cuda"), ("cpu", "cpu")])
def test_machine_file_sets_the_device(chosen: str, device: str) -> None:
    deck = read_machine("selene-2021").fill_deck(small_deck(f"run.device={chosen}"))
    assert (deck.run.device, deck.machine.gpu_memory) == (device, 80_000_000_000)
