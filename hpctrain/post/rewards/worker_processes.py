"""Child processes that score samples for one rank, batch by batch, with a time limit for each batch.

They start at the first use. A process that exceeds the time limit is killed with all processes that it has
started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import UserCodeError
from hpctrain.host.child_process import ChildProcess, NoAnswerError, next_answer

SECONDS_TO_LOAD = 300.0
"""Time limit for loading a user's file with its imports."""

_WORKER = "hpctrain.post.rewards.reward_worker"


@dataclass
class BatchFailedError(Exception):
    """A batch that could not be scored.

    Attributes:
        batch: Number of the batch.
        problem: What is wrong. Continues a sentence that begins with the title of the reward.
        index: Index of the sample that is the cause; None if it is unknown.
    """

    batch: int
    problem: str
    index: int | None = None


class WorkerProcesses:
    """At most `count` child processes that score batches of samples.

    Attributes:
        title: Title of the reward, for messages.
        work: First request to each process, see `reward_worker`.
        count: Largest number of processes.
        seconds: Time limit of a batch.
    """

    def __init__(self, title: str, work: Mapping[str, Any], count: int, seconds: float) -> None:
        self.title, self.work, self.count, self.seconds = title, work, count, seconds
        self._processes: list[ChildProcess] = []

    def start(self, count: int = 1) -> None:
        """Start processes until `count` of them are ready.

        Raises:
            UserCodeError: The reward cannot be loaded.
        """
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

    def score_batches(self, batches: Sequence[Mapping[str, list[Any]]]) -> list[list[float]]:
        """Return the scores of each batch.

        Args:
            batches: Keyword arguments of the reward function for each batch.

        Raises:
            BatchFailedError: A batch cannot be scored. All processes have ended.
            UserCodeError: The reward cannot be loaded.
        """
        scores: list[list[float]] = [[] for _ in batches]
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
                    raise BatchFailedError(number, answer["problem"], answer["index"])
                scores[number] = answer["scores"]
        except NoAnswerError as failed:
            self.close()
            raise BatchFailedError(failed.number, failed.problem) from None
        except BaseException:
            self.close()  # later calls must not receive the answers to these batches
            raise
        return scores

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()
