"""Processes that judge samples for one rank, batch by batch, each within a time limit.

They are started as soon as something is asked of them; one that does not answer in time is killed, with all
that it has started itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import UserCodeError
from hpctrain.host.child_process import ChildProcess, NoAnswerError, next_answer

SECONDS_TO_LOAD = 300.0
"""That a user's file may take to be loaded, with what it imports."""

_WORKER = "hpctrain.post.rewards.reward_worker"


@dataclass
class FailedError(Exception):
    """A batch has no scores: its number, why (words that go on from the reward's title), and of which of its
    samples, where that is known.
    """

    batch: int
    problem: str
    index: int | None = None


class Processes:
    """At most `count` processes, each of which judges by `work` (what `worker.serve` is told first), and each
    batch of samples within `seconds`.
    """

    def __init__(self, title: str, work: Mapping[str, Any], count: int, seconds: float) -> None:
        self.title, self.work, self.count, self.seconds = title, work, count, seconds
        self._processes: list[ChildProcess] = []

    def start(self, count: int = 1) -> None:
        """Have so many of them ready. UserCodeError where they cannot judge."""
        for process in [each for each in self._processes if each.has_ended()]:
            process.close()
            self._processes.remove(process)
        fresh = [ChildProcess(_WORKER, runs_user_code=True) for _ in range(len(self._processes), count)]
        self._processes += fresh
        try:
            for process in fresh:
                process.ask(self.work, SECONDS_TO_LOAD)
            for _ in fresh:
                _, answer = next_answer(fresh)
                if "problem" in answer:
                    raise UserCodeError(answer["problem"])
        except NoAnswerError as failed:
            self.close()
            raise UserCodeError(f"{self.title} {failed.problem}, while loading") from None
        except BaseException:
            self.close()
            raise

    def judged(self, batches: Sequence[Mapping[str, list[Any]]]) -> list[list[float]]:
        """Return the scores of each batch.

        Raises:
            FailedError: Of the first batch that has none; then all processes are ended.
            UserCodeError: As from `start`.
        """
        found: list[list[float]] = [[] for _ in batches]
        waiting = deque(range(len(batches)))
        self.start(min(self.count, len(batches)))
        try:
            while waiting or any(process.request for process in self._processes):
                for process in self._processes:
                    if waiting and process.request is None:
                        number = waiting.popleft()
                        process.ask(batches[number], self.seconds, number)
                number, answer = next_answer(self._processes)
                if "problem" in answer:
                    raise FailedError(number, answer["problem"], answer["index"])
                found[number] = answer["scores"]
        except NoAnswerError as failed:
            self.close()
            raise FailedError(failed.number, failed.problem) from None
        except BaseException:
            self.close()  # what the others still answer is not to be taken for something else
            raise
        return found

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()
