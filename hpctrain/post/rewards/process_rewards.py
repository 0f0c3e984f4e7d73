"""Rewards that are computed in child processes: functions of the user, and regular expressions.

A child process can fail, hang or crash without its rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from hpctrain.deck.code import NamedCode
from hpctrain.errors import UserCodeError
from hpctrain.post.rewards.reward_interface import Reward, Sample, accepted_answers, quoted
from hpctrain.post.rewards.reward_worker import RESERVED_ARGUMENTS
from hpctrain.post.rewards.worker_processes import BatchFailedError, WorkerProcesses
from hpctrain.text import either
from hpctrain.units import format_seconds

REWARD_BATCH_SIZE = 16
"""Largest number of samples that one call of a reward function receives."""


class ProcessReward(Reward):
    """Reward that child processes compute.

    Args:
        name: Name of the reward in metrics.
        title: Name of the reward at the beginning of messages.
        work: First request to a process, see `reward_worker`.
        seconds: Time limit of each call.
        processes: Number of processes.
        batch_size: Largest number of samples of each call.
    """

    def __init__(
        self, name: str, title: str, work: Mapping[str, Any], seconds: float, processes: int, batch_size: int
    ) -> None:
        assert seconds > 0 and processes > 0 and batch_size > 0
        self.name, self.title, self.seconds, self.batch_size = name, title, seconds, batch_size
        self._processes = WorkerProcesses(title, work, processes, seconds)

    @override
    def start(self) -> None:
        self._processes.start()

    @override
    def close(self) -> None:
        self._processes.close()

    @override
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        for sample in samples:
            try:
                self.check(sample.other_keys)
            except ValueError as error:
                row = f"the row of prompt {sample.prompt_number} ({quoted(sample.prompt)})"
                raise UserCodeError(f"{self.title}: {row} {error}") from None
        names = [*dict.fromkeys(name for sample in samples for name in sample.other_keys)]
        size = max(1, min(self.batch_size, -(-len(samples) // self._processes.count)))
        batches = [samples[first : first + size] for first in range(0, len(samples), size)]
        try:
            of_batches = self._processes.score_batches([_columns(batch, names) for batch in batches])
        except BatchFailedError as failed:
            raise UserCodeError(self._describe_failure(failed, batches[failed.batch], names)) from None
        return [score for scores in of_batches for score in scores]

    def _describe_failure(
        self, failed: BatchFailedError, batch: Sequence[Sample], names: Sequence[str]
    ) -> str:
        """Return the problem with a batch, and the first sample that also fails in a call of its own."""
        if failed.index is not None or len(batch) == 1:
            return f"{self.title} {failed.problem}, called with {batch[failed.index or 0].description}"
        self.start()
        started = time.monotonic()
        at_once = f"{self.title} {failed.problem}, called with {batch[0]} to {batch[-1].description} at once"
        try:
            for number, sample in enumerate(batch):
                took = time.monotonic() - started
                if took > self.seconds:
                    first = f"the first {number} of {len(batch)} one by one took {format_seconds(took)}"
                    return f"{at_once} ({first})"
                try:
                    self._processes.score_batches([_columns([sample], names)])
                except BatchFailedError as alone:
                    return f"{self.title} {alone.problem}, called with {sample.description}"
        finally:
            self.close()
        return f"{at_once}, but not with any of these {len(batch)} alone"


class UserReward(ProcessReward):
    """Scores that a user's function returns for prompts, completions and other keys of rows.

    Raises:
        UntrustedCodeError: The function may not be called.
    """

    def __init__(
        self, code: NamedCode, seconds: float = 30.0, processes: int = 1, batch_size: int = REWARD_BATCH_SIZE
    ) -> None:
        code.require_trusted()
        name = code.target.rpartition(":")[2]
        super().__init__(name, code.title, {"target": code.target}, seconds, processes, batch_size)

    @override
    def check(self, other_keys: Mapping[str, Any]) -> None:
        if conflict := next((name for name in RESERVED_ARGUMENTS if name in other_keys), None):
            raise ValueError(
                f'has "{conflict}", which conflicts with an argument of reward functions '
                f"({either(RESERVED_ARGUMENTS)}: give it another name)"
            )


class RegularExpression(ProcessReward):
    """Reward that is 1 if a pattern is found in the completion, else 0.

    If the pattern has a group and the row has an answer, the text of the first group must be that answer.
    Python's `re` takes forever for some patterns and texts, so a process computes it.

    Attributes:
        key: Field of the row that has the answer, or a list of accepted answers.
    """

    def __init__(
        self,
        pattern: str,
        key: str = "answer",
        seconds: float = 30.0,
        processes: int = 1,
        batch_size: int = REWARD_BATCH_SIZE,
    ) -> None:
        self.key, self._has_group = key, bool(re.compile(pattern).groups)
        work, name = {"pattern": pattern, "key": key}, "regular_expression"
        super().__init__(name, "regular-expression", work, seconds, processes, batch_size)

    @override
    def check(self, other_keys: Mapping[str, Any]) -> None:
        if self._has_group and self.key in other_keys:
            accepted_answers(other_keys, self.key)


def _columns(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a reward function: lists that have None if a row lacks a field."""
    columns: dict[str, list[Any]] = {name: [each.other_keys.get(name) for each in samples] for name in names}
    return columns | {
        "prompts": [each.prompt for each in samples],
        "completions": [each.completion for each in samples],
        "tokens": [each.token_count for each in samples],
    }
