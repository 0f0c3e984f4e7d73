"""Two trainers with one planted difference: the step, phase and tensor in which they part.

Tests of train/divergence.py, train/fingerprints.py and fault_checks/fingerprint.py as a run uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from hpctrain.comm.world import World
from hpctrain.train.divergence import (
    ROUNDING_LIMITS,
    Rounding,
    StepComparison,
    StepDifference,
    changed_between,
    reduction_error,
)
from hpctrain.train.fingerprints import StepFingerprints, fingerprints
from tests.engines import LLAMA, small_deck, trainer
from tests.train.planted import (
    Plant,
    in_activation,
    in_gathered,
    in_moment,
    in_own_gradient,
    in_sum,
    in_weights,
    no_reduction,
    other_kernel,
    other_rate,
    other_samples,
    other_token,
)

DATA: tuple[str, ...] = ()
TENSOR = ("layout.tensor=2",)
SEQUENCE = ("layout.tensor=2", "layout.sequence_parallel=true")
PIPELINE = ("layout.pipeline=2", "layout.schedule=zb-h1", "model.layers=4")
ZERO_1 = ("layout.zero=1",)
APART = ("layout.zero=1", "communication.transport=mpi")  # each rank has gathered weights of its own
ZERO_3 = ("layout.zero=3",)
STEPS = 3

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.per_token=2", "model.experts.mlp=32")
CHUNKS = ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2", "layout.zero=2")
# Keys of a model, and a layout of two ranks.
ALIKE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data": ((), DATA),
    "ZeRO-3": (("model.dropout=0.1",), ("layout.zero=3", "memory.optimizer=disk")),
    "sequence": ((), SEQUENCE),
    "context": ((), ("layout.context=2",)),
    "tied": (("model.tied=true",), ("layout.pipeline=2", "layout.zero=1")),
    "chunks": (("model.layers=4", "memory.recompute=full"), CHUNKS),
    "experts": (MIXTURE, ("layout.expert=2", "layout.zero=3")),
    "split experts": (MIXTURE, (*SEQUENCE, "layout.expert_tensor=2")),
    "muon": (("optimizer.name=muon",), ("layout.zero=2",)),
    "fp16": (("precision.compute=fp16",), TENSOR),
}

UP, DOWN = "blocks.1.feed_forward.up.weight", "blocks.0.feed_forward.down.weight"
BIAS, LAST = "blocks.1.feed_forward.up.bias", "blocks.1.feed_forward.down.bias"  # last in their buckets
VALUE, NORM = "blocks.0.attention.value.weight", "final_norm.weight"


class Case(NamedTuple):
    """Ranks, layouts of both trainers, what is planted in the second, and where they part by it."""

    ranks: int
    one: tuple[str, ...]
    other: tuple[str, ...]
    plant: Plant
    phase: str
    name: str
    step: int = 2


CASES = {
    "another kernel": Case(1, DATA, DATA, other_kernel(UP), "forward", "output of blocks.1"),
    "another rate": Case(1, DATA, DATA, other_rate(), "update", "learning rate"),
    "a bit of a parameter": Case(1, DATA, DATA, in_weights(UP), "start", f"/model/{UP}"),
    "the last bit of a parameter": Case(1, DATA, DATA, in_weights(VALUE, bit=0), "start", f"/model/{VALUE}"),
    "a bit of a gradient": Case(1, DATA, DATA, in_own_gradient(DOWN), "gradient", DOWN),
    "a bit of a moment": Case(1, DATA, DATA, in_moment(UP), "start", f"/optimizer/exp_avg/{UP}"),
    "a bit of an activation": Case(1, DATA, DATA, in_activation(1), "forward", "output of blocks.0"),
    "other samples": Case(1, DATA, DATA, other_samples(), "samples", "tokens"),
    "a token": Case(1, DATA, DATA, other_token(), "samples", "tokens"),
    "another update": Case(1, DATA, DATA, in_weights(NORM, behind=True), "update", f"/model/{NORM}"),
    "recomputed": Case(
        1,
        ("memory.recompute=full",),
        ("memory.recompute=full",),
        in_activation(2),
        "forward",
        "output of blocks.1",
    ),
    "a skipped sum": Case(2, DATA, DATA, no_reduction(BIAS), "reduction", BIAS),
    "a bit of a sum": Case(2, DATA, DATA, in_sum(DOWN, rank=1), "reduction", DOWN),
    "a parameter of one replica": Case(2, DATA, DATA, in_weights(UP, rank=1), "start", f"/model/{UP}"),
    "what one rank gathered": Case(2, APART, APART, in_gathered(VALUE, 1), "start", f"/computed/{VALUE}"),
    "a sum with ZeRO-3": Case(2, ZERO_3, ZERO_3, no_reduction(LAST), "reduction", LAST),
    "a slice's moment": Case(
        2, ZERO_3, ZERO_3, in_moment(DOWN, "exp_avg_sq", 1), "start", f"/optimizer/exp_avg_sq/{DOWN}"
    ),
    "a rank's own gradient with ZeRO-3": Case(2, ZERO_3, ZERO_3, in_own_gradient(UP, 1, 3), "gradient", UP),
    "an activation of a tensor rank": Case(
        2, TENSOR, TENSOR, in_activation(1, rank=1, bit=3), "forward", "output of blocks.0"
    ),
    "a kernel of tensor ranks": Case(
        2, SEQUENCE, SEQUENCE, other_kernel(UP), "forward", "output of blocks.1"
    ),
    "an activation of the last stage": Case(
        2, PIPELINE, PIPELINE, in_activation(1, rank=1), "forward", "output of blocks.3"
    ),
    "a gradient of the first stage": Case(2, PIPELINE, PIPELINE, in_own_gradient(DOWN, 0), "gradient", DOWN),
    "a rate on another layout": Case(2, DATA, TENSOR, other_rate(), "update", "learning rate"),
    "a skipped sum on another layout": Case(2, TENSOR, DATA, no_reduction(BIAS), "reduction", BIAS),
    "a parameter on another layout": Case(2, DATA, TENSOR, in_weights(UP, rank=1), "start", f"/model/{UP}"),
    "a token on another layout": Case(2, DATA, PIPELINE[:2], other_token(), "samples", "tokens"),
    "an activation on another layout": Case(
        2, ZERO_3, SEQUENCE, in_activation(1, rank=0, bit=28), "forward", "output of blocks.0"
    ),
    "a gradient on another layout": Case(2, PIPELINE[:2], ZERO_1, in_own_gradient(DOWN, 1), "gradient", DOWN),
}


def steps_of(
    world: World, keys: Sequence[str], plant: Plant | None = None, steps: int = STEPS
) -> list[StepFingerprints]:
    """The fingerprints of a trainer's first steps."""
    training = trainer(world, small_deck(*keys))
    if plant is not None:
        plant(training)
    taken = [fingerprints(training) for _ in range(steps)]
    training.engine.close()
    return taken


