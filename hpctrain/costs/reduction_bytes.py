"""Bytes of memory that sums of gradients use while they are in flight, without gradients and sums.

A new GradientReduction registers its bytes in `reduction_bytes`, and a new Codec in `codec_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch

from hpctrain.comm.group import Group
from hpctrain.costs.compressed_bytes import compress_peak
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.codecs import Codec, Int4Codec, RoundedCodec, SignCodec
from hpctrain.sharding.compression.compressed_reduction import CodedSum
from hpctrain.sharding.compression.hierarchical_reduction import HierarchicalReduction
from hpctrain.sharding.compression.one_bit import OneBitMomentum
from hpctrain.sharding.compression.power import PowerSgd, block_elements
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.compression.warm_up import WarmedUpReduction
from hpctrain.sharding.local_steps.local_steps import LocalSteps
from hpctrain.sharding.local_steps.outer_format import coded_sum
from hpctrain.sharding.reducer import ExactReduction, GradientReduction, UnreducedGradients
from hpctrain.sharding.replica_sync import ReplicaSync
from hpctrain.sharding.synchronize import GradientSynchronizer


def synchronizer_bytes(synchronizer: GradientSynchronizer) -> int:
    """Return the bytes of temporary memory of a GradientSynchronizer on this rank.

    At most two reductions are in flight at the same time. Transfers between replicas may be in flight, too.
    """
    two = sorted(reduction_bytes(each.reduction) for each in synchronizer.reducers.values())[-2:]
    return sum(two) + _replica_bytes(synchronizer.replica_sync)


def _replica_bytes(replica_sync: ReplicaSync) -> int:
    """Return the bytes that transfers between replicas use while gradients are summed."""
    if not isinstance(replica_sync, LocalSteps) or not replica_sync.schedule.delay:
        return 0
    schedule, group = replica_sync.schedule, replica_sync.buckets[0].sharding.replicas
    at_once = min(schedule.fragments, -(-schedule.delay * schedule.fragments // schedule.local_steps))
    needs = (
        sum(_difference_bytes(group, piece.lengths, replica_sync.codec) for piece in each)
        for each in replica_sync.fragments
    )
    return sum(sorted(needs)[-at_once:])


def _difference_bytes(group: Group, lengths: Sequence[int], codec: Codec | None) -> int:
    """Return the bytes of `outer_format.start_sum` of values with `lengths` elements of each parameter."""
    coded = coded_sum(group, lengths, codec)
    if coded is None:
        return group.host.scratch_bytes(sum(lengths), torch.float32.itemsize)
    return reduction_bytes(coded)


@singledispatch
def reduction_bytes(reduction: GradientReduction | CodedSum) -> int:
    """Return the bytes of memory that a sum uses while it is in flight."""
    raise NotImplementedError(f"reduction_bytes of {type(reduction).__name__}")


@reduction_bytes.register
def _exact_bytes(reduction: ExactReduction) -> int:
    # Reductions in host memory receive into memory of their own.
    bucket, is_split = reduction.bucket, reduction.bucket.sharding.zero > 0
    sizes = bucket.layout.sizes if is_split else None
    most = bucket.length if sizes is None else max(sizes) * reduction.group.size
    return reduction.group.host.scratch_bytes(most, bucket.gradient_dtype.itemsize, is_split)


@reduction_bytes.register
def _unreduced_bytes(_: UnreducedGradients) -> int:
    return 0


@reduction_bytes.register
def _warmed_up_bytes(reduction: WarmedUpReduction) -> int:
    return max(reduction_bytes(reduction.exact), reduction_bytes(reduction.reduction))


@reduction_bytes.register
def _hierarchical_bytes(reduction: HierarchicalReduction) -> int:
    bucket = reduction.bucket
    received = reduction.inside.host.scratch_bytes(bucket.length, bucket.gradient_dtype.itemsize)
    return max(received, reduction_bytes(reduction.between))


@reduction_bytes.register
def _coded_bytes(coded: CodedSum) -> int:
    """Return the bytes of codes, of values or sums, of this rank's own sums, and of encoding.

    Up to three buffers of codes exist at once: sent codes, received ones, and complete ones. Values or sums
    exist with two of them.
    """
    blocks = coded.blocks
    code, has_values = coded.code_bytes(blocks.count), coded.returns or coded.residual is None
    values = 4 * blocks.elements if has_values else 0
    encoding = 2 * codec_bytes(coded.codec, min(blocks.count, coded.at_once) * BLOCK)
    return max(2 * code + values, 3 * code) + 4 * coded.owned_blocks.elements + encoding


@reduction_bytes.register
def _one_bit_bytes(reduction: OneBitMomentum) -> int:
    if reduction.signs is None:
        return 0
    bucket = reduction.bucket
    wide = 0 if bucket.gradient_dtype == torch.float32 else 4 * bucket.length
    return max(reduction_bytes(reduction.exact), reduction_bytes(reduction.signs) + wide)


@reduction_bytes.register
def _top_k_bytes(reduction: TopK) -> int:
    """Return the bytes of messages, and of the search in the largest parameter or the sums.

    Messages are elements and indices of all ranks. The search takes magnitudes and, since torch sorts on a
    CPU, pairs of 16 bytes.
    """
    bucket, ranks = reduction.bucket, reduction.group.size
    largest = max((length for _, length, _ in reduction.parts), default=0)
    summed = 0 if bucket.gradient_dtype == torch.float32 else 4 * bucket.length
    chosen = 8 * reduction.sent * (2 + ranks) + max(20 * largest, summed)
    exact = reduction_bytes(reduction.exact) if reduction.warmup else 0
    return max(exact, chosen if ranks > 1 else 0)


@reduction_bytes.register
def _power_bytes(reduction: PowerSgd) -> int:
    """Return the bytes of messages, factors in fp32 and fp64, a block of the result, and received sums."""
    group, elements = reduction.group, sum(stack.elements for stack in reduction.stacks)
    words = 4 * sum(reduction.messages) + reduction.fresh.numel()
    words += min(elements, block_elements(group.computes_on)) + (0 if reduction.feedback else elements)
    return 4 * words + max(group.host.scratch_bytes(each, 4) for each in reduction.messages)


@singledispatch
def codec_bytes(codec: Codec, elements: int) -> int:
    """Return the largest amount of memory that encoding or decoding so many elements takes, in bytes."""
    raise NotImplementedError(f"codec_bytes of {type(codec).__name__}")


@codec_bytes.register
def _rounded_bytes(codec: RoundedCodec, elements: int) -> int:
    return max(compress_peak(elements, 4, codec.form), (4 if codec.form == "bf16" else 8) * elements)


@codec_bytes.register
def _sign_bytes(_: SignCodec, elements: int) -> int:
    # Values in fp32, then bytes, and an int64 number for each eight elements.
    return 4 * elements + 3 * elements


@codec_bytes.register
def _int4_bytes(_: Int4Codec, elements: int) -> int:
    return 8 * elements  # quotients and rounded numbers in fp32, or numbers in two formats
