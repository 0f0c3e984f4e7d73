"""Sums that are exact inside nodes and compressed between them, on ranks that emulate several nodes.

Tests of sharding/compression/hierarchical_reduction.py and engine/stages/zero_groups.py.
"""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import state_bytes
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.zero_groups import node_peers_factory
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.traffic_plan import plan_traffic
from hpctrain.sharding.compression.hierarchical_reduction import HierarchicalReduction
from hpctrain.sharding.compression.power import PowerSgd
from hpctrain.sharding.replication import NodePeers
from tests.engines import Trainer, small_deck, trainer

POWER = ("communication.compress=powersgd", "communication.powersgd.rank=2")
NODES = (*POWER, "communication.compress_between=nodes")
STEPS = 4


def on_nodes(monkeypatch: pytest.MonkeyPatch, per_node: int) -> None:
    """Assign `per_node` neighbouring ranks of the world to each emulated node."""
    monkeypatch.setattr(Mesh, "nodes", lambda _, group: [rank // per_node for rank in group.ranks])


def losses(training: Trainer, steps: int = STEPS) -> list[float]:
    return [step.loss for step in training.train(steps)]


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_single_node_sums_exactly(world: World) -> None:
    training = trainer(world, small_deck(*NODES))
    assert losses(training) == losses(trainer(world, small_deck()))
    assert not [each for each in training.engine.state() if each.kind.startswith("reducer")]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_nodes_of_one_rank_compress_everything(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = losses(trainer(world, small_deck(*POWER)))
    on_nodes(monkeypatch, 1)
    assert losses(trainer(world, small_deck(*NODES))) == plain


@pytest.mark.mpi(min_size=4, max_size=4)
def test_nodes_train_like_single_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks train like two ranks with twice as many tokens, to rounding."""
    on_nodes(monkeypatch, 2)
    training = trainer(world, small_deck(*NODES), masked=0.0)
    found = losses(training)
    two = World(world.communicator.Split(world.rank % 2, world.rank))
    expected = losses(trainer(two, small_deck(*POWER), masked=0.0))
    exact = losses(trainer(two, small_deck(), masked=0.0))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(exact, rel=1e-4)
    check_replicas(training.engine.stage.buckets, world.everyone)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("keys", [(), ("layout.pipeline=2", "layout.tensor=1")], ids=["data", "pipeline"])
def test_zero_1_has_the_bits_of_zero_0(
    world: World, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    on_nodes(monkeypatch, 1 if keys else 2)
    whole, cut = (trainer(world, small_deck(*NODES, *keys, f"layout.zero={zero}")) for zero in (0, 1))
    assert losses(whole) == losses(cut)
    parameters = whole.parameters()
    for name, values in cut.parameters().items():
        assert torch.equal(values, parameters[name]), name
    check_replicas(cut.engine.stage.buckets, world.everyone)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    ("form", "per_node"),
    [
        (("compress=sign",), 2),
        (("compress=topk", "ratio=0.1"), 2),
        (("compress=onebit", "warmup=4"), 2),
        (("compress=onebit", "warmup=4"), 4),
    ],
)
def test_all_methods_compress_between_nodes(
    world: World, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...], per_node: int
) -> None:
    on_nodes(monkeypatch, per_node)
    keys = (*form, "compress_between=nodes")
    training = trainer(world, small_deck("optimizer.clip=0", *(f"communication.{key}" for key in keys)))
    found, exact = losses(training, 6), losses(trainer(world, small_deck("optimizer.clip=0")), 6)
    check_replicas(training.engine.stage.buckets, world.everyone)
    assert found == pytest.approx(exact, rel=0.1)
    assert found != exact


@pytest.mark.mpi(min_size=4, max_size=4)
def test_warm_up_is_exact_between_nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates before compression have the bits of exact sums."""
    on_nodes(monkeypatch, 2)
    found = losses(trainer(world, small_deck(*NODES, "communication.warmup=2")))
    exact = losses(trainer(world, small_deck()))
    assert found[:3] == exact[:3] and found[3] != exact[3]


@pytest.mark.mpi(min_size=4, max_size=4)
def test_ranks_of_a_node_take_turns_and_send_the_bytes_of_the_closed_form(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nodes(monkeypatch, 2)
    training = trainer(world, small_deck(*NODES))
    training.train(1)
    world.ledger.reset()
    training.train(1)
    moved: Counter[tuple[str, str]] = Counter()
    for row in world.ledger.rows():
        moved[row.axis, row.operation] += row.bytes
    summations = [reducer.reduction for reducer in training.engine.stage.synchronizer.reducers.values()]
    assert all(isinstance(each, HierarchicalReduction) for each in summations) and len(summations) > 3
    mine = [
        each.between
        for each in summations
        if isinstance(each, HierarchicalReduction) and each.exchanging_rank == each.inside.rank
    ]
    assert 0 < len(mine) < len(summations)
    assert all(isinstance(each, PowerSgd) for each in mine)
    between = sum(2 * 4 * sum(each.messages) for each in mine if isinstance(each, PowerSgd))
    assert moved["nodes", "all_reduce"] == between
    whole = 4 * sum(bucket.length for bucket in training.engine.stage.buckets)
    inside = {name: count for (axis, name), count in moved.items() if axis == "data x context"}
    assert inside == {"reduce": whole, "broadcast": whole}
    if world.rank == 0:
        planned = plan_traffic(training.deck, world.size, 61, ranks_per_node=2).stages[0].payload()
        assert planned["nodes"] == between
        held = plan_memory(training.deck, world.size, 61, ranks_per_node=2).stages[0].memory.optimizer
        assert state_bytes(training.engine.state(), training.engine.stage.buckets) == held
    every = sum(world.everyone.all_gather_object(between))
    plain = trainer(world, small_deck(*POWER))
    world.ledger.reset()
    plain.train(1)
    of_all = sum(row.bytes for row in world.ledger.rows() if row.axis == "data x context")
    assert every == 2 * of_all  # of two nodes, by one rank each


def nodes_of(ranks: int, per_node: int, *keys: str) -> NodePeers | None:
    deck = small_deck("batch.global_size=16", *NODES, *keys)
    mesh = PlannedMesh(axis_sizes(deck, ranks), 0, per_node)
    return node_peers_factory(deck, mesh)(mesh.group("data", "context"))


def test_groups_are_split_by_node() -> None:
    def sizes(nodes: NodePeers | None) -> tuple[int, int] | None:
        return nodes and (nodes.inside.size, nodes.between.size)

    assert sizes(nodes_of(8, 4)) == (4, 2)
    assert sizes(nodes_of(8, 4, "layout.tensor=2")) == (2, 2)
    assert sizes(nodes_of(8, 2, "layout.tensor=4")) == (1, 2)
    assert sizes(nodes_of(8, 8)) == (8, 1)
    assert nodes_of(8, 4, "communication.compress_between=ranks") is None


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(
        HpctrainError, match=r"compress_between.*the same number of data x context ranks on every node"
    ):
        nodes_of(8, 3)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_stages_that_are_split_differently_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends of tied embeddings would be summed in different orders."""
    places = [0, 0, 1, 2]

    def nodes(_: Mesh, group: Group) -> list[int]:
        return [places[rank] for rank in group.ranks]

    monkeypatch.setattr(Mesh, "nodes", nodes)
    with pytest.raises(HpctrainError, match="on every node"):
        trainer(world, small_deck(*NODES, "layout.pipeline=2"))


def test_the_rank_with_the_least_work_takes_the_next_turn() -> None:
    nodes = NodePeers(Mock(size=2), Mock())
    assert [nodes.assign_rank(elements) for elements in (10, 4, 4, 4, 1)] == [0, 1, 1, 1, 0]
