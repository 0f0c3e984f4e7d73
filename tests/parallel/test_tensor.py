"""Column and row layers: fused weights, and weight gradients computed later.

Tests of parallel/tensor.py, parallel/shards.py and parallel/backward/weight_gradients.py.
Tests of parallel/tensor.py and parallel/layer_context.py.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.model.part import blocks_of
from hpctrain.parallel.backward.weight_gradients import WeightGradientQueue, compute_all
from hpctrain.parallel.matmul import join_neighbors
from hpctrain.parallel.shards import Partition, piece_and_position, split_shard
from tests.engines import LLAMA, small_deck, trainer


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("local", [False, True])
def test_weight_gradients_may_wait(world: World, local: bool) -> None:
    """Deferred to the queue, they are bit for bit what they are at once."""
    if local and world.size == 1:
        return
    layout = (f"layout.tensor={world.size}", f"layout.sequence_parallel={str(local).lower()}")
    at_once, later = trainer(world, small_deck(*layout)), trainer(world, small_deck(*layout))
    at_once.train(1)
    queue = later.engine.stage.layer_context.weight_gradients
    later.step.executor.queue = WeightGradientQueue()  # the executor's own switch would end the deferring
    queue.deferring = True
    finish = later.engine.stage.synchronizer.finish
    waiting = []

    def run_then_finish() -> None:
        waiting.append(len(queue))
        compute_all(queue.take())
        finish()

    later.engine.stage.synchronizer.finish = run_then_finish  # type: ignore[method-assign]
    later.train(1)
    micro_batches = later.deck.batch.global_size // 2
    assert waiting == [4 * 2 * micro_batches]
    for name, gradient in at_once.gradients().items():
        assert torch.equal(gradient, later.gradients()[name]), name


def test_several_outputs_are_one_product(world: World) -> None:
    run = trainer(world.single_rank_world(), small_deck(*LLAMA))
    inner = blocks_of(run.engine.model)[0].attention.inner
    whole = inner.product.weight()
    assert whole.shape == (32 + 2 * 8, 32)
    assert whole.data_ptr() == inner.weights[0].data_ptr()
    assert torch.equal(whole, torch.cat([weight.detach() for weight in inner.weights]))
    with pytest.raises(AssertionError, match="neighbours"):
        join_neighbors([inner.weights[1].detach(), inner.weights[0].detach()])


@pytest.mark.mpi(min_size=2)
def test_rows_of_heads_are_split_or_shared(world: World) -> None:
    from hpctrain.comm.mesh import Mesh

    group = Mesh(world, {"tensor": world.size}).group("tensor")
    split = Partition.split(world.size * 6, group)
    assert (split.start, split.local, split.holder_counts) == (world.rank * 6, 6, ())
    shared = Partition.split(4, group, unit=4)
    assert (shared.start, shared.local, shared.holder_counts) == (0, 4, (world.size,))


def test_a_shard_has_the_partitions_of_its_dims() -> None:
    shard = split_shard("a", Partition(8, 4, 4), 2, Partition(6, 0, 3), axes=frozenset({"expert"}))
    assert (shard.shape, shard.start, shard.local) == ((8, 2, 6), (4, 0, 0), (4, 2, 3))
    assert shard.split == {"expert"} and not shard.partial and (shard.holder_counts, shard.unit) == ((), 1)
    shared = split_shard("a", Partition(4, 0, 4, holder_counts=(2,), unit=4), 5)
    assert shared.split == shared.partial == {"tensor"} and (shared.holder_counts, shared.unit) == ((2,), 4)


def test_a_rank_with_fewer_heads_has_padding() -> None:
    """The second of two ranks has 3 of 9 heads and space for 6, the last of 4 shares no head of keys."""
    second = planned_group(("tensor",), 1, 2, Ledger())
    queries, keys = Partition.of_heads(9, 3, second)
    assert (queries, keys) == (Partition(9, 6, 6, unpadded_local=3), Partition(3, 2, 2, unpadded_local=1))
    shard = split_shard("a", 5, queries.times(4))
    assert (shard.start, shard.local, shard.extent) == ((0, 24), (5, 24), (5, 12))
    assert not shard.partial and shard.elements_of_real_rows == 120
    gradient = torch.ones(5, 24)
    shard.clear_padding(gradient)
    assert gradient.sum(1).tolist() == [12.0] * 5 and not gradient[:, 12:].any()
    assert shard.stacked(1, 2).unstacked == shard
    last = planned_group(("tensor",), 3, 4, Ledger())
    queries, keys = Partition.of_heads(6, 3, last)
    assert (queries.start, queries.unpadded_local, keys.start, keys.holder_counts) == (4, 2, 2, (2, 1, 1))
    assert split_shard("b", keys, 5).partial == {"tensor"}
    assert [piece_and_position(keys.holder_counts, rank) for rank in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
    ]
    assert piece_and_position((), 2) == (2, 0)
