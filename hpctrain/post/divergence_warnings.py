"""Warnings in the log of rank 0 about a policy that diverges, repeated at growing intervals."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, log
from statistics import fmean

from typing_extensions import override

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import CRITIC
from hpctrain.text import counted
from hpctrain.train.hook import Hook, StepDone

WINDOW = 20
"""Number of steps whose rewards are compared. A symptom that is absent for longer than this has ended. One
that lasts is reported again after this many steps, then after twice as many, and so on.
"""

MAX_POLICY_DIVERGENCE = 0.5
"""Divergence, in nats per token, from the policy that sampled the answers. Stable runs stay below 0.05."""

LOWER_RATE = "a lower learning_rate.peak"


@dataclass
class _Symptom:
    """Steps of a symptom: the first one, the last one, and the one from which on it is reported again."""

    first_step: int
    last_step: int
    next_report: int


class DivergenceWarnings(Hook):
    """Hook that checks the metrics of each step of a policy for symptoms of divergence.

    A resumed run starts without a history of earlier steps.

    Attributes:
        rank: Rank of this process. Only rank 0 warns.
        beta: Weight of the divergence from the reference in the loss or the reward.
        max_kl: Divergence from the reference, in nats per token, above which it warns. It is half of the
            entropy of a uniform distribution over the tokens.
    """

    def __init__(self, deck: Deck, rank: int) -> None:
        self.rank, self.beta = rank, deck.objective.beta
        self.max_kl = 0.5 * log(deck.runtime_choices.tokenizer_tokens or deck.model.vocabulary or 2)
        self._symptoms = dict[str, _Symptom]()
        self._skipped_steps = 0
        self._rewards: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._best = (float("-inf"), 0.0, 0)

    @override
    def after_step(self, done: StepDone) -> None:
        if self.rank:
            return
        self._skipped_steps = self._skipped_steps + 1 if done.result.skipped else 0
        step = done.state.step
        for name, sentence in self._find_symptoms(step, done.result.metrics):
            symptom = self._symptoms.get(name)
            if symptom is None or step - symptom.last_step > WINDOW:
                symptom = self._symptoms[name] = _Symptom(step, step, step)
            symptom.last_step = step
            if step >= symptom.next_report:
                first = symptom.first_step
                symptom.next_report = first + max(WINDOW, 2 * (step - first))
                logging.getLogger("hpctrain").warning("step %d: %s", step, sentence)

    def _find_symptoms(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the name of each symptom in the metrics of a step, and a sentence with a remedy."""
        if self._skipped_steps >= WINDOW:
            yield (
                "skipped",
                f"the policy has not been updated for {counted(self._skipped_steps, 'step')}: try "
                f"{LOWER_RATE}, from the start or from an earlier checkpoint",
            )
        of_critic = [metrics.get(f"{CRITIC}_{name}", 0.0) for name in ("loss", "grad_norm")]
        if not all(map(isfinite, of_critic)):
            values = "loss {:g} or gradient norm {:g}".format(*of_critic)
            yield (
                "critic",
                f"the critic's {values} is not finite, and its update is skipped: try a lower learning rate "
                'for it (policy.critic = ["learning_rate.peak=..."])',
            )
        if (moved := metrics.get("moved", 0.0)) > MAX_POLICY_DIVERGENCE:
            yield (
                "moved",
                f"the policy differs by {moved:.3g} nats per token from the policy that wrote its samples "
                f"(moved): try {LOWER_RATE}, fewer policy.epochs or a smaller policy.rollout",
            )
        if (kl := metrics.get("kl", 0.0)) > self.max_kl:
            beta = "a larger objective.beta" if self.beta else "objective.beta above 0"
            yield (
                "kl",
                f"the policy differs by {kl:.3g} nats per token from its reference (kl), which would "
                f"rarely write such answers: try {beta} or {LOWER_RATE}",
            )
        yield from self._find_reward_symptoms(step, metrics)

    def _find_reward_symptoms(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the symptoms in the rewards of the last `WINDOW` steps."""
        self._rewards.append((metrics["reward"], metrics["reward_deviation"]))
        if len(self._rewards) < WINDOW:
            return
        rewards, deviations = zip(*self._rewards, strict=True)
        if not any(deviations) and len(set(rewards)) == 1:
            yield (
                "equal rewards",
                f"all answers of {WINDOW} steps have the reward {rewards[0]:g}, so there is nothing to "
                "learn: try other prompts or another policy.reward",
            )
        mean, deviation = fmean(rewards), fmean(deviations)
        self._best = max(self._best, (mean, deviation, step))
        best_mean, best_deviation, best_step = self._best
        if best_mean - mean > max(best_deviation, deviation):
            yield (
                "lower reward",
                f"the mean reward of {WINDOW} steps has fallen to {mean:.4g}, from {best_mean:.4g} at step "
                f"{best_step}: try a checkpoint from there (checkpoint.keep_best) with {LOWER_RATE} or a "
                "larger objective.beta",
            )
