"""Problems that checks of the deck find, and parts of their sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.text import either


@dataclass(frozen=True)
class DeckProblem:
    """Error of a deck: the full name of the wrong key, and the end of a sentence about its value.

    Attributes:
        key: Full name of the wrong key.
        sentence: End of a sentence that begins with the key and its value, and says what would be right.
        others: Further keys on whose values the check depends.
        for_new_decks: True if the problem is an error only in a new deck: a run that stored these values may
            continue.
        no_effect: True if the key has no effect, which is an error only if the user gave it, not if a run
            stored it.
        row: Number of a table (from 0) and its key, for a key that holds a list of tables.
    """

    key: str
    sentence: str
    others: tuple[str, ...] = ()
    for_new_decks: bool = False
    no_effect: bool = False
    row: tuple[int, str] | None = None


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_numbers(number: int, candidates: Iterable[int], count: int = 4) -> list[int]:
    """Return the candidates that are nearest to a number, in ascending order.

    Args:
        number: The number.
        candidates: Numbers to choose from.
        count: Largest length of the result. Of two equally near candidates the smaller one comes first.
    """
    return sorted(sorted(candidates, key=lambda candidate: (abs(candidate - number), candidate))[:count])


def multiples(number: int, unit: int) -> str:
    """Return in words the multiples of `unit` around a number, such as "8 or 16".

    They are the largest one up to `number`, unless that is 0, and the next one above it.

    Args:
        number: Number that is at least 0.
        unit: Positive number.
    """
    below = number // unit * unit
    return either([size for size in (below, below + unit) if size])


def must_divide(key: str, size: int, number: int) -> str:
    """Return the end of a sentence that says that a number must divide the value of a key.

    An example is "must divide model.heads = 12 (use 2, 3, 4 or 6)". Up to four divisors near the number are
    named.

    Args:
        key: Full name of the key.
        size: Its value, a positive number.
        number: The number that does not divide it.
    """
    return f"must divide {key} = {size} (use {either(nearest_numbers(number, divisors(size)))})"
