"""Rewards that processes compute, since what they do may fail, hang or end a process: a function of the
user's own, and a regular expression.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from hpctrain.deck.code import NamedCode
from hpctrain.errors import UserCodeError
from hpctrain.post.rewards.reward_interface import Sample, answers_of, quoted
from hpctrain.post.rewards.reward_worker import GIVEN
from hpctrain.post.rewards.worker_processes import FailedError, Processes
from hpctrain.text import either
from hpctrain.units import format_seconds

TOGETHER = 16
"""Samples that are judged by one call, at the most."""


class ProcessReward:
    """What several processes judge by `work`, each call within `seconds`. See Reward."""

    def __init__(
        self, name: str, title: str, work: Mapping[str, Any], seconds: float, processes: int, together: int
    ) -> None:
        assert seconds > 0 and processes > 0 and together > 0
        self.name, self.title, self.seconds, self.together = name, title, seconds, together
        self._processes = Processes(title, work, processes, seconds)

    def check(self, others: Mapping[str, Any]) -> None:
        """Check that a prompt's row has the fields that this reward needs."""

    def start(self) -> None:
        """Start the reward, for example its processes."""
        self._processes.start()

    def close(self) -> None:
        """End what `start` has started. A later call of `scores` starts it again."""
        self._processes.close()

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return a finite number for each sample."""
        for sample in samples:
            try:
                self.check(sample.others)
            except ValueError as error:
                row = f"the row of prompt {sample.prompt_number} ({quoted(sample.prompt)})"
                raise UserCodeError(f"{self.title}: {row} {error}") from None
        names = [*dict.fromkeys(name for sample in samples for name in sample.others)]
        size = max(1, min(self.together, -(-len(samples) // self._processes.count)))
        batches = [samples[first : first + size] for first in range(0, len(samples), size)]
        try:
            found = self._processes.judged([_columns(batch, names) for batch in batches])
        except FailedError as failed:
            raise UserCodeError(self._sentence(failed, batches[failed.batch], names)) from None
        return [score for batch in found for score in batch]

    def _sentence(self, failed: FailedError, batch: Sequence[Sample], names: Sequence[str]) -> str:
        """What is wrong, and with which sample: the first one that fails when it is judged alone."""
        if failed.index is not None or len(batch) == 1:
            return f"{self.title} {failed.problem}, called with {batch[failed.index or 0].told}"
        self.start()
        began = time.monotonic()
        at_once = f"{self.title} {failed.problem}, called with {batch[0]} to {batch[-1].told} at once"
        try:
            for number, sample in enumerate(batch):
                took = time.monotonic() - began
                if took > self.seconds:
                    first = f"the first {number} of {len(batch)} one by one took {format_seconds(took)}"
                    return f"{at_once} ({first})"
                try:
                    self._processes.judged([_columns([sample], names)])
                except FailedError as alone:
                    return f"{self.title} {alone.problem}, called with {sample.told}"
        finally:
            self.close()
        return f"{at_once}, but not with any of these {len(batch)} alone"


class UserReward(ProcessReward):
    """Scores that a user's function gives for prompts, completions and what rows have by name.

    The processes that call it get its name; `UntrustedCodeError` if it may not be called.
    """

    def __init__(
        self, code: NamedCode, seconds: float = 30.0, processes: int = 1, together: int = TOGETHER
    ) -> None:
        code.require_trusted()
        name = code.target.rpartition(":")[2]
        super().__init__(name, code.title, {"target": code.target}, seconds, processes, together)

    @override
    def check(self, others: Mapping[str, Any]) -> None:
        if taken := next((name for name in GIVEN if name in others), None):
            raise ValueError(
                f'has "{taken}", which conflicts with an argument of reward functions '
                f"({either(GIVEN)}: give it another name)"
            )


class RegularExpression(ProcessReward):
    """1 where the pattern is found in the completion, else 0; where it has a group, what the first one holds
    has to be the answer that the row has under `key`, if it has one.

    It is computed in a process as there are patterns and texts of which Python's `re` never ends.
    """

    def __init__(
        self,
        pattern: str,
        key: str = "answer",
        seconds: float = 30.0,
        processes: int = 1,
        together: int = TOGETHER,
    ) -> None:
        self.key, self._compares = key, bool(re.compile(pattern).groups)
        work, name = {"pattern": pattern, "key": key}, "regular_expression"
        super().__init__(name, "regular-expression", work, seconds, processes, together)

    @override
    def check(self, others: Mapping[str, Any]) -> None:
        if self._compares and self.key in others:
            answers_of(others, self.key)


def _columns(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, list[Any]]:
    """What a function is given of samples, a list by name; None where a row lacks what others have."""
    columns: dict[str, list[Any]] = {name: [each.others.get(name) for each in samples] for name in names}
    return columns | {
        "prompts": [each.prompt for each in samples],
        "completions": [each.completion for each in samples],
        "tokens": [each.tokens for each in samples],
    }
