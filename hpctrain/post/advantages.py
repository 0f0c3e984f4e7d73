"""What each token of an answer was worth beyond what was expected of it.

All of [n, s], fp32 or fp64, where `answered` says which places predict a token of an answer, without gaps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, answered: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimation (arXiv 1506.02438): sums of (gamma lambda)^k times how wrong the
    critic's `values` were k tokens later, r + gamma V' - V, where behind the last token there is nothing.
    """
    found = torch.zeros_like(values)
    ahead, next_value = values.new_zeros(len(values)), values.new_zeros(len(values))
    for place in range(values.shape[1] - 1, -1, -1):
        here = answered[:, place]
        wrong = rewards[:, place] + gamma * next_value - values[:, place]
        ahead = torch.where(here, wrong + gamma * gae_lambda * ahead, 0.0)
        next_value = torch.where(here, values[:, place], 0.0)
        found[:, place] = ahead
    return found


def whitened(advantages: Tensor, answered: Tensor) -> Tensor:
    """With mean 0 and deviation 1 (unbiased) over all tokens of answers; of a single one as it is."""
    taken = advantages[answered]
    if len(taken) < 2:
        return advantages * answered
    return (advantages - taken.mean()) / (taken.std() + _SMALL) * answered


def group_advantages(scores: Tensor, samples: int, scale: bool) -> Tensor:
    """Of answers by their scores [n], each `samples` of them of one prompt: by how much each is above the
    mean of its group, divided by the group's deviation (unbiased) where `scale` says so (arXiv 2402.03300).
    One alone has nothing to be compared with, and is worth nothing.
    """
    groups = scores.view(-1, samples)
    found = groups - groups.mean(1, keepdim=True)
    if scale and samples > 1:
        found = found / (groups.std(1, keepdim=True) + _SMALL)
    return found.flatten()


_SMALL = 1e-6
"""So that where all are alike nothing is divided by 0."""
