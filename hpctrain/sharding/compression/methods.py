"""Choice of the reduction of a bucket by `communication.compress`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.between import between_nodes
from hpctrain.sharding.compression.codecs import RoundedCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.compression.majority import sign_sum
from hpctrain.sharding.compression.one_bit import OneBitMomentum
from hpctrain.sharding.compression.power import PowerSgd
from hpctrain.sharding.compression.settings import CompressionSettings
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.compression.warmed import with_exact_warmup
from hpctrain.sharding.reducer import ExactReduction, GradientReduction

METHODS: Mapping[str, Callable[[CompressionSettings, Bucket], GradientReduction]] = {
    "none": lambda _, bucket: ExactReduction(bucket),
    "bf16": with_exact_warmup(CompressedReduction.of(RoundedCodec("bf16"))),
    "int8": with_exact_warmup(CompressedReduction.of(RoundedCodec("int8"))),
    "sign": with_exact_warmup(sign_sum),
    "onebit": between_nodes(OneBitMomentum.of, of_gradients=False),
    "topk": between_nodes(TopK.of, of_gradients=False),
    "powersgd": with_exact_warmup(PowerSgd.of),
}
"""Functions that make the GradientReduction of a bucket, by `communication.compress`."""


def make_reduction(settings: CompressionSettings, bucket: Bucket) -> GradientReduction:
    """Return the reduction of a bucket by the method that the settings name. Local."""
    return METHODS[settings.keys.compress](settings, bucket)
