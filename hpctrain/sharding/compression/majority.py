"""Majority votes on the sign of each element's gradient (arXiv 1802.04434)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.codecs import SignCodec, pack_signs, sign_values, unpack_signs
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction


class MajorityVote(CompressedReduction):
    """Sum that is the sign for which most ranks voted, times the sum of their blocks' scales.

    It is as large as the sum would be if all ranks agreed, so norms and clipping keep their meaning. A tie
    goes to the side with the larger sum of scales, else to the positive one. A rank with only zeros in a
    block does not vote. There is no error feedback, so signs of a biased gradient remain biased (arXiv
    1901.09847).
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, SignCodec(), feedback=False)

    @override
    def add(self, codes: Sequence[Tensor]) -> Tensor:
        count = codes[0].numel() // (SignCodec.width + SignCodec.scale)
        votes = torch.zeros((count, BLOCK), device=codes[0].device)
        weighted_votes, scale_sums = torch.zeros_like(votes), votes.new_zeros(len(votes))
        for code in codes:
            positive, scales = unpack_signs(code)
            vote = sign_values(positive, scales)
            scale_sums += scales
            weighted_votes += vote
            votes += vote.sign_()
        return sign_values(torch.where(votes == 0, weighted_votes, votes) >= 0, scale_sums).view(-1)

    @override
    def encode_sums(self, sums: Tensor, counts: Tensor) -> Tensor:
        rows = sums.view(-1, BLOCK)
        return pack_signs(rows >= 0, rows.abs().amax(1))
