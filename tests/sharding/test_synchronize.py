"""Tests of sharding/synchronize.py and fault_checks/replica_check.py.

Buckets are synchronized when they are final, and replicas are compared before the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks import replica_check
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.model.count import count
from hpctrain.model.part import blocks_of
from hpctrain.model.transformer import Transformer
from hpctrain.optim.optimizer import gather_updated
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.replication import Replications
from tests.engines import LLAMA, alone, make_buckets, small_deck, trainer


@pytest.mark.mpi(min_size=2)
def test_a_replica_that_differs_is_named(world: World) -> None:
    engine = trainer(world, small_deck()).engine
    check_replicas(engine.stage.buckets, world.everyone)
    if world.rank == 1:
        with torch.no_grad():
            blocks_of(engine.model)[1].feed_forward.down.weights[0][3, 5] += 1e-6
    with pytest.raises(HpctrainError) as caught:
        check_replicas(engine.stage.buckets, world.everyone)
    assert len(caught.value.problems) == 1
    assert "parameter blocks.1.feed_forward.down.weight differs" in caught.value.problems[0]


@pytest.mark.mpi(min_size=2)
def test_whole_tensors_are_compared_over_the_tensor_axis(world: World) -> None:
    engine = trainer(world, small_deck(f"layout.tensor={world.size}")).engine
    if world.rank == 1:
        with torch.no_grad():
            engine.model.layers[-1].norm.weight[0] += 1e-6
    with pytest.raises(HpctrainError, match=r"final_norm\.weight"):
        check_replicas(engine.stage.buckets, world.everyone)


@pytest.mark.mpi(min_size=4)
def test_heads_that_tensor_ranks_share_are_compared_over_those(world: World) -> None:
    heads = f"model.key_value_heads={world.size // 2}"
    engine = trainer(world, small_deck(*LLAMA, heads, f"layout.tensor={world.size}")).engine
    check_replicas(engine.stage.buckets, world.everyone)
    if world.rank == 1:
        with torch.no_grad():
            blocks_of(engine.model)[1].attention.inner.weights[1][0, 0] += 1e-6
    with pytest.raises(HpctrainError) as caught:
        check_replicas(engine.stage.buckets, world.everyone)
    assert len(caught.value.problems) == 1
    assert "parameter blocks.1.attention.key.weight differs" in caught.value.problems[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_tied_embeddings_are_compared_over_the_ends_of_the_pipeline(world: World, zero: int) -> None:
    if zero == 3 and world.size < 4:
        pytest.skip("cuts parameters over two ranks or more")
    engine = trainer(world, small_deck("layout.pipeline=2", f"layout.zero={zero}")).engine
    check_replicas(engine.stage.buckets, world.everyone)
    if engine.mesh.coordinate("pipeline") == 1:
        for bucket in engine.stage.buckets:
            for segment, values, _ in bucket.owned_segments(bucket.owned_values):
                if segment.replication.tied_pipeline is not None:
                    values[0] += 1e-6
    gather_updated(engine.stage.buckets)
    with pytest.raises(HpctrainError) as caught:
        check_replicas(engine.stage.buckets, world.everyone)
    assert len(caught.value.problems) == 1
    assert "parameter embedding.tokens.weight differs" in caught.value.problems[0]


class Made(TorchDispatchMode):
    """Adds up the bytes of all results with memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = [*args, *(kwargs or {}).values()]
            known = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
            storage = result.untyped_storage()
            self.bytes += 0 if storage.data_ptr() in known else storage.nbytes()
        return result


@pytest.mark.mpi(min_size=2)
def test_comparing_replicas_allocates_memory_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small allocations between long-lived ones would leave gaps that the C library keeps."""
    monkeypatch.setattr(replica_check, "_PIECE", 256)
    engine = trainer(world, small_deck("layout.zero=1")).engine
    with Made() as made:
        check_replicas(engine.stage.buckets, world.everyone)
    assert 2 * 8 * 256 < made.bytes < sum(bucket.length for bucket in engine.stage.buckets)


@pytest.mark.mpi(min_size=2)
def test_buckets_are_reduced_once_per_step_during_the_backward_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(world, small_deck())
    order: list[str] = []
    start = Group.start_all_reduce
    gradient = Transformer.forward

    def started(self: Group, tensor: torch.Tensor, *rest: object, **options: object) -> object:
        if self.axes == ("data", "context"):
            names = {
                bucket.gradients.data_ptr(): index for index, bucket in enumerate(run.engine.stage.buckets)
            }
            order.append(f"bucket {names[tensor.data_ptr()]}")
        return start(self, tensor, *rest, **options)  # type: ignore[arg-type]

    def forward(self: Transformer, *inputs: object) -> torch.Tensor:
        output = gradient(self, *inputs)  # type: ignore[arg-type]
        order.append("forward")
        return output

    monkeypatch.setattr(Group, "start_all_reduce", started)
    monkeypatch.setattr(Transformer, "forward", forward)
    finish = run.engine.stage.synchronizer.finish

    def finished() -> None:
        order.append("end of backward")
        finish()

    monkeypatch.setattr(run.engine.stage.synchronizer, "finish", finished)
    run.train(1)
    count, micro_batches = len(run.engine.stage.buckets), run.deck.batch.global_size // 2 // world.size
    assert order[:micro_batches] == ["forward"] * micro_batches
    assert order[-1] == "end of backward"
    assert sorted(order[micro_batches:-1]) == [f"bucket {index}" for index in range(count)]
    # The last layers are final first; the tied embedding, which both ends use, comes last.
    assert order[-2] == "bucket 0"


def test_buckets_have_the_requested_size(world: World) -> None:
    layer_context: LayerContext = alone(world)
    shape = trainer(world.single_rank_world(), small_deck()).engine.shape
    model = Transformer(shape, layer_context)
    limit = 30_000
    buckets = make_buckets(
        model.units(), Replications.of_one_rank(layer_context.tensor), torch.float32, limit
    )
    used = [4 * sum(segment.length for segment in bucket.segments) for bucket in buckets]
    assert sum(used) == 4 * count(shape).parameters
    assert all(size <= limit for size in used)
    assert len(buckets) <= 2 * sum(used) // limit + 1
    for bucket in buckets:
        for segment in bucket.segments:
            assert segment.parameter.data_ptr() == bucket.values.data_ptr() + 4 * segment.start
            assert segment.parameter.gradient.shape == segment.parameter.shape
