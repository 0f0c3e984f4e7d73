"""Rewards that a deck names: how their names are parsed, and their weighted sums over all ranks."""

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
REWARD_FORMS = f'"{EXACT_MATCH}", "{PATTERN}:PATTERN", "FILE.py:FUNCTION" or a reward model\'s checkpoint'
RESERVED_NAMES = ("deviation",)
"""Names that no reward has in metrics, since `reward_deviation` is another metric of a rollout."""

_DEFAULT_KEY, _DEFAULT_SECONDS = "answer", 30.0


@dataclass(frozen=True)
class RewardName:
    """Reward that a deck names.

    Attributes:
        kind: `EXACT_MATCH`, `PATTERN` or "function".
        text: The pattern, or the name of the function.
        code: The function.
    """

    kind: str
    text: str = ""
    code: NamedCode | None = None

    def open(self, key: str = _DEFAULT_KEY, seconds: float = _DEFAULT_SECONDS, processes: int = 1) -> Reward:
        """Return the reward.

        Args:
            key: Field of the prompts' rows that has the accepted answers.
            seconds: Time limit of each call of a function.
            processes: Number of processes of each rank that call a function.
        """
        if self.kind == EXACT_MATCH:
            return ExactMatch(key)
        if self.kind == PATTERN:
            return RegularExpression(self.text, key, seconds, processes)
        assert self.code is not None
        return UserReward(self.code, seconds, processes)


def parse_reward(reward: NamedCode, where: str) -> RewardName:
    """Return the reward that a deck names in one of the `REWARD_FORMS`.

    It does not load a function. `Rewards.start` does, and then finds out whether the function exists.

    Args:
        reward: Name of the reward.
        where: Place of the name in the deck, with which messages begin.

    Raises:
        HpctrainError: It is not the name of a reward.
    """
    text = reward.target
    kind = text.partition(":")[0]
    if text == EXACT_MATCH:
        return RewardName(EXACT_MATCH)
    if kind == EXACT_MATCH:
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
        nearest_name = nearest(kind, (EXACT_MATCH, PATTERN))
        suggestion = f" (did you mean {nearest_name}?)" if nearest_name else ""
        raise HpctrainError(f"{where}: {quoted(text)} is not a reward{suggestion}: expected {REWARD_FORMS}")
    module = text.rpartition(":")[0]
    if is_file_target(text) and not Path(module).is_file():
        raise HpctrainError(f"{where}: {module}: file does not exist")
    package = module.partition(".")[0]
    if not is_file_target(text) and not (package.isidentifier() and find_spec(package)):
        raise HpctrainError(f"{where}: package {quoted(package)} is not installed (a file is named FILE.py)")
    reward.require_trusted()
    return RewardName("function", text, reward)


@dataclass(frozen=True)
class Scores:
    """Scores of samples.

    Attributes:
        totals: Weighted sum of the rewards of each sample.
        parts: Values of each reward by its name, one for each sample.
    """

    totals: list[float]
    parts: dict[str, list[float]]

    def mean_rewards(self) -> dict[str, float]:
        """Return the metrics `reward`, the mean total, and `reward_NAME` of each of several rewards."""
        several = self.parts if len(self.parts) > 1 else {}
        columns = {"reward": self.totals, **{f"reward_{name}": scores for name, scores in several.items()}}
        return {name: sum(scores) / max(1, len(scores)) for name, scores in columns.items()}


