"""Control characters: they may not occur in a line of text that is shown or stored."""

from __future__ import annotations

import unicodedata

# Marks that change the order in which text is displayed.
_ORDERS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def is_control(character: str) -> bool:
    """Return True if a character is a control character in a wide sense.

    These are the control characters of Unicode, separators of lines and paragraphs, marks of writing
    direction, noncharacters, and surrogates, which Python uses for bytes that are not UTF-8.
    """
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
    """Return the end of a sentence that names the control characters of a text; "" if it has none."""
    controls = list(dict.fromkeys(filter(is_control, text)))
    if not controls:
        return ""
    names = ", ".join(f"U+{ord(character):04X}" for character in controls[:3])
    several = f"control characters ({names}{', ...' * (len(controls) > 3)})"
    return f"has {several if len(controls) > 1 else f'a control character ({names})'}; leave it out"


def text_problem(text: str) -> str:
    """Return the end of a sentence that says where a text is not UTF-8; "" if it is.

    Such a text contains surrogates, by which Python represents bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not UTF-8 text (byte {len(text[: error.start].encode())})"
    return ""


def escaped(text: str, allowed: str = "") -> str:
    r"""Return a text with its control characters, except those in `allowed`, as \n, \u001B and so on."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(character) if is_control(character) and character not in allowed else character
        for character in text
    )


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04X}" if code < 1 << 16 else f"\\U{code:08X}")
