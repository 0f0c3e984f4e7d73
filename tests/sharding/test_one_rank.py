"""Training with every stage of ZeRO and offload has the losses, gradients and parameters of one rank.

With the usual settings of AdamW, parameters cannot be compared, for two reasons:

- If a gradient is nearly zero, rounding decides its sign, and the update is a full step. An example are the
  biases of keys, on which softmax does not depend. With a larger epsilon, the update is a smooth function of
  the gradients, so that the effect of their rounding is bounded.
- With large steps, norms of these small models divide by almost zero, so that differences grow tenfold in
  three steps. Small steps avoid that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.memory.recompute import Recompute
from hpctrain.memory.scratch import ScratchFiles
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer

STEPS = 5
"""Enough that moments, the clipping and the order in which parameters are gathered have been used again."""
EPSILON = 1e-3
SIZES = (
    "model.layers=4",
    "batch.global_size=8",
    "batch.sequence=16",
    "learning_rate.peak=1e-3",
    f"optimizer.epsilon={EPSILON}",
)
FAMILIES = {"gpt2": (), "llama": LLAMA}

#: Relative error of one rounding in fp32.
UNIT = 2.0**-24
#: Of the largest gradient of its tensor, what the order of sums may change in any: some 128 roundings.
ROUNDING = 128 * UNIT

OPTIMIZER = ("memory.optimizer=disk", "memory.offload_buffer=12000")
PARAMETERS = ("memory.parameters=disk", *OPTIMIZER)
ACTIVATIONS = ("memory.activations=disk",)
TENSOR = ("layout.tensor=2", "layout.sequence_parallel=true")
ZB_H1 = ("layout.pipeline=2", "layout.schedule=zb-h1")
ZB_V = ("layout.pipeline=2", "layout.schedule=zb-v", "layout.chunks=2")

# By turns of gpt2, whose embeddings are tied and may lie on both ends of a pipeline, and of llama.
WAYS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "stage 0, activations in files": ("layout.zero=0", *ACTIVATIONS),
        "stage 1, optimizer in files": ("layout.zero=1", "memory.recompute=full", *OPTIMIZER),
        "stage 2, sliced": ("layout.zero=2", "memory.accumulate=sliced", "memory.recompute=sqrt"),
        "stage 3, all in files": ("layout.zero=3", "memory.recompute=3", *PARAMETERS, *ACTIVATIONS),
        "pipeline": (*ZB_H1, "memory.recompute=full", *ACTIVATIONS),
        "tensor": (*TENSOR, "memory.recompute=selective", *OPTIMIZER, *ACTIVATIONS),
    },
    4: {
        "stage 1, hybrid": ("layout.zero=1", "layout.zero_group=2", *OPTIMIZER),
        "stage 2, hybrid, sliced": ("layout.zero=2", "layout.zero_group=2", "memory.accumulate=sliced"),
        "stage 3, hybrid, in files": ("layout.zero=3", "layout.zero_group=2", *PARAMETERS),
        "stage 2, tensor": ("layout.zero=2", *TENSOR, "memory.recompute=selective", *ACTIVATIONS),
        "stage 2, pipeline": ("layout.zero=2", *ZB_H1, "memory.recompute=2", *OPTIMIZER),
        "stage 3, tensor": ("layout.zero=3", *TENSOR, "memory.recompute=sqrt", "memory.keep_gathered=1"),
        "stage 3, pipeline": ("layout.zero=3", *ZB_V, "memory.recompute=full", *PARAMETERS, *ACTIVATIONS),
        "stage 3, context": ("layout.zero=3", "layout.context=2", *ACTIVATIONS),
    },
}

EIGHT: dict[str, tuple[str, ...]] = {
    "tensor 2, pipeline 2, data 2": ("layout.tensor=2", "layout.pipeline=2"),
    "pipeline 2, context 2, data 2": ("layout.pipeline=2", "layout.context=2", "layout.schedule=interleaved"),
    "tensor 2, data 4 in twos": (*TENSOR, "layout.zero_group=2"),
}


@dataclass(frozen=True)
class Course:
    """Steps of one rank: losses, gradients of the last step, parameters, and tolerances."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    largest: dict[str, float]
    rates: float

    def bound(self, name: str) -> float:
        """Return a bound for a parameter's difference after steps whose gradients differ by at most `delta`.

        An update is rate * m / (sqrt(v) + epsilon), with means m of the gradients and v of their squares
        whose weights a and b sum to 1. Both m and sqrt(v) differ by at most delta, and |m| is at most
        sqrt(sum a^2/b) sqrt(v) by Cauchy and Schwarz. So the fraction differs by at most
        (1 + sqrt(sum a^2/b)) delta / epsilon. Besides, both runs round what they update in every step.
        """
        a, b = (
            [decay**age * (1 - decay) / (1 - decay**STEPS) for age in range(STEPS)] for decay in (0.9, 0.95)
        )
        ratio = sqrt(sum(x * x / y for x, y in zip(a, b, strict=True)))
        rounded = 2 * STEPS * UNIT * float(self.parameters[name].abs().max())
        return self.rates * (1 + ratio) * self.delta(name) / EPSILON + rounded

    def delta(self, name: str) -> float:
        """Return by how much a gradient may differ between layouts.

        Gradients of queries and keys pass through softmax's derivative, p (g - sum p g). Its terms are as
        large as the gradients of the values and nearly cancel, so the rounding of the values' gradients
        remains. The gradient of the keys' biases consists of nothing but this rounding.
        """
        terms = {name, re.sub(r"\.(query|key)\.", ".value.", name)}
        return ROUNDING * max(self.largest[each] for each in terms)