@dataclass
class Rewards:
    """One or more rewards with their weights.

    Attributes:
        weighted: Rewards with their weights.
        reserved_names: Names that no reward may have in metrics.
        names: Names of the rewards in metrics. A reward whose name exists already gets a number, as in
            "length_2".
    """

    weighted: Sequence[tuple[Reward, float]]
    reserved_names: Sequence[str] = RESERVED_NAMES
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        assert self.weighted and all(isfinite(weight) for _, weight in self.weighted)
        self.names = []
        for reward, _ in self.weighted:
            names = (*self.reserved_names, *self.names)
            equal = [name for name in names if re.fullmatch(re.escape(reward.name) + r"(_\d+)?", name)]
            self.names.append(f"{reward.name}_{len(equal) + 1}" if equal else reward.name)

    def check(self, other_keys: Mapping[str, object], where: str) -> None:
        """Check that a prompt's row has the fields that the rewards need.

        Args:
            other_keys: Fields of the row.
            where: Words for the row, with which the message begins.

        Raises:
            HpctrainError: A field is missing or wrong.
        """
        for reward, _ in self.weighted:
            try:
                reward.check(other_keys)
            except ValueError as error:
                raise HpctrainError(f"{where} {error}") from None

    def start(self) -> None:
        """Load the functions.

        Raises:
            HpctrainError: A function does not exist, or does not accept completions.
        """
        for reward, _ in self.weighted:
            reward.start()

    def scores(self, samples: Sequence[Sample], before_reward: Callable[[], None] = lambda: None) -> Scores:
        """Return the scores of samples. Local.

        Args:
            samples: The samples.
            before_reward: Called before each reward, which may take long.

        Raises:
            HpctrainError: A sample has no score. The message names it.
        """
        parts = dict[str, list[float]]()
        for name, (reward, _) in zip(self.names, self.weighted, strict=True):
            before_reward()
            parts[name] = reward.scores(samples)
        return self._weighted_sum(parts)

    def close(self) -> None:
        """End all processes."""
        for reward, _ in self.weighted:
            reward.close()

    def _weighted_sum(self, parts: dict[str, list[float]]) -> Scores:
        weights = [weight for _, weight in self.weighted]
        columns = zip(*parts.values(), strict=True)
        totals = [
            sum(weight * score for weight, score in zip(weights, column, strict=True)) for column in columns
        ]
        return Scores(totals, parts)

    def concatenate(self, pieces: Sequence[Scores]) -> Scores:
        """Return the scores of consecutive pieces of the samples as one."""
        parts = {name: [score for piece in pieces for score in piece.parts[name]] for name in self.names}
        return self._weighted_sum(parts)


def open_rewards(
    weighted: Mapping[NamedCode, float],
    where: str,
    key: str = _DEFAULT_KEY,
    seconds: float = _DEFAULT_SECONDS,
    processes: int = 1,
    reserved_names: Sequence[str] = (),
) -> Rewards:
    """Return the rewards that a deck names.

    Args:
        weighted: Weight of each reward by its name in the deck.
        where: Place of the names in the deck, with which messages begin.
        key: Field of the prompts' rows that has the accepted answers.
        seconds: Time limit of each call of a function.
        processes: Number of processes of each rank that call a function.
        reserved_names: Names in metrics of other rewards.

    Raises:
        HpctrainError: Some names or weights are wrong. It has all problems.
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
        problems.append(f"{where}: names no reward: expected {REWARD_FORMS}")
    if problems:
        raise HpctrainError(problems)
    opened = [name.open(key, seconds, processes) for name in names]
    return Rewards([*zip(opened, weighted.values(), strict=True)], (*RESERVED_NAMES, *reserved_names))


def score_on_all_ranks(
    world: World, rewards: Rewards, samples: Sequence[Sample], at_once: int = 64
) -> Scores:
    """Return the scores of samples, of which each rank computes a share. Collective.

    Args:
        world: The ranks.
        rewards: The rewards, on each rank.
        samples: The samples, which are equal on all ranks.
        at_once: Number of samples after which a rank tells the watchdog that it makes progress.

    Raises:
        HpctrainError: On all ranks if a sample has no score.
    """
    first, last = (len(samples) * rank // world.size for rank in (world.rank, world.rank + 1))

    def show_progress() -> None:
        world.ledger.phase = "evaluation"

    with world.agreement():
        pieces = [
            rewards.scores(samples[start : min(last, start + at_once)], show_progress)
            for start in range(first, last, at_once)
        ]
        local = rewards.concatenate(pieces)
    world.ledger.phase = "other"
    return rewards.concatenate(world.everyone.all_gather_object(local))
