"""Choice of the reduction of a bucket by `communication.compress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

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
from hpctrain.sharding.compression.codecs import RoundedCodec, SignCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.compression.hierarchical_reduction import HierarchicalReduction, bucket_over_group
from hpctrain.sharding.compression.majority import MajorityVote
from hpctrain.sharding.compression.one_bit import OneBitMomentum
from hpctrain.sharding.compression.power import PowerSgd
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.compression.warm_up import WarmedUpReduction
from hpctrain.sharding.reducer import ExactReduction, GradientReduction, UnreducedGradients


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


SUMS = frozenset({"bf16", "int8", "sign", "powersgd"})
"""Values of `communication.compress` for which the result is the sum of gradients.

During the warmup and on a single rank, exact sums are used instead; on a single node, too, if only messages
between nodes are compressed. The result of other methods is something else, such as a momentum.
"""


def make_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return the reduction of a bucket by the method that the settings name. Local."""
    is_sum, warmup = settings.keys.compress in SUMS, settings.keys.warmup
    if is_sum and bucket.sharding.group.size == 1:
        return ExactReduction(bucket)
    reduction = _reduction_between_nodes(settings, bucket)
    return WarmedUpReduction(bucket, reduction, warmup) if is_sum and warmup else reduction


def _reduction_between_nodes(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return a reduction that compresses only between nodes, if the bucket's group is divided by node."""
    nodes = bucket.sharding.nodes
    if nodes is None or nodes.inside.size == 1:
        return _reduction_over_group(settings, bucket)
    if nodes.between.size == 1 and settings.keys.compress in SUMS:
        return ExactReduction(bucket)
    exchanging_rank = nodes.assign_rank(bucket.layout.used_length)
    between: GradientReduction = UnreducedGradients()
    if exchanging_rank == nodes.inside.rank:
        between = _reduction_over_group(settings, bucket_over_group(bucket, nodes.between))
    return HierarchicalReduction(bucket, nodes.inside, exchanging_rank, between)


def _reduction_over_group(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return a reduction that compresses between all ranks of the bucket's group, from the first update on.

    It is exact without compression, or if "topk" would send everything or has no other rank and no momentum.
    """
    keys, rule = settings.keys, settings.rule
    match keys.compression:
        case RoundedTable(error_feedback=feedback):
            codec = RoundedCodec(cast("Literal['bf16', 'int8']", keys.compress))
            return CompressedReduction(bucket, codec, feedback)
        case SignTable(error_feedback=feedback):
            return CompressedReduction(bucket, SignCodec(), True) if feedback else MajorityVote(bucket)
        case OneBitTable():
            assert isinstance(rule, AdamWTable)
            return OneBitMomentum(bucket, rule.beta1, keys.warmup)
        case TopKTable(ratio=ratio):
            momentum = rule.momentum if isinstance(rule, SgdTable) else 0.0
            if ratio < 1 and (bucket.sharding.group.size > 1 or momentum):
                return TopK(bucket, ratio, momentum, keys.warmup)
        case PowerSgdTable(rank=rank, error_feedback=feedback):
            return PowerSgd(bucket, rank, settings.seed, feedback)
    return ExactReduction(bucket)