def parted(
    one: Sequence[StepFingerprints], other: Sequence[StepFingerprints], alike: bool
) -> StepDifference | None:
    """The first that differs; of one layout in bits."""
    comparison = StepComparison(ROUNDING_LIMITS["fp32"], alike, alike)
    for mine, theirs in zip(one, other, strict=True):
        if (first := comparison.first(comparison.of(mine, theirs))) is not None:
            return first
    return None


@pytest.mark.sampled(8)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_named(world: World, name: str) -> None:
    case = CASES[name]
    if case.ranks != world.size:
        pytest.skip("for other ranks")
    alike = case.one == case.other
    one, other = steps_of(world, case.one), steps_of(world, case.other, case.plant)
    first = parted(one, other, alike)
    assert first is not None
    assert (first.step, first.phase, first.name) == (case.step, case.phase, case.name)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", ALIKE)
def test_layouts_of_one_deck_do_not_part(world: World, name: str) -> None:
    model, layout = ALIKE[name]
    deck = small_deck(*model)
    whole = steps_of(world.single_rank_world(), model)
    steps, again = (steps_of(world, (*model, *layout)) for _ in range(2))
    assert parted(steps, again, alike=True) is None
    comparison = StepComparison(Rounding.of(deck), same_layout=False, exact=False)
    for one, other in zip(whole, steps, strict=True):
        assert comparison.first(comparison.of(one, other)) is None
        named = {each.name for each in other.tensors}
        assert {each.name for each in one.tensors} <= named


@pytest.mark.mpi(max_size=1)
def test_a_run_repeats_itself(world: World) -> None:
    assert parted(steps_of(world, DATA), steps_of(world, DATA), alike=True) is None


@pytest.mark.mpi(min_size=1, max_size=2)
def test_looking_changes_no_bit(world: World) -> None:
    keys = ("memory.recompute=sqrt", *(ZERO_3 if world.size > 1 else ()))
    watched = [each.metrics["loss"] for each in steps_of(world, keys)]
    plain = trainer(world, small_deck(*keys))
    assert [each.loss for each in plain.train(STEPS)] == watched


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_run_with_the_wrong_sum_is_told(world: World) -> None:
    right, wrong = steps_of(world, DATA), steps_of(world, DATA, no_reduction(UP))
    assert reduction_error(right[1], UP) < 1e-6
    assert reduction_error(wrong[1], UP) > 0.1


@pytest.mark.mpi(max_size=1)
def test_what_changes_between_steps_is_told(world: World) -> None:
    steps = steps_of(world, DATA, in_weights(UP))
    assert changed_between(steps[0], steps[1]) == [f"/model/{UP}"]
    assert not changed_between(steps[1], steps[2])
