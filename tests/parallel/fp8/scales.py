"""What runs in 8 bits scale their matrices by, for comparisons of one run with another."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import patch

import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.fp8.quantized_matmul import Dims, Kind, QuantizedMatmul
from tests.engines import LLAMA, Trainer, small_deck, trainer

KEYS = (
    *LLAMA,
    "model.layers=4",
    "model.tied=false",
    "model.key_value_heads=4",
    "model.mlp=64",
    "batch.sequence=16",
    "layout.schedule=1f1b",
    "precision.compute=fp8",
)
DELAYED = ("precision.fp8=delayed", "precision.fp8_history=2")

Maxima = dict[str, list[Tensor]]
"""By name those of a history, after each step."""

Scales = set[tuple[str, Kind, Dims, bytes]]
"""Of which weights' product, of what, lying how, and the scales themselves, of a micro-batch."""


def delayed_products(run: Trainer) -> Iterable[DelayedMatmul]:
    """All of this rank's."""
    return (
        each for each in run.engine.stage.module_state.statistics_users if isinstance(each, DelayedMatmul)
    )


def maxima(run: Trainer, steps: int = 3) -> Maxima:
    """Histories of this rank's matrices in further steps."""
    found: Maxima = {}
    for _ in range(steps):
        run.train_step()
        for product in delayed_products(run):
            for kind, shard, values in product.state():
                found.setdefault(f"{kind}/{shard.name}", []).append(values.clone())
    return found


def maxima_of(world: World, *keys: str, steps: int = 3) -> Maxima:
    """The same of a run from the start."""
    return maxima(trainer(world, small_deck(*KEYS, *DELAYED, *keys)), steps)


def alike(found: Maxima, expected: Maxima, exactly: bool = True) -> bool:
    """Whether the maxima that a rank has found are those expected, or give the same scales at least."""
    assert found and found.keys() <= expected.keys()
    assert all(bool((values[-1] > 0).all()) for values in expected.values())
    pairs = [pair for name in found for pair in zip(found[name], expected[name], strict=True)]
    if exactly:
        return all(torch.equal(*pair) for pair in pairs)
    return all(torch.equal(*(_exponent(maximum) for maximum in pair)) for pair in pairs)


def _exponent(maximum: Tensor) -> Tensor:
    return maximum.amax().log2().ceil()


def scales_of(world: World, *keys: str, steps: int = 2) -> Scales:
    """All scales that all ranks quantize by in steps from the start. Collective."""
    own: Scales = set()
    quantize = QuantizedMatmul._quantize

    def noted(
        self: QuantizedMatmul, kind: Kind, matrix: Tensor, dims: Dims, *how: bool, **named: bool
    ) -> QuantizedTensor:
        made = quantize(self, kind, matrix, dims, *how, **named)
        own.add((self.weights[0].shard.name, kind, dims, made.fp32_scales.numpy().tobytes()))
        return made

    with patch.object(QuantizedMatmul, "_quantize", noted):
        run = trainer(world, small_deck(*KEYS, *keys))
        run.train(steps)
    return set().union(*world.everyone.all_gather_object(own))
