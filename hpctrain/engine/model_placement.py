"""What a rank is in a run whose models may have ranks of their own (`deck/sections/rank_partition.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from hpctrain.comm.mesh import Mesh, sizes_text
from hpctrain.comm.world import World
from hpctrain.deck.check import check_world
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import RankPartition, without_dedicated_ranks
from hpctrain.engine.build import choose_link, make_mesh
from hpctrain.engine.shown import build_shown_stage
from hpctrain.engine.sizes import axis_sizes, on_one_rank
from hpctrain.engine.stage import TrainedStage, build_trained_stage
from hpctrain.text import counted

Found = TypeVar("Found")


@dataclass(frozen=True)
class ModelPlacement:
    """A rank's place among `whole`, the ranks of a run. `deck`, `world` and `mesh` are of ranks that have the
    policy, or of all others, whose engine has no parts (`idle`). In an undivided run they are the run's. The
    policy's pipeline has so many `stages`.
    """

    whole: World
    division: RankPartition
    deck: Deck
    world: World
    mesh: Mesh
    stages: int
    idle: bool = False

    @property
    def divided(self) -> bool:
        """Whether other ranks have other models."""
        return bool(self.division.dedicated)

    @property
    def build(self) -> Callable[..., TrainedStage]:
        """What builds its stage."""
        return _build_no_parts if self.idle else build_trained_stage

    @property
    def stage(self) -> int:
        """Which of the stages of a plan it is in: those of the policy's pipeline come first."""
        party = self.division.rank_set_index(self.whole.rank)
        return self.stages + party - 1 if party else self.mesh.coordinate("pipeline")

    def of_model(self, model: str) -> World | None:
        """The ranks that have a model, if this is one of them. Collective."""
        if model not in self.division.dedicated:
            return None if self.idle else self.world
        own = self.division.dedicated[model]
        here = self.whole.rank in own
        part = self.whole.subworld(
            own if here else [rank for rank in range(self.whole.size) if rank not in own]
        )
        return part if here else None

    def agreement(self) -> AbstractContextManager[None]:
        """As World.agreement of the whole, where only some of it agree within."""
        return self.whole.agreement() if self.divided else nullcontext()

    def tell(self, model: str, found: Found) -> Found:
        """What those who have a model have `found`, on all ranks. Collective."""
        if not self.divided:
            return found
        told: Found = self.whole.everyone.broadcast_object(found, self.division.of_model(model)[0])
        return told

    @property
    def words(self) -> str:
        """Who has what."""
        text = f"{counted(self.whole.size, 'rank')} ({sizes_text(self.mesh.sizes)}"
        parties = self.division.rank_sets[1:]
        others = [f"{' and '.join(each.models)} on {counted(len(each.ranks), 'other')}" for each in parties]
        return f"{'; '.join([text, *others])})"


def take_seat(deck: Deck, world: World) -> ModelPlacement:
    """That of this rank of a run. Collective; HpctrainError on all ranks where the deck does not fit them."""
    division, stages = RankPartition.of(deck, world.size), deck.layout.pipeline
    if not division.dedicated:
        return ModelPlacement(world, division, deck, world, make_mesh(deck, world), stages)
    with world.agreement():
        check_world(deck, world.size)
    transport, idle = choose_link(deck, world), world.rank in division.other_ranks
    part = world.subworld(division.other_ranks if idle else division.policy)
    own = without_dedicated_ranks(deck)
    if idle:
        stability = {"check_parameters": False}
        own = on_one_rank(own).with_keys(memory={"activations": "keep"}, stability=stability)
    with world.agreement():
        # Of ranks without parts the batch does not matter.
        sizes = {"data": part.size} if idle else axis_sizes(own, part.size)
    return ModelPlacement(world, division, own, part, Mesh(part, sizes, transport), stages, idle)


def _build_no_parts(deck: Deck, groups: Any, _models: Any, *others: Any) -> TrainedStage:
    """In place of `build_trained_stage`."""
    return build_shown_stage(deck, groups, [], *others)
