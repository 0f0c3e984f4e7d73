"""Characters that have no place in a line: they end it, turn it, steer a terminal, or cannot be written."""

from __future__ import annotations

import unicodedata

# Marks that show what follows in another order than it is read.
_ORDERS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def is_control(character: str) -> bool:
    """Whether it is a control character in the wide sense: Unicode's own, separators of lines and paragraphs,
    marks of writing direction, halves of pairs (which stand for bytes that are not UTF-8), noncharacters."""
    if " " <= character <= "~":
        return False
    code = ord(character)
    return (
        unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}
        or character in _ORDERS
        or code & 0xFFFE == 0xFFFE
        or 0xFDD0 <= code <= 0xFDEF
    )


def control_problem(text: str) -> str:
    """What is wrong with a text that has control characters, to end a sentence; "" where it has none."""
    controls = list(dict.fromkeys(filter(is_control, text)))
    if not controls:
        return ""
    names = ", ".join(f"U+{ord(character):04X}" for character in controls[:3])
    several = f"control characters ({names}{', ...' * (len(controls) > 3)})"
    return f"has {several if len(controls) > 1 else f'a control character ({names})'}; leave it out"


def text_problem(text: str) -> str:
    """What keeps a text from being UTF-8, to end a sentence; "" where nothing does. Python has surrogates for
    bytes that are none, and for halves of pairs of UTF-16.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not UTF-8 text (byte {len(text[: error.start].encode())})"
    return ""


def escaped(text: str, allowed: str = "") -> str:
    r"""The text with its control characters, but for those in `allowed`, written as \n, \u001B and so on."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(character) if is_control(character) and character not in allowed else character
        for character in text
    )


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04X}" if code < 1 << 16 else f"\\U{code:08X}")
