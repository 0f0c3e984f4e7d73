"""Each matrix that tensor ranks hold in pieces is transformed by one of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.optim.matrix.muon import Muon
from tests.engines import LLAMA, small_deck, trainer
from tests.optim.matrix.runs import MUON, give_gradients


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("zero", [0, 1])
def test_each_rank_of_a_layout_transforms_its_share(
    world: World, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """Two tensor ranks transform 7 of 14 matrices each; of four ranks, one transforms each matrix."""
    deck = small_deck(
        *LLAMA, *MUON, "layout.tensor=2", f"layout.zero={zero}", "communication.bucket_bytes=1000000"
    )
    training, calls = trainer(world, deck), list[int]()
    transformed = Muon.transform

    def counted(rule: Muon, directions: Tensor, cells: Any) -> Tensor:
        calls.append(directions.numel())
        return transformed(rule, directions, cells)

    monkeypatch.setattr(Muon, "transform", counted)
    give_gradients(training, 0)
    training.engine.stage.optimizer.step(1e-2, 1.0)
    numbers = world.everyone.all_gather_object(len(calls))
    assert sum(numbers) == 14
    for pair in range(0, world.size, 2):
        assert abs(numbers[pair] - numbers[pair + 1]) <= 1
