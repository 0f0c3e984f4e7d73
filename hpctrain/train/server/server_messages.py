"""What servers and workers write each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hpctrain.deck.schema import Deck

HEAD = 0
"""The first server: it gives out shares, sees every push, and tells of the run, as rank 0 of any run does."""


class MessageKind(IntEnum):
    """What a letter is: its first number."""

    ASK = 0  # worker to head: work, please; was anything asked of this rank
    SHARE = 1  # head to worker: whether to pause; step and number of the share
    PULL = 2  # worker to server: step, whether all is wanted; counts of rows
    PUSH = 3  # worker to server, see Push
    PAUSED = 4  # worker to the other servers: no push follows
    ASKED = 5  # server to head: something was asked of this rank
    DONE = 6  # server to head: all workers pause here
    FAILED = 7  # worker or server to head: it has an error to tell when all meet


@dataclass(frozen=True)
class Push:
    """What a worker says of its gradients.

    `norm` is theirs before clipping, `metrics` the sums of losses, of `tokens` to be predicted; `seconds` is
    how long it computed; `asked` whether anything was asked of its rank. With `sent`, gradients follow: of
    tables `rows` of each piece. One that is not `finite` and of which no sum is made is not sent.
    """

    step: int
    sent: bool
    finite: bool
    norm: float
    tokens: int
    seconds: float
    asked: bool
    metrics: tuple[float, ...]
    rows: tuple[int, ...]

    def numbers(self) -> list[float]:
        """As a letter has them."""
        fixed = (
            MessageKind.PUSH,
            self.step,
            self.sent,
            self.finite,
            self.norm,
            self.tokens,
            self.seconds,
            self.asked,
        )
        return [*map(float, fixed), float(len(self.metrics)), *self.metrics, *map(float, self.rows)]

    @staticmethod
    def of(numbers: tuple[float, ...]) -> Push:
        """What a letter says."""
        _, step, sent, finite, norm, tokens, seconds, asked, count, *rest = numbers
        metrics, rows = rest[: int(count)], rest[int(count) :]
        return Push(
            int(step),
            bool(sent),
            bool(finite),
            norm,
            int(tokens),
            seconds,
            bool(asked),
            tuple(metrics),
            tuple(map(int, rows)),
        )


def distance(deck: Deck) -> int | None:
    """How many steps a worker may be ahead of the slowest; None: any number."""
    keys = deck.communication.server
    assert keys is not None
    return {"sync": 0, "stale": keys.staleness, "async": None}[keys.mode]
