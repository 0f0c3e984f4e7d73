"""Over which ranks ZeRO cuts, told from the nodes of a mesh that is not there."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.comm.planned import PlannedMesh
from hpctrain.deck.schema import OptimizerSection
from hpctrain.engine.offload import RULES
from hpctrain.engine.sizes import axis_sizes
from hpctrain.engine.stage import make_replications, zero_group_size
from hpctrain.errors import HpctrainError
from hpctrain.parallel.shard import Shard
from tests.engines import small_deck


def size(ranks: int, per_node: int, *keys: str, stage: int = 0) -> int:
    deck = small_deck("layout.zero=2", *keys)
    mesh = PlannedMesh(axis_sizes(deck, ranks), stage, per_node)
    return zero_group_size(deck, mesh, mesh.group("data", "context"))


def test_slices_are_cut_over_the_ranks_asked_for() -> None:
    assert size(8, 4) == 8
    assert size(8, 4, "layout.zero_group=2") == 2
    assert size(8, 4, "layout.zero_group=node") == 4
    assert size(8, 4, "layout.zero_group=node", "layout.tensor=2") == 2
    assert size(8, 2, "layout.zero_group=node", "layout.pipeline=2", stage=1) == 2
    assert size(8, 2, "layout.zero_group=node", "layout.tensor=4", "batch.global_size=16") == 1


def test_nodes_of_unequal_ranks_are_refused() -> None:
    with pytest.raises(HpctrainError, match="as many data x context ranks on every node"):
        size(8, 3, "layout.zero_group=node")


def test_parts_of_a_group_have_peers() -> None:
    deck = small_deck("layout.zero=1", "layout.zero_group=2")
    replications = make_replications(deck, PlannedMesh(axis_sizes(deck, 8), 0, 8))
    sharding = replications.of(Shard.whole("weight", (4, 4))).sharding
    assert (sharding.zero, sharding.group.size, sharding.replicas.size) == (1, 2, 4)


def test_every_optimizer_of_a_deck_has_a_rule() -> None:
    assert set(RULES) == set(get_args(OptimizerSection.model_fields["name"].annotation))
