"""Mesh of a model that generates text: transport of the deck. Tests of engine/generation.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hpctrain.comm.mesh import transport_elsewhere
from hpctrain.comm.world import World
from hpctrain.engine import generation
from hpctrain.engine.generation import generation_stage, module_generation_stage
from tests.engines import small_deck


class MeshMadeError(Exception):
    """End of a construction at its mesh."""


@dataclass
class NoArchitecture:
    """Architecture that is never built."""

    loaded: bool = False


@pytest.mark.parametrize(
    ("requested", "used"),
    [("auto", "auto"), ("shared", "auto"), ("nccl", "auto"), ("mpi", "mpi"), ("gloo", "gloo")],
)
def test_a_model_uses_the_transport_of_its_deck_if_every_machine_has_it(
    requested: str, used: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports: list[str] = []

    def make(*arguments: Any, **options: Any) -> None:
        transports.append(options.get("transport") or arguments[2])
        raise MeshMadeError

    assert transport_elsewhere(requested) == used
    monkeypatch.setattr(generation, "Mesh", make)
    monkeypatch.setattr(generation.ModuleArchitecture, "of", lambda _: NoArchitecture())
    deck = small_deck(f"communication.transport={requested}")
    with pytest.raises(MeshMadeError):
        generation_stage(deck, world.single_rank_world(), 1)
    with pytest.raises(MeshMadeError):
        module_generation_stage(deck, world.single_rank_world())
    assert transports == [used, used]
