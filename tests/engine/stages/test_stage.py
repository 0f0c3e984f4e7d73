"""Over which ranks ZeRO cuts, told from the nodes of a mesh that is not there; several models in one run."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import gradient_bytes, value_bytes
from hpctrain.deck.sections.optimizer import OptimizerSection
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages.stage import build_stage
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.engine.stages.zero_groups import make_replications, zero_group_size
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import build_model
from hpctrain.model.part import logits_of
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.shards import Shard
from tests.engines import small_deck, trainer


def size(ranks: int, per_node: int, *keys: str, stage: int = 0) -> int:
    deck = small_deck("layout.zero=2", "batch.global_size=16", *keys)
    mesh = PlannedMesh(axis_sizes(deck, ranks), stage, per_node)
    return zero_group_size(deck, mesh, mesh.group("data", "context"))


def test_slices_are_cut_over_the_ranks_asked_for() -> None:
    assert size(8, 4) == 8
    assert size(8, 4, "layout.zero_group=2") == 2
    assert size(8, 4, "layout.zero_group=node") == 4
    assert size(8, 4, "layout.zero_group=node", "layout.tensor=2") == 2
    assert size(8, 2, "layout.zero_group=node", "layout.pipeline=2", stage=1) == 2
    assert size(8, 2, "layout.zero_group=node", "layout.tensor=4") == 1


def test_nodes_of_unequal_ranks_are_refused() -> None:
    with pytest.raises(HpctrainError, match="the same number of data x context ranks on every node"):
        size(8, 3, "layout.zero_group=node")


def test_parts_of_a_group_have_peers() -> None:
    deck = small_deck("layout.zero=1", "layout.zero_group=2", "batch.global_size=16")
    replications = make_replications(deck, PlannedMesh(axis_sizes(deck, 8), 0, 8))
    sharding = replications.of(Shard.replicated("weight", (4, 4))).sharding
    assert (sharding.zero, sharding.group.size, sharding.replicas.size) == (1, 2, 4)


def test_experts_are_cut_over_the_ranks_that_hold_the_same_ones() -> None:
    keys = ("model.family=llama", "model.experts.count=4", "layout.tensor=2", "batch.global_size=16")

    def sharding(ranks: int, *more: str) -> tuple[int, int, int]:
        deck = small_deck(*keys, *more)
        mesh = PlannedMesh(axis_sizes(deck, ranks), 0, 4)
        expert = Shard("experts", (4, 8), (0, 0), (2, 8), frozenset({"expert", "expert_tensor"}))
        own = make_replications(deck, mesh).of(expert).sharding
        return own.zero, own.group.size, own.replicas.size

    assert sharding(8, "layout.zero=3") == (3, 8, 1)
    assert sharding(8, "layout.zero=2", "layout.expert=2") == (2, 4, 1)
    assert sharding(8, "layout.zero=1", "layout.expert=2", "layout.zero_group=2") == (1, 2, 2)
    assert sharding(8, "layout.zero=1", "layout.expert=2", "layout.zero_group=node") == (1, 2, 2)
    assert sharding(8, "layout.zero=2", "layout.expert=2", "layout.expert_tensor=2") == (2, 2, 1)
    # Alone with them, or on each node: nothing is cut.
    assert sharding(8, "layout.zero=3", "layout.expert=4", "layout.zero_group=node") == (0, 2, 1)
    assert sharding(4, "layout.zero=3", "layout.expert=4") == (0, 1, 1)


def test_every_optimizer_of_a_deck_has_a_rule() -> None:
    assert set(RULES) == set(get_args(OptimizerSection.model_fields["name"].annotation))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_model_that_is_not_trained_stands_beside_one_that_is(
    world: World, mpi_tmp_path: Path, zero: int
) -> None:
    losses = [step.loss for step in trainer(world, small_deck("layout.zero=2")).train(3)]
    training = trainer(world, small_deck("layout.zero=2"))
    engine, path = training.engine, mpi_tmp_path / "start.h5"
    save(path, world.everyone, training_entries(engine.state()), {})

    deck = small_deck(f"layout.zero={zero}")
    layer_context = make_layer_context(deck, engine.mesh, SavedPolicy(), world.device)
    model = build_model(engine.shape, layer_context)
    stage = build_stage(deck, layer_context, [model], make_replications(deck, engine.mesh))
    load_parameters(path, stage, world.everyone)
    tokens = torch.arange(64).view(2, 32) % 61

    def frozen_logits() -> Tensor:
        with stage.residency.step("frozen"):
            return logits_of(model, tokens)

    own = [bucket.owned_values.clone() for bucket in stage.buckets]
    before = frozen_logits()
    assert torch.equal(before, logits_of(engine.model, tokens))
    for loss in losses:
        assert training.train_step().loss == loss
        assert torch.equal(frozen_logits(), before)
    assert not torch.equal(before, logits_of(engine.model, tokens))
    for bucket, values in zip(stage.buckets, own, strict=True):
        assert torch.equal(bucket.owned_values, values)
        for segment in bucket.segments:
            parameter = segment.parameter
            assert not parameter.requires_grad
            assert (
                parameter.gradient is parameter.on_gradient_added is None and not parameter.lookup_gradients
            )
    assert gradient_bytes(stage.buckets) == 0
    whole = sum(bucket.length * 4 for bucket in stage.buckets)
    assert value_bytes(stage.buckets) == (whole // 2 if zero else whole)
    assert value_bytes(engine.stage.buckets) == pytest.approx(whole / 2, rel=0.05)
