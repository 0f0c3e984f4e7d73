"""Without ZeRO each rank transforms its share of what all have, and hands it to the others meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.matrix.replicated_matrices import ReplicatedMatrices
from tests.engines import LLAMA, small_deck, trainer
from tests.optim.matrix.test_muon import MUON, give_gradients


@pytest.mark.mpi(min_size=2, max_size=4)
def test_what_is_handed_is_under_way_while_the_next_is_transformed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 14 matrices in several buckets each is transformed by one rank, and followed by all."""
    training, events = trainer(world, small_deck(*LLAMA, *MUON, "layout.zero=0")), list[str]()
    transformed, follow = Muon.transform, Muon.apply

    def noted(name: str) -> None:
        method = getattr(ReplicatedMatrices, name)

        def call(handed: ReplicatedMatrices, *arguments: Any) -> None:
            events.append(name)
            method(handed, *arguments)

        monkeypatch.setattr(ReplicatedMatrices, name, call)

    def counted(rule: Muon, directions: Tensor, cells: Any) -> Tensor:
        events.append("transform")
        return transformed(rule, directions, cells)

    def followed(rule: Muon, *arguments: Any) -> None:
        events.append("follow")
        follow(rule, *arguments)

    noted("start")
    noted("finish")
    monkeypatch.setattr(Muon, "transform", counted)
    monkeypatch.setattr(Muon, "apply", followed)
    give_gradients(training, 0)
    training.engine.stage.optimizer.step(1e-2, 1.0)
    assert events.count("follow") == 14
    assert sum(world.everyone.all_gather_object(events.count("transform"))) == 14
    order = [each for each in events if each in {"start", "finish"}]
    buckets = order.count("start")
    assert buckets > 1
    assert order == ["start", *["start", "finish"] * (buckets - 1), "finish"]
