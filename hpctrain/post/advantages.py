"""Advantages of the tokens of answers: by how much they were better than expected.

Tensors are [n, s], fp32 or fp64. `answer_mask` is True at the positions that predict a token of the answer.
In each row these positions are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, answer_mask: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438).

    The advantage of a token is the sum over later tokens k of (gamma lambda)^k (r + gamma V' - V). V' is the
    value of the next token, and 0 after the last one.

    Args:
        rewards: Reward r of each token [n, s].
        values: Values V of the critic [n, s].
        answer_mask: Positions that predict a token of an answer [n, s].
        gamma: Discount of later rewards.
        gae_lambda: Discount of later errors of the critic.

    Returns:
        Advantages [n, s], 0 outside of answers.
    """
    advantages = torch.zeros_like(values)
    advantage, next_value = values.new_zeros(len(values)), values.new_zeros(len(values))
    for position in range(values.shape[1] - 1, -1, -1):
        in_answer = answer_mask[:, position]
        error = rewards[:, position] + gamma * next_value - values[:, position]
        advantage = torch.where(in_answer, error + gamma * gae_lambda * advantage, 0.0)
        next_value = torch.where(in_answer, values[:, position], 0.0)
        advantages[:, position] = advantage
    return advantages


def whiten(advantages: Tensor, answer_mask: Tensor) -> Tensor:
    """Return advantages [n, s] with mean 0 and unbiased standard deviation 1 over all tokens of answers.

    The advantage of a single token is returned as it is. Positions outside of answers get 0.
    """
    of_answers = advantages[answer_mask]
    if len(of_answers) < 2:
        return advantages * answer_mask
    return (advantages - of_answers.mean()) / (of_answers.std() + _EPSILON) * answer_mask


def group_advantages(scores: Tensor, samples: int, scale: bool) -> Tensor:
    """Return how far each score is above the mean of its group (GRPO, arXiv 2402.03300).

    Args:
        scores: Scores of answers [n]. Each `samples` of them belong to the same prompt and are a group.
        samples: Number of answers of each group. With 1, all advantages are 0.
        scale: True to divide by the unbiased standard deviation of the group.

    Returns:
        Advantages of answers [n].
    """
    groups = scores.view(-1, samples)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale and samples > 1:
        advantages = advantages / (groups.std(1, keepdim=True) + _EPSILON)
    return advantages.flatten()


_EPSILON = 1e-6
"""Added to standard deviations, which are 0 if all values are equal."""
