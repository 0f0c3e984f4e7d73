"""Rewards as a deck or a command names them: what each is, their weighted sum, and their sum on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.deck.code import NamedCode, is_file_target, is_target
from hpctrain.errors import HpctrainError
from hpctrain.post.rewards.process_rewards import RegularExpression, UserReward
from hpctrain.post.rewards.reward_interface import ExactMatch, Reward, Sample, quoted
from hpctrain.text import nearest

EXACT_MATCH = "exact-match"
PATTERN = "regular-expression"
FORMS = f'"{EXACT_MATCH}", "{PATTERN}:PATTERN", "FILE.py:FUNCTION" or a reward model\'s checkpoint'
OTHERS = ("deviation",)
"""What figures of a rollout are called besides those of its rewards, as `reward_deviation`."""

_USUAL_KEY, _USUAL_SECONDS = "answer", 30.0


@dataclass(frozen=True)
class RewardName:
    """Reward that a deck names: a built-in one, a pattern, or a function."""

    kind: str
    text: str = ""
    code: NamedCode | None = None

    def open(self, key: str = _USUAL_KEY, seconds: float = _USUAL_SECONDS, processes: int = 1) -> Reward:
        """What judges by it: compared with what rows have under `key`, each call within `seconds`."""
        if self.kind == EXACT_MATCH:
            return ExactMatch(key)
        if self.kind == PATTERN:
            return RegularExpression(self.text, key, seconds, processes)
        assert self.code is not None
        return UserReward(self.code, seconds, processes)


def parse_reward(reward: NamedCode, where: str) -> RewardName:
    """Return the reward that a deck names in one of the `FORMS`.

    HpctrainError, beginning with `where`, with what is wrong; whether a function is there, and can judge, is
    known when it is loaded (Rewards.start).
    """
    text = reward.target
    if (kind := _built_in(text)) == EXACT_MATCH:
        return RewardName(EXACT_MATCH)
    if text.startswith(f"{EXACT_MATCH}:"):
        raise HpctrainError(f'{where}: {quoted(text)} has an argument (expected "{EXACT_MATCH}")')
    if kind == PATTERN:
        pattern = text.partition(":")[2]
        if not pattern:
            raise HpctrainError(f'{where}: requires a pattern, such as "{PATTERN}:[0-9]+"')
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise HpctrainError(f"{where}: {quoted(pattern)} is not a regular expression ({why})") from None
        return RewardName(PATTERN, pattern)
    if not is_target(text) or ":" not in text:
        near = nearest(text.partition(":")[0], (EXACT_MATCH, PATTERN))
        meant = f" (did you mean {near}?)" if near else ""
        raise HpctrainError(f"{where}: {quoted(text)} is not a reward{meant}: expected {FORMS}")
    home = text.rpartition(":")[0]
    if is_file_target(text) and not Path(home).is_file():
        raise HpctrainError(f"{where}: {home}: file does not exist")
    package = home.partition(".")[0]
    if not is_file_target(text) and not (package.isidentifier() and find_spec(package)):
        raise HpctrainError(f"{where}: package {quoted(package)} is not installed (a file is named FILE.py)")
    reward.require_trusted()
    return RewardName("function", text, reward)


def _built_in(text: str) -> str:
    """Which of the built-in ones it is, "" for what names a function."""
    kind = text.partition(":")[0]
    return kind if text == EXACT_MATCH or kind == PATTERN else ""


@dataclass(frozen=True)
class Scores:
    """Of samples: their weighted sums, and each reward's own, by name."""

    totals: list[float]
    parts: dict[str, list[float]]

    def figures(self) -> dict[str, float]:
        """The mean of all samples, and of each reward, where there are several."""
        several = self.parts if len(self.parts) > 1 else {}
        named = {"reward": self.totals, **{f"reward_{name}": scores for name, scores in several.items()}}
        return {name: sum(scores) / max(1, len(scores)) for name, scores in named.items()}


