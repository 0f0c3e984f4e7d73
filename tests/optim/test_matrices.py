"""A rule of whole matrices trains the same model on any layout as on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hpctrain.comm.world import World
from hpctrain.engine.offload import RULES
from hpctrain.errors import HpctrainError
from hpctrain.optim.matrices import MatrixOptimizer
from hpctrain.optim.offload import OffloadedOptimizer
from hpctrain.optim.optimizer import Elements
from hpctrain.plan.memory import plan_memory
from hpctrain.plan.savings import find_savings
from hpctrain.sharding.state import MASTER
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, reference, small_deck, trainer

ROUNDS = 5
TOLERANCE = 1e-4
SHAPES = {(61, 32), (32, 32), (8, 32), (4, 32), (48, 32), (32, 48)}


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose rows (or columns) are orthonormal, by Newton's iteration."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(ROUNDS):
        wide = 1.5 * wide - 0.5 * wide @ wide.t() @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.t()


class Orthogonalized:
    """Momentum, of matrices orthogonalized."""

    names: ClassVar[tuple[str, ...]] = ("velocity",)
    by_element: ClassVar[bool] = False
    seen: ClassVar[set[tuple[int, ...]]] = set()

    def update(self, parts: Sequence[Elements], learning_rate: float, gradient_divisor: float) -> None:
        for part in parts:
            assert part.updates == round(float(part.updates))
            self.seen.add(tuple(part.gradients.shape))
            part.gradients.div_(gradient_divisor)
            velocity = part.state["velocity"].mul_(0.9).add_(part.gradients)
            step = orthogonal(velocity) if velocity.dim() == 2 else velocity
            part.state[MASTER].mul_(1 - 0.1 * learning_rate * part.treatment.decayed).sub_(
                learning_rate * step
            )


@pytest.fixture
def by_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deck's optimizer is Orthogonalized."""
    monkeypatch.setitem(RULES, "adamw", lambda _: Orthogonalized())  # type: ignore[misc]


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank, half precision": (1, ("precision.compute=bf16",)),
    "zero 0": (2, ("layout.zero=0",)),
    "zero 1": (2, ("layout.zero=1", 'model.frozen=["blocks.1.attention.*"]')),
    "zero 3": (2, ("layout.zero=3",)),
    "tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "tensor, shared heads": (2, ("layout.tensor=2", "model.key_value_heads=1")),
    "pipeline, tied": (2, ("layout.pipeline=2", "model.tied=true")),
    "tensor and zero 3": (4, ("layout.tensor=2", "layout.zero=3")),
    "pipeline and zero 1, tied": (4, ("layout.pipeline=2", "layout.zero=1", "model.tied=true")),
}


@pytest.mark.mpi
@pytest.mark.usefixtures("by_matrix")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_updates_whole_matrices(world: World, mpi_tmp_path: Path, name: str) -> None:
    ranks, keys = LAYOUTS[name]
    if ranks != world.size:
        pytest.skip(f"of {ranks} ranks")
    deck = small_deck(*LLAMA, *keys, f"run.dir={mpi_tmp_path}", "learning_rate.peak=1e-2")
    training, alone = trainer(world, deck), reference(world, deck)
    assert isinstance(training.engine.optimizer, MatrixOptimizer)
    Orthogonalized.seen.clear()
    found, expected = ([step.loss for step in each.train(3)] for each in (training, alone))
    assert found == pytest.approx(expected, rel=TOLERANCE)
    shapes = {shape for shape in Orthogonalized.seen if len(shape) == 2}
    assert shapes <= SHAPES
    pieces = {
        segment.parameter.shard.name: (
            segment.parameter.shard,
            segment.view(bucket.gathered(bucket.own_values)),
        )
        for bucket in training.engine.buckets
        for segment in bucket.segments
    }
    whole = alone.parameters()
    for tensor, (shard, values) in pieces.items():
        error = (values - shard.take(whole[tensor])).abs().max() / whole[tensor].abs().max()
        assert error <= TOLERANCE, tensor
    planned = plan_memory(deck, world.size, 61)
    assert planned.largest.memory.optimizer > 0
    checkpoints = Checkpoints(deck, training.engine, {})
    checkpoints.save(training.state)
    before = [flat.clone() for state in training.engine.optimizer.states for flat in state.values()]
    training.train(1)
    training.state = checkpoints.restore(mpi_tmp_path / "checkpoints/step-00000003.h5")
    after = [flat for state in training.engine.optimizer.states for flat in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_state_in_files_is_updated_by_elements_alone(world: World) -> None:
    with pytest.raises(AssertionError, match="cut anywhere"):
        OffloadedOptimizer(Orthogonalized(), [], torch.zeros, 1000)  # type: ignore[arg-type]


@pytest.mark.usefixtures("by_matrix")
def test_state_elsewhere_is_refused_in_a_sentence_and_not_advised() -> None:
    with pytest.raises(HpctrainError, match=r"memory.optimizer=disk: .*whole matrices"):
        plan_memory(small_deck("memory.optimizer=disk"), 1, 61)
    deck = small_deck()
    plan = plan_memory(deck, 1, 61)
    savings = find_savings(deck, plan, small_deck, lambda changed: plan_memory(changed, 1, 61))
    assert all("memory.optimizer" not in each.change for each in savings)


class Held(TorchDispatchMode):
    """Counts the bytes of memory that operations make, as long as it is there, and the most of them."""

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
    """Needs no memory of its own."""

    def update(self, parts: Sequence[Elements], learning_rate: float, gradient_divisor: float) -> None:
        for part in parts:
            assert part.shard is not None and part.shard.shape == part.gradients.shape
            part.state[MASTER].sub_(part.gradients.div_(gradient_divisor))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "key",
    ["layout.zero=0", "layout.zero=1", "layout.zero=3", "layout.tensor=2", "precision.gradients=compute"],
)
def test_what_is_gathered_in_passing_is_what_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setitem(RULES, "adamw", lambda _: InPlace())  # type: ignore[misc]
    training = trainer(world, small_deck(*LLAMA, key, "precision.compute=bf16"))
    training.train(1)
    optimizer = training.engine.optimizer
    assert isinstance(optimizer, MatrixOptimizer)
    with Held() as held:
        optimizer.step(0.0, 1.0)
    assert held.most == optimizer.working_bytes
