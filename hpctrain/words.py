"""What messages have in common: commands to type, names that were meant, lists, packages that are missing."""

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
    """A command of ours, every word as a shell takes it: hpctrain resume 'my run'."""
    return shlex.join(["hpctrain", *map(str, words)])


def command(*words: object) -> str:
    """A command of ours as a message shows it: `hpctrain resume 'my run'`."""
    return f"`{command_line(*words)}`"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that was probably meant; None where none is near."""
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
    """The choices as "a, b or c"."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 batches`, `2 processes`: a number and a noun that takes s or es."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun[-1] in 'hs' else 's'}"


def article(name: str) -> str:
    """With "a" or "an" before it."""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def kind_of(value: object) -> str:
    """What an object is, in words."""
    return "None" if value is None else article(type(value).__name__)


def path_of(given: object, name: str, what: str = "a file") -> Path:
    """The path that a script gives, under that name, of what it is to be. HpctrainError where it is none."""
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise HpctrainError(f"{name}: is to be the path of {what}, not {kind_of(given)}")
    return Path(given)


def ranges(numbers: Iterable[int], separator: str) -> str:
    """The numbers, those that follow one another joined: `0-2,5`."""
    joined: list[list[int]] = []
    for number in sorted(numbers):
        if joined and number == joined[-1][-1] + 1:
            joined[-1][1:] = [number]
        else:
            joined.append([number])
    return separator.join("-".join(map(str, each)) for each in joined)


def require(package: str, purpose: str) -> None:
    """Raise HpctrainError where a package that only some uses need cannot be imported."""
    try:
        import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if missing else f"cannot be loaded ({error})"
        raise HpctrainError(
            f"{purpose} needs the package {package}, which {reason}: pip install {package}"
        ) from None


def _begins(one: str, other: str) -> bool:
    """Whether the shorter one is how the longer one begins, and long enough to tell."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) >= _LEAST_LETTERS and longer.startswith(shorter)


def _slipped(one: str, other: str) -> bool:
    """Whether letters changed places, or one is another: in a short name a large share."""
    if len(one) != len(other) or len(one) < _LEAST_LETTERS:
        return False
    return sorted(one) == sorted(other) or sum(map(str.__ne__, one, other)) == 1
