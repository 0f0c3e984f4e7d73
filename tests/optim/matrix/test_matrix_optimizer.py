"""A matrix rule trains the same model on any layout as on one rank, and transforms each expert by itself.

Tests of optim/matrix/matrix_optimizer.py, costs/update_bytes.py, and sharding/ownership.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hpctrain.comm.world import World
from hpctrain.costs.update_bytes import update_bytes
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import Shard, UpdateBlock
from hpctrain.sharding.state import MASTER
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, reference, small_deck, trainer
from tests.optim.matrix.runs import EXPERTS, losses_after_checkpoint

ROUNDS = 5
TOLERANCE = 1e-4
SHAPES = {
    *((32, 32), (8, 32), (4, 32), (48, 32), (32, 48), (1, 1, 48, 32), (1, 32, 48)),
    *((24, 32), (32, 24)),  # of three heads of 8 features
}


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix whose rows (or columns) are orthonormal, by Newton's iteration."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(ROUNDS):
        wide = 1.5 * wide - 0.5 * wide @ wide.t() @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.t()


class Orthogonalized:
    """Rule with orthogonalized momentum and a mean square of each row: state of elements and of cells."""

    dtype = torch.float32
    seen: ClassVar[set[tuple[int, ...]]] = set()

    def update_block(self, shard: Shard) -> UpdateBlock | None:
        shape = (1,) * (len(shard.shape) - 2) + shard.shape[-2:]
        return UpdateBlock(shape, float(prod(shape))) if len(shape) > 1 else None

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        return {"velocity": None, "row": (1,) * (len(shard.shape) - 1) + (shard.shape[-1],)}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        return part.state["velocity"].mul_(0.9).add_(part.gradients.div_(gradient_divisor))

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        self.seen.add(tuple(directions.shape))
        row = cells["row"].mul_(0.5).add_(0.5 * directions.square().mean(-1, keepdim=True)).sqrt()
        matrix = directions.view(directions.shape[-2:])
        return orthogonal(matrix).view(directions.shape) * (row / row.mean())

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        decayed = 1 - 0.1 * learning_rate * part.update_settings.has_weight_decay
        part.state[MASTER].mul_(decayed).sub_(
            learning_rate * part.update_settings.learning_rate_factor * directions
        )


ELEMENTS = AdamW((0.9, 0.95), 1e-3, 0.1)


@pytest.fixture
def by_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Orthogonalized the rule of all matrices in blocks."""
    rules = MatrixRules(Orthogonalized(), ("blocks.*",), ELEMENTS)
    monkeypatch.setitem(RULES, "adamw", lambda _: rules)  # type: ignore[misc]


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank, half precision": (1, ("precision.compute=bf16",)),
    "zero 0": (2, ("layout.zero=0",)),
    "zero 1": (2, ("layout.zero=1", 'model.frozen=["blocks.1.attention.*"]')),
    "zero 2, sliced": (2, ("layout.zero=2", "memory.accumulate=sliced")),
    "zero 3": (2, ("layout.zero=3",)),
    "tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "tensor, shared heads": (2, ("layout.tensor=2", "model.key_value_heads=1")),
    "tensor, uneven heads": (
        2,
        ("layout.tensor=2", "model.heads=3", "model.key_value_heads=3", "model.head_size=8"),
    ),
    "pipeline, tied": (2, ("layout.pipeline=2", "model.tied=true")),
    "experts, zero 1": (2, (*EXPERTS, "layout.zero=1")),
    "experts": (2, (*EXPERTS, "layout.expert=2", "layout.zero=1")),
    "experts, cut": (2, (*EXPERTS, "layout.tensor=2", "layout.expert_tensor=2")),
    "tensor and zero 3": (4, ("layout.tensor=2", "layout.zero=3")),
    "pipeline and zero 1, tied": (4, ("layout.pipeline=2", "layout.zero=1", "model.tied=true")),
    "hybrid": (4, ("layout.zero=2", "layout.zero_group=2")),
}


