"""Bugs that are common in mixtures of experts, put in one by one: `--verify-layout` finds each.

Tests of train/layout_verification.py. The run on one rank, which it compares with, has the same code: a
fault shows where it depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

import hpctrain.model.mixtures.router as router_module
import hpctrain.optim.clip as clip
import hpctrain.parallel.experts.expert_layer as experts
from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.memory.recompute import Recompute
from hpctrain.model.mixtures.router import Router
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replication import Replication, Replications
from hpctrain.train.layout_verification import LayoutError, verify_layout
from tests.engines import LLAMA, small_deck

pytestmark = pytest.mark.mpi(min_size=2, max_size=2)

KEYS = (*LLAMA, "model.experts.count=4", "model.experts.mlp=24", "model.experts.router_z_loss=0.01")


def verified(world: World, *layout: str) -> str:
    """What is said of a sound mixture on this layout; a fault raises."""
    deck = small_deck(*KEYS, *layout)
    return verify_layout(deck, world, make_mesh(deck, world))


def split(parameter: Parameter) -> bool:
    """Whether this rank has some of the experts: those of one rank are all there."""
    return parameter.shard.local[0] < parameter.shard.shape[0]


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (2.0, r"a reduction over the expert axis \(2 ranks\) is likely duplicated"),
        (0.5, r"it is 0\.5 times the expected value"),
    ],
    ids=["doubled", "halved"],
)
@pytest.mark.parametrize("zero", [0, 2])
def test_expert_gradients_of_another_size(
    world: World, monkeypatch: pytest.MonkeyPatch, factor: float, told: str, zero: int
) -> None:
    layout = ("layout.expert=2", f"layout.zero={zero}")
    assert "agree with one rank" in verified(world, *layout)
    add = experts.add_grouped_gradient

    def scaled(output_gradient: Tensor, inputs: Tensor, weight: Parameter, *more: Any) -> None:
        add(output_gradient * factor if split(weight) else output_gradient, inputs, weight, *more)

    monkeypatch.setattr(experts, "add_grouped_gradient", scaled)
    with pytest.raises(LayoutError, match=rf"gradient of blocks\.1\.feed_forward\.experts.* differs.*{told}"):
        verified(world, *layout)


@pytest.mark.parametrize("form", ["false", "true"])
def test_a_balance_loss_multiplied_by_the_tensor_size(
    world: World, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    layout = ("layout.tensor=2", "layout.expert=2", f"layout.sequence_parallel={form}")
    assert "agree with one rank" in verified(world, *layout)
    add_auxiliary_losses = Router.add_auxiliary_losses

    def multiplied(router: Router, *arguments: Any) -> Tensor:
        settings, ranks = router.settings, router.layer_context.tensor.size
        router.settings = settings.model_copy(update={"balance_loss": settings.balance_loss * ranks})
        weights = add_auxiliary_losses(router, *arguments)
        router.settings = settings
        return weights

    monkeypatch.setattr(Router, "add_auxiliary_losses", multiplied)
    # First seen where the router's own input begins.
    with pytest.raises(
        LayoutError, match=r"gradient of blocks\.1\.feed_forward(_norm|\.router)\.weight differs"
    ):
        verified(world, *layout)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_gradient_norm_that_leaves_experts_out(
    world: World, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    layout = ("layout.expert=2", f"layout.zero={zero}")
    assert "agree with one rank" in verified(world, *layout)

    def dense_alone(buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        for bucket in buckets:
            own = bucket.owned_gradients
            counted = own if bucket.owned_slice == bucket.slice else own[bucket.slice]
            for segment, elements, _ in bucket.segments_within(counted, bucket.slice):
                left_out = "expert" in segment.parameter.shard.split and split(segment.parameter)
                if segment.replication.counts_slice and not left_out:
                    yield elements

    monkeypatch.setattr(clip, "_gradients_in_norm", dense_alone)
    with pytest.raises(LayoutError, match=r"check: gradient norm differs"):
        verified(world, *layout)


@pytest.mark.parametrize("layout", [("layout.expert=2",), ("layout.expert_tensor=2", "layout.zero=2")])
def test_a_router_gradient_lost_under_accumulation(
    world: World, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...]
) -> None:
    """Every micro-batch begins from zero: the last one's alone is left."""
    assert "agree with one rank" in verified(world, *layout)
    backward = router_module._Logits.backward

    def overwriting(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.router.weight.gradient.zero_()
        return backward(ctx, gradient)

    monkeypatch.setattr(router_module._Logits, "backward", staticmethod(overwriting))
    with pytest.raises(LayoutError, match=r"gradient of blocks\.\d\.feed_forward\.router\.weight differs"):
        verified(world, *layout)


def test_a_router_gradient_lost_under_recompute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again adds nothing to it."""
    layout = ("layout.tensor=2", "layout.expert=2", "memory.recompute=full")
    assert "agree with one rank" in verified(world, *layout)
    backward = router_module._Logits.backward

    def losing(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        buffer = ctx.router.weight.gradient
        before = buffer.clone()
        result = backward(ctx, gradient)
        if isinstance(ctx.router.layer_context.saved_policy, Recompute):
            buffer.copy_(before)
        return result

    monkeypatch.setattr(router_module._Logits, "backward", staticmethod(losing))
    with pytest.raises(LayoutError, match=r"gradient of blocks\.\d\.feed_forward\.router\.weight differs"):
        verified(world, *layout)


def test_experts_summed_over_the_ranks_of_dense_parameters(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over data x context: with tensor ranks, which have other tokens for their experts, a sum is missing;
    with expert ranks, other experts are added, and they are seen to differ before.
    """
    layouts = ("layout.tensor=2",), ("layout.expert=2",)
    for layout in layouts:
        assert "agree with one rank" in verified(world, *layout)

    def as_dense(self: Replications) -> Replication:
        everyone, alone = self._mesh.group("data", "context"), self._mesh.new_subgroup("data", 1)
        return Replication(self._sharding(everyone, False), alone, False, None, None, 0, 1)

    monkeypatch.setattr(Replications, "_expert_replication", property(as_dense))
    with pytest.raises(
        LayoutError, match=r"experts.*a sum over the expert_data axis \(2 ranks\) is likely mis"
    ):
        verified(world, *layouts[0])
    with pytest.raises(HpctrainError, match=r"parameter blocks\.0\.feed_forward\.experts\.\S+ differs"):
        verified(world, *layouts[1])


def test_routers_need_the_sum_over_the_tensor_axis(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "agree with one rank" in verified(world, "layout.tensor=2", "layout.expert=2")
    monkeypatch.setattr("hpctrain.sharding.synchronize._partial_runs", lambda *_: [])
    told = r"router\.weight differs.*a sum over the tensor axis \(2 ranks\) is likely missing"
    with pytest.raises(LayoutError, match=told):
        verified(world, "layout.tensor=2", "layout.expert=2")
