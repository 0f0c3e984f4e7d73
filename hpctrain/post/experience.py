"""From prompts to a rollout: answers are written, rewarded, and compared with what was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.batches import Batches
from hpctrain.data.conversations import PromptSequences
from hpctrain.data.order import SampleOrder
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.policy import CALLS_AT_ONCE
from hpctrain.deck.sections.rank_partition import CRITIC, POLICY, REWARD
from hpctrain.deck.sections.rank_partition import REFERENCE as REFERENCE_MODEL
from hpctrain.engine.layout.model_placement import ModelPlacement
from hpctrain.generate.sampling import Sampling
from hpctrain.objective.dpo import REFERENCE
from hpctrain.objective.policy import ADVANTAGES, OLD, Estimate, divergence
from hpctrain.post.advantages import generalized_advantages, group_advantages, whitened
from hpctrain.post.critic_loss import RETURNS, VALUES
from hpctrain.post.reward_model import RewardModel
from hpctrain.post.rewards.process_rewards import TOGETHER
from hpctrain.post.rewards.reward_interface import Sample
from hpctrain.post.rewards.rewards import Rewards, Scores, agreed_scores
from hpctrain.post.rollout import Answer, AnswerRows, Rollout
from hpctrain.post.writer import AnswerWriter, NumberedPrompt

Scored = Callable[[Batches], Iterator[Tensor]]
"""What a model makes of all sequences, [n, s] each time: log-probabilities of targets, or values."""


@dataclass
class Experience:
    """What makes rollouts of a deck: who writes, what rewards, and what tells of each token its log-
    probability by the policy (`old`) and by the reference, and by the critic what is expected from there on.
    Of these a rank has what its `seat` gives it; what they find all know.
    """

    deck: Deck
    seat: ModelPlacement
    tokenizer: Tokenizer
    prompts: PromptSequences
    writer: AnswerWriter | None
    rewards: Rewards | None
    models: Mapping[str, tuple[RewardModel | None, float]]
    old: Scored | None
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
        answers, others = self._written(self.prompts, indices, places.tolist(), samples)
        rows = AnswerRows(answers, self.deck.batch.sequence)
        batches = Batches(rows, 0)
        each_by = {POLICY: self.old, REFERENCE_MODEL: self.reference, CRITIC: self.values}
        with self.seat.agreement():
            own = {name: torch.cat(list(by(batches))) for name, by in each_by.items() if by is not None}
            judged = self._judged(answers)
        found = {name: self.seat.broadcast_from(name, own.get(name)) for name in each_by}
        fields = {
            name: values
            for name, values in {OLD: found[POLICY], REFERENCE: found[REFERENCE_MODEL]}.items()
            if values is not None
        }
        rewarded = self._rewarded(answers, others, judged)
        scores = torch.tensor(rewarded.totals, dtype=torch.float64)
        if (expected := found[CRITIC]) is None:
            each = group_advantages(scores, samples, keys.scale)
            fields[ADVANTAGES] = (each.unsqueeze(1) * rows.answered).float()
        else:
            fields |= self._expected(rows, scores, fields, expected)
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

    def judged(
        self, prompts: PromptSequences, indices: Sequence[int], numbers: Sequence[int]
    ) -> tuple[list[Answer], Scores]:
        """An answer to each prompt of these indices, the draws keyed by these numbers, and their scores.
        Collective.
        """
        answers, others = self._written(prompts, indices, numbers, 1)
        with self.seat.agreement():
            judged = self._judged(answers)
        return answers, self._rewarded(answers, others, judged)

    def _written(
        self, prompts: PromptSequences, indices: Sequence[int], numbers: Sequence[int], samples: int
    ) -> tuple[list[Answer], list[Mapping[str, Any]]]:
        """So many answers to each prompt, and for each of them what its row has besides the prompt."""
        keys = self.deck.policy
        with self.seat.run_world.agreement():
            rows = [prompts.prompt(index) for index in indices]
        asked = [NumberedPrompt(number, tuple(ids)) for number, (ids, _) in zip(numbers, rows, strict=True)]
        sampling = Sampling(
            keys.tokens, keys.temperature, seed=self.deck.run.seed, samples=samples, stops=keys.stops
        )
        with self.seat.agreement():
            answers = [] if self.writer is None else self.writer.write(asked, sampling)
        others: list[Mapping[str, Any]] = [other for _, other in rows for _ in range(samples)]
        return self.seat.broadcast_from(POLICY, answers), others

    def _judged(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """The scores of those reward models that this rank has."""
        return {name: model.scores(answers) for name, (model, _) in self.models.items() if model is not None}

    def _rewarded(
        self,
        answers: Sequence[Answer],
        others: Sequence[Mapping[str, Any]],
        judged: Mapping[str, list[float]],
    ) -> Scores:
        parts: dict[str, list[float]] = {}
        totals = [0.0] * len(answers)
        if self.rewards is not None:
            samples = [self._sample(answer, other) for answer, other in zip(answers, others, strict=True)]
            at_once = CALLS_AT_ONCE * TOGETHER * self.deck.policy.processes
            found = agreed_scores(self.seat.run_world, self.rewards, samples, at_once)
            parts, totals = dict(found.parts), list(found.totals)
        if self.models:
            parts |= self.seat.broadcast_from(REWARD, judged)
        for name, (_, weight) in self.models.items():
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
