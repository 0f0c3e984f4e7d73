"""Majority votes: of each element's gradient the sign that most ranks have (arXiv 1802.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.deck.schema import Deck
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.codecs import Sign, of_signs, signs
from hpctrain.sharding.compression.compressed_sum import CompressedSum


class MajorityVote(CompressedSum):
    """The sum of an element is the sign that most ranks voted for, times the sum of their blocks' scales.

    It is as large as the sum would be if all ranks agreed, so that norms and clipping mean what they do
    elsewhere. A tie goes to the side whose scales are larger together, else to the positive one. Who has
    nothing but zeros in a block does not vote. What is lost is not kept: signs of a biased gradient stay
    biased (arXiv 1901.09847).
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, Sign(), feedback=False)

    def _total(self, codes: Tensor) -> Tensor:
        positive, scales = self._decided(codes)
        total = torch.where(positive, scales.unsqueeze(1), -scales.unsqueeze(1)).view(-1)
        return self.own.clear_tails(total)

    def _code_of_total(self, codes: Tensor) -> Tensor:
        return signs(*self._decided(codes))

    def _decided(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's blocks the signs that won, and the scales."""
        votes = torch.zeros((self.own.count, BLOCK), device=codes.device)
        weighed, together = torch.zeros_like(votes), torch.zeros(self.own.count, device=codes.device)
        for code in codes:
            positive, scales = of_signs(code)
            vote = torch.where(positive, scales.unsqueeze(1), -scales.unsqueeze(1))
            together += scales
            weighed += vote
            votes += vote.sign_()
        return torch.where(votes == 0, weighed, votes) >= 0, together


def sign_sum(deck: Deck, bucket: Bucket) -> CompressedSum:
    """Sums of signs whose errors are fed back, or without `error_feedback` majority votes."""
    return CompressedSum(bucket, Sign(), True) if deck.communication.error_feedback else MajorityVote(bucket)
