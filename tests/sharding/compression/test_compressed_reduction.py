"""Compare sums of codes with NumPy, without buckets, owners and bytes.

Tests of sharding/compression/blocks.py and sharding/compression/majority.py, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression import compressed_reduction
from hpctrain.sharding.compression.codecs import RoundedCodec, SignCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.compression.majority import MajorityVote
from tests.sharding.compression.given import ODD, Array, buckets_of, fill, given, own, summed


def rows_of(values: Array) -> Array:
    """Return the blocks of a parameter. Zeros fill the last one up."""
    return np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)


def counts_of(values: Array) -> Array:
    return np.array([min(BLOCK, len(values) - first) for first in range(0, len(values), BLOCK)], np.float32)


def sign(values: Array) -> Array:
    rows = rows_of(values)
    means = np.abs(rows).sum(1) / counts_of(values)
    return np.where(rows >= 0, means[:, None], -means[:, None]).reshape(-1)[: len(values)]


def int8(values: Array) -> Array:
    rows = rows_of(values)
    scales = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(rows / np.where(scales == 0, np.float32(1), scales))
    return (codes * scales).reshape(-1)[: len(values)]


def bf16(values: Array) -> Array:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


CODES = {
    "sign": (SignCodec(), sign),
    "int8": (RoundedCodec("int8"), int8),
    "bf16": (RoundedCodec("bf16"), bf16),
}


class Reference:
    """Sums of all ranks' gradients of one parameter."""

    def __init__(self, name: str, length: int, ranks: int, code, feedback: bool, returns: bool) -> None:
        self.name, self.length, self.code, self.feedback, self.returns = name, length, code, feedback, returns
        self.residuals = np.zeros((ranks, length), np.float32)
        self.own_residual = np.zeros(length, np.float32)

    def step(self, step: int) -> Array:
        total = np.zeros(self.length, np.float32)
        for rank, residual in enumerate(self.residuals):
            values = given(self.name, self.length, rank, step) + residual
            sent = self.code(values)
            if self.feedback:
                residual[:] = values - sent
            total += sent
        if not self.returns:
            return total
        total += self.own_residual
        sent = self.code(total)
        if self.feedback:
            self.own_residual = total - sent
        return sent


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("keys", [ODD, ("layout.zero=1",), (*ODD, "layout.zero=1")], ids=str)
@pytest.mark.parametrize("feedback", [True, False])
def test_sums_are_those_of_numpy(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, keys: tuple[str, ...], feedback: bool
) -> None:
    """Encode buckets in several pieces."""
    monkeypatch.setattr(compressed_reduction, "BLOCKS_AT_ONCE", 3)
    codec, code = CODES[name]
    for bucket in buckets_of(world, *keys):
        summation = CompressedReduction(bucket, codec, feedback)
        references = {
            s.parameter.shard.name: Reference(
                s.parameter.shard.name, s.length, world.size, code, feedback, "layout.zero=1" not in keys
            )
            for s in bucket.segments
        }
        for step in range(3):
            found = summed(bucket, summation, fill(bucket, world.rank, step))
            expected = own(bucket, {name: each.step(step) for name, each in references.items()})
            for parameter, values in expected.items():
                scale = float(np.abs(values).max(initial=0.0))
                # Where numpy and torch round a scale apart, an element may round to the next code.
                close = np.abs(found[parameter] - values) <= 1e-5 * scale
                assert close.sum() >= 0.99 * len(close), (step, parameter)
                assert scale > 0 or not found[parameter].any(), (step, parameter)
        for tensor in summation.state():
            reference = references[tensor.shard.name]
            part = slice(tensor.offset, tensor.offset + tensor.values.numel())
            mine = tensor.shard.start[0] == world.rank  # else the owner's, behind all ranks'
            kept = (reference.residuals[world.rank] if mine else reference.own_residual)[part]
            apart = np.abs(tensor.values.numpy() - kept)
            close = apart <= 1e-4 * np.abs(kept).max(initial=0) + 1e-9
            assert close.sum() >= 0.99 * len(close), tensor.kind


def vote(name: str, length: int, ranks: int, step: int) -> Array:
    votes, weighed = np.zeros(length), np.zeros(length, np.float32)
    together = np.zeros(length, np.float32)
    for rank in range(ranks):
        sent = sign(given(name, length, rank, step))
        votes += np.sign(sent)
        weighed += sent
        together += np.abs(sent)
    return np.where(np.where(votes == 0, weighed, votes) >= 0, together, -together)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("keys", [ODD, (*ODD, "layout.zero=1")], ids=str)
def test_the_majority_vote_decides_signs(world: World, keys: tuple[str, ...]) -> None:
    for bucket in buckets_of(world, *keys):
        found = summed(bucket, MajorityVote(bucket), fill(bucket, world.rank, 1))
        names = {s.parameter.shard.name: s.length for s in bucket.segments}
        expected = own(bucket, {name: vote(name, length, world.size, 1) for name, length in names.items()})
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
