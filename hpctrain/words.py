"""Parts of messages: commands to type, corrections of names, lists, and missing packages."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path

from hpctrain.errors import HpctrainError

_NEAR = 0.75
_LEAST_LETTERS = 3
_MOST_LETTERS = 100


def command_line(*words: object) -> str:
    """Return a command of hpctrain with its words quoted for a shell: hpctrain resume 'my run'."""
    return shlex.join(["hpctrain", *map(str, words)])


def command(*words: object) -> str:
    """Return a command of hpctrain in backticks, for a message: `hpctrain resume 'my run'`."""
    return f"`{command_line(*words)}`"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a mistyped one; None if no name is similar."""
    if len(name) > _MOST_LETTERS:
        return None
    known = list(names)
    ratios = [SequenceMatcher(None, each, name).ratio() for each in known]
    near = [
        (ratio, -number)
        for number, (each, ratio) in enumerate(zip(known, ratios, strict=True))
        if ratio >= _NEAR or _begins(each, name) or _slipped(each, name)
    ]
    return known[-max(near)[1]] if near else None


def either(choices: Iterable[object]) -> str:
    """Return at least one choice as text: "a, b or c"."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 batches". The plural of the noun ends in s or es."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun[-1] in 'hs' else 's'}"


def article(name: str) -> str:
    """Return a noun with "a" or "an" before it."""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def kind_of(value: object) -> str:
    """Return the type of an object with its article, for a message: "a list", "an int", "None"."""
    return "None" if value is None else article(type(value).__name__)


def path_of(value: object, name: str, what: str = "a file") -> Path:
    """Return the path that a script passes as an argument.

    Args:
        value: The argument.
        name: Name of the argument, for the message.
        what: What the path should name, with an article, for the message.

    Raises:
        HpctrainError: The argument is not a path, or is empty.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise HpctrainError(f"{name}: is to be the path of {what}, not {kind_of(value)}")
    return Path(value)


def ranges(numbers: Iterable[int], separator: str) -> str:
    """Return the numbers in ascending order, with consecutive ones as ranges: "0-2,5"."""
    joined: list[list[int]] = []
    for number in sorted(numbers):
        if joined and number == joined[-1][-1] + 1:
            joined[-1][1:] = [number]
        else:
            joined.append([number])
    return separator.join("-".join(map(str, each)) for each in joined)


def require(package: str, purpose: str) -> None:
    """Import an optional package.

    Args:
        package: Name of the package.
        purpose: What needs it, as the subject of the message.

    Raises:
        HpctrainError: The package cannot be imported.
    """
    try:
        import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if missing else f"cannot be loaded ({error})"
        raise HpctrainError(
            f"{purpose} needs the package {package}, which {reason}: pip install {package}"
        ) from None


def _begins(one: str, other: str) -> bool:
    """Return True if one name is a prefix of the other one, with at least `_LEAST_LETTERS` letters."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) >= _LEAST_LETTERS and longer.startswith(shorter)


def _slipped(one: str, other: str) -> bool:
    """Return True if two names of one length have the same letters, or differ in one letter."""
    if len(one) != len(other) or len(one) < _LEAST_LETTERS:
        return False
    return sorted(one) == sorted(other) or sum(map(str.__ne__, one, other)) == 1
