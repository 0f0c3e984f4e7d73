"""Messages between servers and workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hpctrain.deck.schema import Deck

HEAD = 0
"""Rank of the first server, which assigns shares, receives every push, and reports like rank 0 of any run."""


class MessageKind(IntEnum):
    """Kind of a message: the first number of its header."""

    ASK = 0  # worker to head: request for a share; whether its rank has a request to the run
    SHARE = 1  # head to worker: whether to pause; step and number of the share
    PULL = 2  # worker to server: step, whether it needs all parameters; numbers of rows
    PUSH = 3  # worker to server, see Push
    PAUSED = 4  # worker to the other servers: no push follows
    REQUEST = 5  # server to head: its rank has a request to the run
    DONE = 6  # server to head: all workers pause here
    FAILED = 7  # worker or server to head: it has an error, to be raised at the next synchronization


@dataclass(frozen=True)
class Push:
    """Header of a worker's push of gradients.

    Attributes:
        step: Number of the step.
        sent: True if gradients follow. Gradients that are not finite are not sent, unless a sum is made.
        finite: True if metrics and gradients are finite.
        norm: Norm of the worker's gradients before clipping; 0 if it is not needed.
        tokens: Number of predicted tokens.
        seconds: Seconds that the worker computed.
        has_request: True if the worker's rank has a request to the run, such as a signal.
        metrics: Sums of the metrics over the tokens.
        rows: Number of rows that are sent of each range of an embedding table.
    """

    step: int
    sent: bool
    finite: bool
    norm: float
    tokens: int
    seconds: float
    has_request: bool
    metrics: tuple[float, ...]
    rows: tuple[int, ...]

    def numbers(self) -> list[float]:
        """Return the numbers of the message header."""
        fixed = (
            MessageKind.PUSH,
            self.step,
            self.sent,
            self.finite,
            self.norm,
            self.tokens,
            self.seconds,
            self.has_request,
        )
        return [*map(float, fixed), float(len(self.metrics)), *self.metrics, *map(float, self.rows)]

    @staticmethod
    def of(numbers: tuple[float, ...]) -> Push:
        """Return the push of a message header."""
        _, step, sent, finite, norm, tokens, seconds, has_request, count, *rest = numbers
        metrics, rows = rest[: int(count)], rest[int(count) :]
        return Push(
            int(step),
            bool(sent),
            bool(finite),
            norm,
            int(tokens),
            seconds,
            bool(has_request),
            tuple(metrics),
            tuple(map(int, rows)),
        )


def distance(deck: Deck) -> int | None:
    """Return how many steps a worker may be ahead of the slowest one; None for any number."""
    keys = deck.communication.server
    assert keys is not None
    return {"sync": 0, "stale": keys.staleness, "async": None}[keys.mode]
