"""Without ZeRO, each rank transforms its share of all matrices and sends it while it continues."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.matrix.replicated_matrices import ReplicatedMatrices
from tests.engines import LLAMA, small_deck, trainer
from tests.optim.matrix.runs import MUON, give_gradients


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_bucket_is_sent_while_the_next_one_is_transformed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 14 matrices in several buckets is transformed by one rank, and applied by all."""
    training, events = trainer(world, small_deck(*LLAMA, *MUON, "layout.zero=0")), list[str]()
    transformed, apply = Muon.transform, Muon.apply

    def noted(name: str) -> None:
        method = getattr(ReplicatedMatrices, name)

        def call(replicated: ReplicatedMatrices, *arguments: Any) -> None:
            events.append(name)
            method(replicated, *arguments)

        monkeypatch.setattr(ReplicatedMatrices, name, call)

    def counted(rule: Muon, directions: Tensor, cells: Any) -> Tensor:
        events.append("transform")
        return transformed(rule, directions, cells)

    def applied(rule: Muon, *arguments: Any) -> None:
        events.append("apply")
        apply(rule, *arguments)

    noted("start")
    noted("finish")
    monkeypatch.setattr(Muon, "transform", counted)
    monkeypatch.setattr(Muon, "apply", applied)
    give_gradients(training, 0)
    training.engine.stage.optimizer.step(1e-2, 1.0)
    assert events.count("apply") == 14
    assert sum(world.everyone.all_gather_object(events.count("transform"))) == 14
    order = [each for each in events if each in {"start", "finish"}]
    buckets = order.count("start")
    assert buckets > 1
    assert order == ["start", *["start", "finish"] * (buckets - 1), "finish"]
