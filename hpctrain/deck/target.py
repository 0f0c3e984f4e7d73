"""What decks name of a user's own: "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"."""

from __future__ import annotations

import os

from hpctrain.deck.key import expand_home


def is_file(target: str) -> bool:
    """Whether "FILE.py:FUNCTION" is meant, and not "PACKAGE:FUNCTION"."""
    return target.rpartition(":")[0].endswith(".py")


def is_target(target: str | None) -> bool:
    """Whether it is one of both, or none is named."""
    home, _, function = (target or "x:x").rpartition(":")
    return bool(home) and function.replace(".", "_").isidentifier()


def resolve_target(target: str, deck_name: str) -> str:
    """The same target from any folder: a file's is relative to that of the deck which names it."""
    if not is_file(target):
        return target
    return os.path.abspath(os.path.join(os.path.dirname(deck_name), expand_home(target)))  # noqa: PTH100, PTH118, PTH120
