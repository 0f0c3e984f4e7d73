"""Choice of the reduction of a bucket by `communication.compress`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from hpctrain.deck.sections.communication import (
    Communication,
    OneBitTable,
    PowerSgdTable,
    RoundedTable,
    SignTable,
    TopKTable,
)
from hpctrain.deck.sections.optimizer import AdamWTable, OptimizerTable, SgdTable
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.between import HierarchicalReduction, bucket_over_group
from hpctrain.sharding.compression.codecs import RoundedCodec, SignCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.compression.majority import MajorityVote
from hpctrain.sharding.compression.one_bit import OneBitMomentum
from hpctrain.sharding.compression.power import PowerSgd
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.compression.warmed import WarmedUpReduction
from hpctrain.sharding.reducer import ExactReduction, GradientReduction


@dataclass(frozen=True)
class CompressionSettings:
    """Settings from which a compressed reduction is made.

    Attributes:
        keys: Section [communication], which names the method.
        rule: Table of the optimizer, whose momentum some methods apply before they reduce.
        seed: Seed of the run.
    """

    keys: Communication
    rule: OptimizerTable
    seed: int

    @property
    def momentum_after(self) -> int | None:
        """Number of updates after which reductions return gradients that include momentum; None for never.

        From then on the optimizer applies no momentum of its own.
        """
        form, rule = self.keys.compression, self.rule
        has_momentum = isinstance(rule, SgdTable) and rule.momentum > 0
        is_top_k = isinstance(form, TopKTable) and form.ratio < 1
        is_reduced = isinstance(form, OneBitTable) or (is_top_k and has_momentum)
        return self.keys.warmup if is_reduced else None


def make_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return the reduction of a bucket by the method that the settings name. Local."""
    method, warmup = METHODS[settings.keys.compress], settings.keys.warmup
    if method.sums_gradients and bucket.sharding.group.size == 1:
        return ExactReduction(bucket)
    reduction = _reduction_between_nodes(method, settings, bucket)
    return WarmedUpReduction(bucket, reduction, warmup) if method.sums_gradients and warmup else reduction


class CompressionMethod(NamedTuple):
    """Compression of gradients.

    Attributes:
        make: Function that makes the reduction of a bucket.
        sums_gradients: True if the result is the sum of gradients, so that exact sums replace it in the first
            updates and on single ranks. False if it is something else, such as a momentum.
    """

    make: Callable[[CompressionSettings, Bucket], GradientReduction]
    sums_gradients: bool = True


def _reduction_between_nodes(
    method: CompressionMethod, settings: CompressionSettings, bucket: Bucket
) -> GradientReduction:
    """Return a reduction that compresses only between nodes, if the bucket's group is divided by node."""
    nodes = bucket.sharding.nodes
    if nodes is None or nodes.inside.size == 1:
        return method.make(settings, bucket)
    if nodes.between.size == 1 and method.sums_gradients:
        return ExactReduction(bucket)
    exchanging_rank = nodes.assign_rank(bucket.layout.used_length)
    exchanges_here = exchanging_rank == nodes.inside.rank
    between = method.make(settings, bucket_over_group(bucket, nodes.between)) if exchanges_here else None
    return HierarchicalReduction(bucket, nodes.inside, exchanging_rank, between)


def _rounded_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    form = settings.keys.compression
    assert isinstance(form, RoundedTable)
    codec = RoundedCodec(cast("Literal['bf16', 'int8']", settings.keys.compress))
    return CompressedReduction(bucket, codec, form.error_feedback)


def _sign_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    form = settings.keys.compression
    assert isinstance(form, SignTable)
    return CompressedReduction(bucket, SignCodec(), True) if form.error_feedback else MajorityVote(bucket)


def _one_bit_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    assert isinstance(settings.rule, AdamWTable)
    return OneBitMomentum(bucket, settings.rule.beta1, settings.keys.warmup)


def _top_k_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return TopK, or an exact sum if it would send everything, or a single rank has no momentum."""
    form, rule = settings.keys.compression, settings.rule
    assert isinstance(form, TopKTable)
    momentum = rule.momentum if isinstance(rule, SgdTable) else 0.0
    if form.ratio == 1 or (bucket.sharding.group.size == 1 and not momentum):
        return ExactReduction(bucket)
    return TopK(bucket, form.ratio, momentum, settings.keys.warmup)


def _power_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    form = settings.keys.compression
    assert isinstance(form, PowerSgdTable)
    return PowerSgd(bucket, form.rank, settings.seed, form.error_feedback)


METHODS: Mapping[str, CompressionMethod] = {
    "none": CompressionMethod(lambda _, bucket: ExactReduction(bucket), sums_gradients=False),
    "bf16": CompressionMethod(_rounded_reduction),
    "int8": CompressionMethod(_rounded_reduction),
    "sign": CompressionMethod(_sign_reduction),
    "onebit": CompressionMethod(_one_bit_reduction, sums_gradients=False),
    "topk": CompressionMethod(_top_k_reduction, sums_gradients=False),
    "powersgd": CompressionMethod(_power_reduction),
}
"""Compression methods by `communication.compress`."""
