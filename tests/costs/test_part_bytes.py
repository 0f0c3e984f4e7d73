"""Bytes of saved activations compared with the published formulas, on every layout."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.costs.live_activations import LiveActivations
from hpctrain.costs.part_bytes import gpt_activation_bytes
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import blocks_of
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.random import DropoutSource
from tests.engines import small_deck, trainer


def statistics_bytes(shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool) -> int:
    """Return the bytes that the formula leaves out: statistics of two norms, and log-sum-exps of attention.

    The former are saved in the activations' 16-bit format on the CPU, the latter in fp32.
    """
    tokens = shape.sequence * micro_size
    norms = 2 * 2 * 2 * tokens // (tensor if sequence_parallel else 1)
    return norms + 4 * tokens * shape.heads // tensor


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("local", [False, True])
def test_bytes_of_a_layer_are_those_of_the_formula(world: World, dropout: float, local: bool) -> None:
    tensor = world.size
    if local and tensor == 1:
        return
    deck = small_deck(
        "precision.compute=bf16",
        f"model.dropout={dropout}",
        f"layout.tensor={tensor}",
        f"layout.sequence_parallel={str(local).lower()}",
    )
    engine = trainer(world, deck).engine
    shape, micro = engine.shape, 2
    rows = shape.sequence // tensor if local else shape.sequence
    x = torch.randn(rows, micro, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    source = DropoutSource(0, 0, torch.arange(micro), engine.positions) if dropout else None
    inputs = ModelInputs.of_tokens(
        torch.zeros(shape.sequence, micro, dtype=torch.int64), engine.positions, source
    )
    values = [bucket.values for bucket in engine.stage.buckets if bucket.values is not None]
    with LiveActivations(lambda: values) as saved:
        engine.model.run_layer(blocks_of(engine.model)[0], inputs, x)
    expected = gpt_activation_bytes(shape, micro, tensor, local)
    assert saved.peak == expected + statistics_bytes(shape, micro, tensor, local)
    sbh = shape.sequence * micro * shape.hidden
    if dropout:
        assert expected == (34 * sbh // tensor if local else sbh * 10 + 24 * sbh // tensor)


def test_a_storage_is_counted_once() -> None:
    x = torch.randn(8, 4, requires_grad=True)
    with LiveActivations(list) as saved:
        y = x.exp()
        (y * y[:, :]).sum()
    assert saved.peak == y.nbytes