@dataclass
class Rewards:
    """Several rewards with weights, or one. Of those that are called alike, or as something that is `taken`,
    the later ones have a number.
    """

    weighted: Sequence[tuple[Reward, float]]
    taken: Sequence[str] = OTHERS
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        assert self.weighted and all(isfinite(weight) for _, weight in self.weighted)
        self.names = []
        for reward, _ in self.weighted:
            names = (*self.taken, *self.names)
            alike = [name for name in names if re.fullmatch(re.escape(reward.name) + r"(_\d+)?", name)]
            self.names.append(f"{reward.name}_{len(alike) + 1}" if alike else reward.name)

    def check(self, others: Mapping[str, object], where: str) -> None:
        """HpctrainError, beginning with `where`, where a prompt's row lacks what they need."""
        for reward, _ in self.weighted:
            try:
                reward.check(others)
            except ValueError as error:
                raise HpctrainError(f"{where} {error}") from None

    def start(self) -> None:
        """Load what they need. HpctrainError where there is no such function, or none that judges."""
        for reward, _ in self.weighted:
            reward.start()

    def scores(self, samples: Sequence[Sample], alive: Callable[[], None] = lambda: None) -> Scores:
        """Of these samples, on this rank; `alive` is called before each reward, which may take long.
        HpctrainError, with the sample, where one has no score.
        """
        parts = dict[str, list[float]]()
        for name, (reward, _) in zip(self.names, self.weighted, strict=True):
            alive()
            parts[name] = reward.scores(samples)
        return self._summed(parts)

    def close(self) -> None:
        """End all processes."""
        for reward, _ in self.weighted:
            reward.close()

    def _summed(self, parts: dict[str, list[float]]) -> Scores:
        weights = [weight for _, weight in self.weighted]
        columns = zip(*parts.values(), strict=True)
        totals = [
            sum(weight * score for weight, score in zip(weights, column, strict=True)) for column in columns
        ]
        return Scores(totals, parts)

    def joined(self, shares: Sequence[Scores]) -> Scores:
        """The scores of samples of which each share has some, one after another."""
        return self._summed({name: [s for share in shares for s in share.parts[name]] for name in self.names})


def open_rewards(
    weighted: Mapping[NamedCode, float],
    where: str,
    key: str = _USUAL_KEY,
    seconds: float = _USUAL_SECONDS,
    processes: int = 1,
    taken: Sequence[str] = (),
) -> Rewards:
    """Return rewards as a deck names them, each with its weight.

    Other arguments are those of RewardName.open and of Rewards. HpctrainError, with all that is wrong, as
    from parse_reward.
    """
    names, problems = list[RewardName](), list[str]()
    for reward, weight in weighted.items():
        try:
            names.append(parse_reward(reward, where))
        except HpctrainError as error:
            problems += error.problems
        if not isfinite(weight):
            problems.append(
                f"{where}: {quoted(reward.target)} has the weight {weight:g}, which is not finite"
            )
    if not weighted:
        problems.append(f"{where}: names no reward: expected {FORMS}")
    if problems:
        raise HpctrainError(problems)
    opened = [name.open(key, seconds, processes) for name in names]
    return Rewards([*zip(opened, weighted.values(), strict=True)], (*OTHERS, *taken))


def agreed_scores(world: World, rewards: Rewards, samples: Sequence[Sample], at_once: int = 64) -> Scores:
    """The scores of samples that all ranks have, each of which computes a share of them, so many `at_once`:
    in between, and between rewards, it gives a sign of life. Collective: HpctrainError on all ranks where
    one fails.
    """
    first, last = (len(samples) * rank // world.size for rank in (world.rank, world.rank + 1))

    def alive() -> None:
        world.ledger.phase = "evaluation"

    with world.agreement():
        parts = [
            rewards.scores(samples[begin : min(last, begin + at_once)], alive)
            for begin in range(first, last, at_once)
        ]
        own = rewards.joined(parts)
    world.ledger.phase = "other"
    return rewards.joined(world.everyone.all_gather_object(own))