@pytest.mark.sampled(5)
@pytest.mark.mpi
@pytest.mark.usefixtures("by_matrix")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_updates_whole_matrices(world: World, mpi_tmp_path: Path, name: str) -> None:
    ranks, keys = LAYOUTS[name]
    if ranks != world.size:
        pytest.skip(f"of {ranks} ranks")
    deck = small_deck(*LLAMA, *keys, f"run.dir={mpi_tmp_path}", "learning_rate.peak=1e-2")
    training, alone = trainer(world, deck), reference(world, deck)
    optimizer = training.engine.stage.optimizer
    assert isinstance(optimizer, MatrixOptimizer)
    Orthogonalized.seen.clear()
    found, expected = ([step.loss for step in each.train(3)] for each in (training, alone))
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert Orthogonalized.seen <= SHAPES
    pieces = {
        segment.parameter.shard.name: (
            segment.parameter.shard,
            segment.view(bucket.gather_owned(bucket.owned_values)),
        )
        for bucket in training.engine.stage.buckets
        for segment in bucket.segments
    }
    whole = alone.parameters()
    for tensor, (shard, values) in pieces.items():
        error = (values - shard.take(whole[tensor])).abs().max() / whole[tensor].abs().max()
        assert error <= TOLERANCE, tensor
    checkpoints = Checkpoints(deck, training.engine, {})
    checkpoints.save(training.state)
    before = [(each.kind, each.values.clone()) for each in optimizer.state()]
    training.train(1)
    training.state = checkpoints.restore(mpi_tmp_path / "checkpoints/step-00000003.h5")
    for (kind, values), after in zip(before, optimizer.state(), strict=True):
        assert torch.equal(values, after.values), kind


@pytest.mark.mpi(max_size=4)
@pytest.mark.usefixtures("by_matrix")
def test_a_checkpoint_of_a_layout_continues_on_one_rank(world: World, mpi_tmp_path: Path) -> None:
    layouts: dict[int, tuple[str, ...]] = {
        1: (),
        2: ("layout.tensor=2", "layout.expert_tensor=2"),
        4: ("layout.expert=2", "layout.zero=3"),
    }
    keys = (*EXPERTS, "precision.compute=bf16")
    expected, found = losses_after_checkpoint(world, mpi_tmp_path, keys, layouts[world.size])
    assert found == pytest.approx(expected, rel=2e-3)


class Held(TorchDispatchMode):
    """Counts the bytes that operations allocate and that still exist, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.before: set[int] = set()
        self.most = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in (each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)):
            if tensor.untyped_storage() not in self.made:
                self.before.add(tensor.untyped_storage().data_ptr())
        for tensor in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.made[storage] = storage.nbytes()
        self.most = max(self.most, sum(self.made.values()))
        return result


class InPlace(Orthogonalized):
    """Rule that needs no memory other than that of its results."""

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        return {}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        return part.gradients.div_(gradient_divisor).clone()

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        return directions

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        part.state[MASTER].sub_(directions, alpha=learning_rate)


class Nothing:
    """Update rule that changes nothing."""

    names: ClassVar[tuple[str, ...]] = ()

    def update(
        self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float
    ) -> None: ...


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "key",
    ["layout.zero=0", "layout.zero=1", "layout.zero=3", "layout.tensor=2", "precision.gradients=compute"],
)
def test_predicted_bytes_are_those_of_an_update(
    world: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    rules = MatrixRules(InPlace(), ("blocks.*",), Nothing())
    monkeypatch.setitem(RULES, "adamw", lambda _: rules)  # type: ignore[misc]
    training = trainer(world, small_deck(*LLAMA, key, "precision.compute=bf16"))
    training.train(1)
    optimizer = training.engine.stage.optimizer
    with Held() as held:
        optimizer.step(0.0, 1.0)
    # Numbers of updates take four bytes each; what is largest may be in different buckets.
    assert -4 * 64 <= update_bytes(optimizer) - held.most <= held.most // 16
