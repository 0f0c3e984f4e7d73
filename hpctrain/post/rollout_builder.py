"""Construction of rollouts: answers to prompts, their rewards, and the advantages of their tokens."""

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
from hpctrain.post.advantages import generalized_advantages, group_advantages, whiten
from hpctrain.post.critic_loss import RETURNS, VALUES
from hpctrain.post.reward_model import RewardModel
from hpctrain.post.rewards.process_rewards import REWARD_BATCH_SIZE
from hpctrain.post.rewards.reward_interface import Sample
from hpctrain.post.rewards.rewards import Rewards, Scores, score_on_all_ranks
from hpctrain.post.rollout import Answer, AnswerRows, Rollout
from hpctrain.post.writer import AnswerWriter, NumberedPrompt

SequenceScorer = Callable[[Batches], Iterator[Tensor]]
"""Yields a model's value of each token [n, s] of some sequences at a time: a log-probability or a value."""


@dataclass
class RolloutBuilder:
    """Builds the rollouts of a run.

    With dedicated ranks, a rank has only those models that its placement gives it. All ranks get the results.

    Attributes:
        deck: Deck of the run.
        placement: Models that this rank holds.
        tokenizer: Tokenizer of the prompts.
        prompts: Prompts of the training split.
        writer: Writer of answers; None on ranks without the policy.
        rewards: Rewards that score texts; None if there are none.
        reward_models: Reward models with their weights, by their names in metrics. A model is None on ranks
            that do not hold it.
        policy: Log-probabilities under the policy; None on ranks without it.
        reference: Log-probabilities under the reference; None on ranks without it.
        critic: Values of the critic; None on ranks without it.
        order: Order of the prompts.
    """

    deck: Deck
    placement: ModelPlacement
    tokenizer: Tokenizer
    prompts: PromptSequences
    writer: AnswerWriter | None
    rewards: Rewards | None
    reward_models: Mapping[str, tuple[RewardModel | None, float]]
    policy: SequenceScorer | None
    reference: SequenceScorer | None = None
    critic: SequenceScorer | None = None
    order: SampleOrder = field(init=False)

    def __post_init__(self) -> None:
        self.order = SampleOrder(self.prompts.count, self.deck.run.seed)

    def build(self, number: int) -> Rollout:
        """Return a rollout of the current policy. Collective.

        Args:
            number: Number of the rollout, which selects the prompts and the random numbers.

        Raises:
            HpctrainError: On all ranks if a sample has no reward. The message names the sample.
        """
        keys = self.deck.policy
        samples, answer_count = keys.samples or 1, keys.rollout or self.deck.batch.global_size
        prompt_count = answer_count // samples
        places = np.arange(number * prompt_count, (number + 1) * prompt_count)
        indices = self.order.at(places).tolist()
        answers, other_keys = self._write_answers(self.prompts, indices, places.tolist(), samples)
        rows = AnswerRows(answers, self.deck.batch.sequence)
        batches = Batches(rows, 0)
        scorers = {POLICY: self.policy, REFERENCE_MODEL: self.reference, CRITIC: self.critic}
        with self.placement.agreement():
            local_values = {name: torch.cat(list(each(batches))) for name, each in scorers.items() if each}
            model_scores = self._local_model_scores(answers)
        of_models = {name: self.placement.broadcast_from(name, local_values.get(name)) for name in scorers}
        log_probabilities = {OLD: of_models[POLICY], REFERENCE: of_models[REFERENCE_MODEL]}
        fields = {name: values for name, values in log_probabilities.items() if values is not None}
        scores = self._score_answers(answers, other_keys, model_scores)
        totals = torch.tensor(scores.totals, dtype=torch.float64)
        if (critic_values := of_models[CRITIC]) is None:
            advantages = group_advantages(totals, samples, keys.scale)
            fields[ADVANTAGES] = (advantages.unsqueeze(1) * rows.answer_mask).float()
        else:
            fields |= self._critic_fields(rows, totals, fields, critic_values)
        return Rollout(answers, rows, totals, fields, answer_metrics(answers, scores), scores.parts)

    def _critic_fields(
        self, rows: AnswerRows, scores: Tensor, fields: Mapping[str, Tensor], values: Tensor
    ) -> dict[str, Tensor]:
        """Return advantages, returns and old values of tokens, by the values [n, s] of a critic.

        The last token of an answer is rewarded with its score [n], and each token with minus `beta` times its
        divergence from the reference.
        """
        keys, answer_mask = self.deck.policy, rows.answer_mask
        values = values.double() * answer_mask
        rewards = torch.zeros_like(values)
        if REFERENCE in fields:
            estimate: Estimate = keys.kl or "k1"
            kl = divergence(fields[OLD].double(), fields[REFERENCE].double(), estimate)
            rewards -= self.deck.objective.beta * kl * answer_mask
        last = answer_mask.shape[1] - 1 - answer_mask.flip(1).int().argmax(1)
        rewards[torch.arange(len(scores)), last] += scores
        advantages = generalized_advantages(rewards, values, answer_mask, keys.gamma, keys.gae_lambda)
        returns = (advantages + values) * answer_mask
        if keys.whiten:
            advantages = whiten(advantages, answer_mask)
        return {ADVANTAGES: advantages.float(), RETURNS: returns.float(), VALUES: values.float()}

    def answer_once(
        self, prompts: PromptSequences, indices: Sequence[int], numbers: Sequence[int]
    ) -> tuple[list[Answer], Scores]:
        """Return one answer to each of some prompts, and the scores. Collective.

        Args:
            prompts: Source of the prompts.
            indices: Index of each prompt in the source.
            numbers: Number of each prompt, which selects its random numbers.
        """
        answers, other_keys = self._write_answers(prompts, indices, numbers, 1)
        with self.placement.agreement():
            model_scores = self._local_model_scores(answers)
        return answers, self._score_answers(answers, other_keys, model_scores)

    def _write_answers(
        self, prompts: PromptSequences, indices: Sequence[int], numbers: Sequence[int], samples: int
    ) -> tuple[list[Answer], list[Mapping[str, Any]]]:
        """Return `samples` answers to each prompt. Also return the other keys of each answer's row."""
        keys = self.deck.policy
        with self.placement.run_world.agreement():
            rows = [prompts.prompt(index) for index in indices]
        numbered = [
            NumberedPrompt(number, tuple(ids)) for number, (ids, _) in zip(numbers, rows, strict=True)
        ]
        sampling = Sampling(
            keys.tokens, keys.temperature, seed=self.deck.run.seed, samples=samples, stops=keys.stops
        )
        with self.placement.agreement():
            answers = [] if self.writer is None else self.writer.write(numbered, sampling)
        other_keys: list[Mapping[str, Any]] = [fields for _, fields in rows for _ in range(samples)]
        return self.placement.broadcast_from(POLICY, answers), other_keys

    def _local_model_scores(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """Return the scores of those reward models that this rank holds."""
        return {
            name: model.scores(answers)
            for name, (model, _) in self.reward_models.items()
            if model is not None
        }

    def _score_answers(
        self,
        answers: Sequence[Answer],
        other_keys: Sequence[Mapping[str, Any]],
        model_scores: Mapping[str, list[float]],
    ) -> Scores:
        """Return the scores of answers on all ranks, by `_local_model_scores` and the other rewards."""
        parts: dict[str, list[float]] = {}
        totals = [0.0] * len(answers)
        if self.rewards is not None:
            samples = [
                self._make_sample(answer, fields) for answer, fields in zip(answers, other_keys, strict=True)
            ]
            at_once = CALLS_AT_ONCE * REWARD_BATCH_SIZE * self.deck.policy.processes
            scores = score_on_all_ranks(self.placement.run_world, self.rewards, samples, at_once)
            parts, totals = dict(scores.parts), list(scores.totals)
        if self.reward_models:
            parts |= self.placement.broadcast_from(REWARD, model_scores)
        for name, (_, weight) in self.reward_models.items():
            totals = [total + weight * score for total, score in zip(totals, parts[name], strict=True)]
        return Scores(totals, parts)

    def _make_sample(self, answer: Answer, other_keys: Mapping[str, Any]) -> Sample:
        prompt = self.tokenizer.decode(answer.ids[: answer.prompt_length])
        numbers = answer.prompt_number, answer.sample_number
        return Sample(prompt, answer.text, other_keys, *numbers, answer.length)


def answer_metrics(answers: Sequence[Answer], scores: Scores) -> dict[str, float]:
    """Return the metrics of answers.

    These are the means of the rewards, `reward_deviation` (unbiased standard deviation), `length` (mean
    number of tokens) and `ended` (fraction that did not end because it was too long).
    """
    totals, count = np.array(scores.totals), len(answers)
    return {
        **scores.mean_rewards(),
        "reward_deviation": float(totals.std(ddof=1)) if count > 1 else 0.0,
        "length": sum(each.length for each in answers) / count,
        "ended": sum(each.finish_reason != "length" for each in answers) / count,
    }
