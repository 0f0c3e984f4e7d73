"""What a check of the deck finds, and the words that such sentences are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.words import either


@dataclass(frozen=True)
class Problem:
    """What is wrong with `key`, as the rest of a sentence that begins with the key and its value.

    `others` are the other keys whose values the check looked at. What is `for_writers` is told whoever writes
    it, but a deck that has trained so is good; so is one where a key that a run has stored is `idle` by now.
    `row` is, of a key that holds tables in a row, the number of one of them (from 0) and its own key.
    """

    key: str
    sentence: str
    others: tuple[str, ...] = ()
    for_writers: bool = False
    idle: bool = False
    row: tuple[int, str] | None = None


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    small = [ranks for ranks in range(1, int(number**0.5) + 1) if number % ranks == 0]
    return sorted({*small, *(number // ranks for ranks in small)})


def nearest_numbers(number: int, candidates: Iterable[int], count: int = 4) -> list[int]:
    """The few candidates that are nearest to a number, smallest first."""
    return sorted(sorted(candidates, key=lambda candidate: (abs(candidate - number), candidate))[:count])


def multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next to a number, above 0, in words."""
    below = number // unit * unit
    return either([size for size in (below, below + unit) if size])


def must_divide(key: str, size: int, number: int) -> str:
    """The sentence of a number that must divide the value of `key`, and those near it that would."""
    return f"must divide {key} = {size} ({either(nearest_numbers(number, divisors(size)))} would)"