@cache
def one_rank(world: World, family: str) -> Course:
    """Return the steps of one rank on all ranks. Collective."""
    course = None
    if world.rank == 0:
        single = reference(world, small_deck(*FAMILIES[family], *SIZES))
        steps, largest = [], {}
        for _ in range(STEPS):
            steps += single.train(1)
            for name, gradient in single.gradients().items():
                largest[name] = max(largest.get(name, 0.0), float(gradient.abs().max()))
        course = Course(
            [step.loss for step in steps],
            single.gradients(),
            single.parameters(),
            largest,
            sum(step.learning_rate for step in steps),
        )
    shared: Course = world.everyone.broadcast_object(course)
    return shared


def trained(world: World, folder: Path, *overrides: str) -> tuple[Trainer, list[float]]:
    """Return the trainer after all steps. All activations are offloaded to files, however small they are."""
    # Data ranks have two micro-batches of a step at least.
    sizes = (*SIZES, f"batch.micro_size={1 if world.size > 2 else 2}", f"memory.offload_dir={folder}")
    training = trainer(world, small_deck(*sizes, *overrides))
    keeping = training.engine.stage.layer_context.saved_policy
    if isinstance(keeping, Recompute) and keeping.store is not None:
        keeping.store.smallest = 16
    return training, [step.loss for step in training.train(STEPS)]


def assert_is(training: Trainer, losses: list[float], course: Course, case: str) -> None:
    assert losses == pytest.approx(course.losses, rel=1e-6), case
    shards = {
        segment.parameter.shard.name: segment.parameter.shard
        for bucket in training.engine.stage.buckets
        for segment in bucket.segments
    }
    for name, gradient in training.gradients().items():
        difference = (gradient - shards[name].take(course.gradients[name])).abs().max()
        assert difference <= course.delta(name), (case, name)
    for name, values in training.parameters().items():
        difference = (values - shards[name].take(course.parameters[name])).abs().max()
        assert difference <= course.bound(name), (case, name)


def assert_written(scratch: Sequence[ScratchFiles], kind: str) -> None:
    """Check that some files of a kind have contents; a slice may be padding."""
    files = [file for each in scratch for file in each.folder.glob(f"{kind}-*")]
    assert any(file.read_bytes().strip(b"\0") for file in files), kind


@pytest.mark.mpi(min_size=2)
def test_steps_are_those_of_one_rank(world: World, mpi_tmp_path: Path) -> None:
    if world.size not in WAYS:
        pytest.skip(f"has no layout of {world.size} ranks")
    for number, (case, way) in enumerate(WAYS[world.size].items()):
        family = list(FAMILIES)[number % 2]
        training, losses = trained(world, mpi_tmp_path / str(number), *FAMILIES[family], *way)
        assert_is(training, losses, one_rank(world, family), case)
        engine = training.engine
        for kind in ("optimizer", "parameters", "activations"):
            if f"memory.{kind}=disk" in way:
                assert_written(engine.scratch, kind)
        engine.close()


@pytest.mark.eight
@pytest.mark.mpi(min_size=8)
@pytest.mark.parametrize("layout", EIGHT)
def test_all_stages_on_eight_ranks(world: World, mpi_tmp_path: Path, layout: str) -> None:
    """All stages have the same bits, and those of one rank except for rounding.

    Hybrid groups add what they have summed, so that stage 0, which adds rank by rank, has other bits.
    """
    if world.size != 8:
        pytest.skip(f"has no layout of {world.size} ranks")
    keys = EIGHT[layout]
    hybrid = "layout.zero_group=2" in keys
    first: dict[str, Tensor] = {}
    first_losses: list[float] = []
    for stage in range(1 if hybrid else 0, 4):
        training, losses = trained(world, mpi_tmp_path, *keys, f"layout.zero={stage}")
        if not first:
            assert_is(training, losses, one_rank(world, "gpt2"), layout)
            first, first_losses = training.parameters(), losses
        assert losses == first_losses, stage
        for name, values in training.parameters().items():
            assert torch.equal(values, first[name]), (stage, name)
