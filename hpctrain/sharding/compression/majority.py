"""Majority votes: of each element's gradient the sign that most ranks have (arXiv 1802.04434)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import SignTable
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.codecs import Sign, of_signs, signed, signs
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction


class MajorityVote(CompressedReduction):
    """The sum of an element is the sign that most ranks voted for, times the sum of their blocks' scales.

    It is as large as the sum would be if all ranks agreed, so that norms and clipping mean what they do
    elsewhere. A tie goes to the side whose scales are larger together, else to the positive one. Who has
    nothing but zeros in a block does not vote. What is lost is not kept: signs of a biased gradient stay
    biased (arXiv 1901.09847).
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, Sign(), feedback=False)

    def add(self, codes: Sequence[Tensor]) -> Tensor:
        """See CompressedReduction. Of a code by itself, what it stands for."""
        votes = torch.zeros((codes[0].numel() // (Sign.width + Sign.scale), BLOCK), device=codes[0].device)
        weighed, together = torch.zeros_like(votes), votes.new_zeros(len(votes))
        for code in codes:
            positive, scales = of_signs(code)
            vote = signed(positive, scales)
            together += scales
            weighed += vote
            votes += vote.sign_()
        return signed(torch.where(votes == 0, weighed, votes) >= 0, together).view(-1)

    def encode_sums(self, sums: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG002
        """See CompressedReduction: a block's sums differ in nothing but their sign."""
        rows = sums.view(-1, BLOCK)
        return signs(rows >= 0, rows.abs().amax(1))


def sign_sum(deck: Deck, bucket: Bucket) -> CompressedReduction:
    """Sums of signs whose errors are fed back, or without `error_feedback` majority votes."""
    form = deck.communication.compression
    assert isinstance(form, SignTable)
    return CompressedReduction(bucket, Sign(), True) if form.error_feedback else MajorityVote(bucket)
