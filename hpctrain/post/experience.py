"""From prompts to a rollout: answers are written, rewarded, and compared with what was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.conversations import PromptSource
from hpctrain.data.order import SampleOrder
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.policy import CALLS_AT_ONCE
from hpctrain.deck.schema import Deck
from hpctrain.generate.sampling import Sampling
from hpctrain.objective.dpo import REFERENCE
from hpctrain.objective.policy import ADVANTAGES, OLD, Estimate, divergence
from hpctrain.objective.value import RETURNS, VALUES
from hpctrain.post.advantages import generalized_advantages, group_advantages, whitened
from hpctrain.post.reward_model import RewardModel
from hpctrain.post.rewards.in_processes import TOGETHER
from hpctrain.post.rewards.reward import Sample
from hpctrain.post.rewards.rewards import Rewards, Scores, agreed_scores
from hpctrain.post.rollout import Answer, AnswerRows, Rollout
from hpctrain.post.writer import Asked, Writer

Scored = Callable[[Batches], Iterator[Tensor]]
"""What a model makes of all sequences, [n, s] each time: log-probabilities of targets, or values."""


@dataclass
class Experience:
    """What makes rollouts of a deck: who writes, what rewards, and what tells of each token its log-
    probability by the policy (`old`) and by the reference, and by the critic what is expected from there on.
    """

    deck: Deck
    world: World
    tokenizer: Tokenizer
    prompts: PromptSource
    writer: Writer
    rewards: Rewards | None
    models: Mapping[str, tuple[RewardModel, float]]
    old: Scored
    reference: Scored | None = None
    values: Scored | None = None
    order: SampleOrder = field(init=False)

    def __post_init__(self) -> None:
        self.order = SampleOrder(self.prompts.count, self.deck.run.seed)

    def gather(self, number: int) -> Rollout:
        """The rollout of that number, by the policy as it is. Collective; HpctrainError, with the sample,
        where a reward fails.
        """
        keys = self.deck.policy
        samples, rollout = keys.samples or 1, keys.rollout or self.deck.batch.global_size
        count = rollout // samples
        places = np.arange(number * count, (number + 1) * count)
        indices = self.order.at(places).tolist()
        answers, rewarded = self.written(self.prompts, indices, places.tolist(), samples)
        rows = AnswerRows(answers, self.deck.batch.sequence)
        batches = Batches(rows, 0)
        fields = {OLD: torch.cat(list(self.old(batches)))}
        if self.reference is not None:
            fields[REFERENCE] = torch.cat(list(self.reference(batches)))
        scores = torch.tensor(rewarded.totals, dtype=torch.float64)
        if self.values is None:
            each = group_advantages(scores, samples, keys.scale)
            fields[ADVANTAGES] = (each.unsqueeze(1) * rows.answered).float()
        else:
            fields |= self._expected(rows, scores, fields, torch.cat(list(self.values(batches))))
        figures = figures_of(answers, rewarded)
        return Rollout(answers, rows, scores, fields, figures, rewarded.parts)

    def _expected(
        self, rows: AnswerRows, scores: Tensor, fields: Mapping[str, Tensor], values: Tensor
    ) -> dict[str, Tensor]:
        """Advantages and returns by what the critic expects of each token: the score comes with the last one,
        and every one costs its divergence from the reference.
        """
        keys, answered = self.deck.policy, rows.answered
        values = values.double() * answered
        rewards = torch.zeros_like(values)
        if REFERENCE in fields:
            estimate: Estimate = keys.kl or "k1"
            apart = divergence(fields[OLD].double(), fields[REFERENCE].double(), estimate)
            rewards -= self.deck.objective.beta * apart * answered
        last = answered.shape[1] - 1 - answered.flip(1).int().argmax(1)
        rewards[torch.arange(len(scores)), last] += scores
        advantages = generalized_advantages(rewards, values, answered, keys.gamma, keys.gae_lambda)
        returns = (advantages + values) * answered
        if keys.whiten:
            advantages = whitened(advantages, answered)
        return {ADVANTAGES: advantages.float(), RETURNS: returns.float(), VALUES: values.float()}

    def written(
        self, prompts: PromptSource, indices: Sequence[int], numbers: Sequence[int], samples: int
    ) -> tuple[list[Answer], Scores]:
        """Answers to prompts of these indices, the draws keyed by these numbers, and their scores.
        Collective.
        """
        keys = self.deck.policy
        with self.world.agreement():
            rows = [prompts.prompt(index) for index in indices]
        asked = [Asked(number, tuple(ids)) for number, (ids, _) in zip(numbers, rows, strict=True)]
        sampling = Sampling(keys.tokens, 1.0, seed=self.deck.run.seed, samples=samples, stops=keys.stops)
        answers = self.writer.write(asked, sampling)
        others = [other for _, other in rows for _ in range(samples)]
        return answers, self._rewarded(answers, others)

    def _rewarded(self, answers: Sequence[Answer], others: Sequence[Mapping[str, Any]]) -> Scores:
        parts: dict[str, list[float]] = {}
        totals = [0.0] * len(answers)
        if self.rewards is not None:
            samples = [self._sample(answer, other) for answer, other in zip(answers, others, strict=True)]
            at_once = CALLS_AT_ONCE * TOGETHER * self.deck.policy.processes
            found = agreed_scores(self.world, self.rewards, samples, at_once)
            parts, totals = dict(found.parts), list(found.totals)
        for name, (model, weight) in self.models.items():
            parts[name] = model.scores(answers)
            totals = [total + weight * score for total, score in zip(totals, parts[name], strict=True)]
        return Scores(totals, parts)

    def _sample(self, answer: Answer, others: Mapping[str, Any]) -> Sample:
        prompt = self.tokenizer.decode(answer.ids[: len(answer.ids) - answer.written])
        return Sample(prompt, answer.text, others, answer.number, answer.sample, answer.written)


def figures_of(answers: Sequence[Answer], scores: Scores) -> dict[str, float]:
    """Of answers: their mean reward, and of each reward where there are several, its deviation, how many
    tokens they have, and the share that ended by themselves.
    """
    totals, count = np.array(scores.totals), len(answers)
    return {
        **scores.figures(),
        "reward_deviation": float(totals.std(ddof=1)) if count > 1 else 0.0,
        "length": sum(each.written for each in answers) / count,
        "ended": sum(each.why != "length" for each in answers) / count,
    }
