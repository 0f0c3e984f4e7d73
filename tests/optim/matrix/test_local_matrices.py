"""Matrices of a rank, and places of their elements and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.optim.matrix.local_matrices import LocalMatrices
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketLayout
from hpctrain.sharding.replication import Replications, ZeroSharding
from hpctrain.sharding.state import MASTER
from tests.engines import LLAMA, alone, make_buckets, small_deck, trainer
from tests.optim.matrix.test_matrix_rule import Rows

SHAPES = {"matrix": (5, 7), "experts": (3, 2, 4, 5), "last": (6, 4)}
COUNTS = {"matrix": 1, "experts": 6, "last": 1}


class WithoutCells(Rows):
    """Rule without cells, so that ranks can share out the matrices."""

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        return {"velocity": None}


def make_local_matrices(rule: Rows, buckets: Sequence[Bucket]) -> list[LocalMatrices]:
    found = []
    for bucket in buckets:
        assert isinstance(bucket.owned_values, torch.Tensor)
        master = bucket.owned_values.float()
        found += [LocalMatrices.of(rule, bucket, segment, master) for segment in bucket.segments]
    return found


def parameters(rule: Rows) -> list[Parameter]:
    made = [Parameter(Shard.replicated(name, shape)) for name, shape in SHAPES.items()]
    MatrixRules(rule).assign(made)
    return made


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cells", [True, False], ids=["cells", "elements"])
def test_a_matrix_is_transformed_once_or_by_all_ranks_with_its_cells(
    cells: bool, ranks: int, zero: int
) -> None:
    rule = Rows() if cells else WithoutCells()
    found: list[tuple[str, int]] = []
    for rank in range(ranks):
        group, one = (
            planned_group(("data",), at, size, Ledger(), device=torch.device("cpu"))
            for at, size in ((rank, ranks), (0, 1))
        )
        leaves = [[each] for each in parameters(rule)]
        layout = BucketLayout.of(leaves, ZeroSharding(zero, group, one), Replications.of_one_rank(one))
        for each in make_local_matrices(rule, [Bucket(layout, torch.float32)]):
            elements = prod(each.segment.parameter.shape[-2:])
            for number in range(each.count):
                first = each.segment.start + (each.first + number) * elements
                assert each.element_range(number) == slice(first, first + elements)
                if each.is_assigned(number):
                    found.append((each.segment.parameter.shard.name, each.first + number))
    once = [(name, number) for name, count in COUNTS.items() for number in range(count)]
    assert sorted(found) == sorted(once * (ranks if cells and not zero else 1))


def test_a_batch_has_the_elements_of_its_matrix(world: World) -> None:
    """A batch has views of weights, gradients and state of elements, in the shape of the matrix."""
    rule = Rows()
    made = parameters(rule)
    buckets = make_buckets(
        [[[each] for each in made]], Replications.of_one_rank(alone(world).tensor), torch.float32, 100_000
    )
    for parameter in made:
        parameter.data.copy_(torch.randn(parameter.shape))
        assert parameter.gradient is not None
        parameter.gradient.copy_(torch.randn(parameter.shape))
    found = {each.segment.parameter.shard.name: each for each in make_local_matrices(rule, buckets)}
    assert {name: each.count for name, each in found.items()} == COUNTS
    for parameter in made:
        each, matrix = found[parameter.shard.name], parameter.shape[-2:]
        assert parameter.gradient is not None
        for number in range(each.count):
            part = each.element_batch(number, 4.0)
            assert (part.shard, float(part.updates)) == (parameter.shard, 4.0)
            assert part.gradients.shape == (1,) * (parameter.dim() - 2) + matrix
            assert torch.equal(part.gradients.view(matrix), parameter.gradient.view(-1, *matrix)[number])
            assert set(part.state) == {MASTER, "velocity"}  # not what has a number for each row
            assert torch.equal(part.state[MASTER].view(matrix), parameter.detach().view(-1, *matrix)[number])
            part.state["velocity"].fill_(number + 1.0)
    velocities, rows = (
        {each.shard.name: each for own in found.values() for each in own.state_tensors() if each.kind == kind}
        for kind in ("optimizer/velocity", "optimizer/row")
    )
    kept = velocities["experts"].values
    assert isinstance(kept, torch.Tensor)
    assert kept.view(6, 20).mean(1).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert {name: each.shard.shape for name, each in rows.items()} == {
        "matrix": (5, 1),
        "experts": (3, 2, 4, 1),
        "last": (6, 1),
    }


@pytest.mark.parametrize("name", ["adam-mini", "adafactor"])
@pytest.mark.parametrize("vocabulary", [61, 62, 63, 64, 100])
def test_padded_tables_are_updated_as_blocks(name: str, vocabulary: int) -> None:
    """On GPUs tables are padded to multiples of 64 rows per tensor rank. The first rank may have all rows."""
    deck = small_deck(*LLAMA, f"optimizer.name={name}", "layout.tensor=2", "run.device=cuda")
    assert plan_memory(deck, 2, vocabulary).largest.memory.optimizer > 0


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", ["adam-mini", "adafactor"])
def test_padding_of_tables_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    deck = small_deck(*LLAMA, f"optimizer.name={name}", "layout.tensor=2")
    plain = [step.loss for step in trainer(world, deck).train(3)]

    def filled(*arguments: Any) -> LayerContext:
        layer_context = make_layer_context(*arguments)
        object.__setattr__(layer_context, "table_rows", 64)
        return layer_context

    monkeypatch.setattr("hpctrain.engine.layout.engine_spec.make_layer_context", filled)
    training = trainer(world, deck)
    assert training.engine.stage.models[0].layers[0].all_parameters[0].shard.local[0] == 64
    assert [step.loss for step in training.train(3)] == pytest.approx(plain, rel=1e-6)
