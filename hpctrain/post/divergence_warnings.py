"""Warns of a policy that goes astray, in the log of rank 0: once it does, then ever more rarely."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, log
from statistics import fmean

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import CRITIC
from hpctrain.text import counted
from hpctrain.train.hook import Hook, StepDone

STEPS = 20
"""Of which rewards are looked at. A sign that has not been seen for as many is gone; one that lasts is told
again after as many, then after twice as many, and so on.
"""

MOVED = 0.5
"""Nats a token from the policy that wrote: updates that take care stay below a tenth of it."""

SLOWER = "a lower learning_rate.peak"


@dataclass
class _Lasting:
    """A sign that there is since a step, last seen after another one, and which is due to be told."""

    since: int
    seen: int
    due: int


class DivergenceWarnings(Hook):
    """Looks at the figures of every step. Counts from where the run began, or goes on."""

    def __init__(self, deck: Deck, rank: int) -> None:
        self.rank, self.beta = rank, deck.objective.beta
        # Half of what a token is worth to whoever knows nothing: to the reference such answers are strange.
        self.strange = 0.5 * log(deck.runtime_choices.tokenizer_tokens or deck.model.vocabulary or 2)
        self._lasting = dict[str, _Lasting]()
        self._skipped = 0
        self._rewards: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._best = (float("-inf"), 0.0, 0)

    def after_step(self, done: StepDone) -> None:
        """Tell what signs there are, by rank 0; one that is gone may come again."""
        if self.rank:
            return
        self._skipped = self._skipped + 1 if done.result.skipped else 0
        step = done.state.step
        for name, sentence in self._signs(step, done.result.figures):
            lasting = self._lasting.get(name)
            if lasting is None or step - lasting.seen > STEPS:
                lasting = self._lasting[name] = _Lasting(step, step, step)
            lasting.seen = step
            if step >= lasting.due:
                lasting.due = lasting.since + max(STEPS, 2 * (step - lasting.since))
                logging.getLogger("hpctrain").warning("step %d: %s", step, sentence)

    def _signs(self, step: int, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Those of a step, by name, each with what it is and what may help."""
        if self._skipped >= STEPS:
            many = counted(self._skipped, "step")
            yield (
                "skipped",
                f"the policy has not been updated for {many}: try {SLOWER}, from the start or from an "
                "earlier checkpoint",
            )
        of_critic = [figures.get(f"{CRITIC}_{name}", 0.0) for name in ("loss", "grad_norm")]
        if not all(map(isfinite, of_critic)):
            told = "loss {:g} or gradient norm {:g}".format(*of_critic)
            yield (
                "critic",
                f"the critic's {told} is not finite, and its update is skipped: try a lower learning rate "
                'for it (policy.critic = ["learning_rate.peak=..."])',
            )
        if (moved := figures.get("moved", 0.0)) > MOVED:
            yield (
                "moved",
                f"the policy differs by {moved:.3g} nats per token from the policy that wrote its samples "
                f"(moved): try {SLOWER}, fewer policy.epochs or a smaller policy.rollout",
            )
        if (apart := figures.get("kl", 0.0)) > self.strange:
            more = "a larger objective.beta" if self.beta else "objective.beta above 0"
            yield (
                "kl",
                f"the policy differs by {apart:.3g} nats per token from its reference (kl), which would "
                f"rarely write such answers: try {more} or {SLOWER}",
            )
        yield from self._of_rewards(step, figures)

    def _of_rewards(self, step: int, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """By the last rewards and their deviations."""
        self._rewards.append((figures["reward"], figures["reward_deviation"]))
        if len(self._rewards) < STEPS:
            return
        rewards, deviations = zip(*self._rewards, strict=True)
        if not any(deviations) and len(set(rewards)) == 1:
            yield (
                "alike",
                f"all answers of {STEPS} steps have the reward {rewards[0]:g}, so there is nothing to learn: "
                "try other prompts or another policy.reward",
            )
        mean, usual = fmean(rewards), fmean(deviations)
        self._best = max(self._best, (mean, usual, step))
        best, spread, when = self._best
        if best - mean > max(spread, usual):
            yield (
                "fallen",
                f"the mean reward of {STEPS} steps has fallen to {mean:.4g}, from {best:.4g} at step {when}: "
                f"try a checkpoint from there (checkpoint.keep_best) with {SLOWER} or a larger "
                "objective.beta",
            )
