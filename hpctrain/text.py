"""Wording of messages: commands, corrections of names, lists, tables and control characters."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Container, Iterable, Sequence
from difflib import SequenceMatcher

_LEAST_SIMILARITY = 0.75
"""Ratio of a SequenceMatcher from which on two names are similar."""
_LEAST_LETTERS = 3
_MOST_LETTERS = 100

# Characters that change the direction in which text is displayed.
_DIRECTION_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def command_line(*words: object) -> str:
    """Return a command of hpctrain with its words quoted for a shell: hpctrain resume 'my run'."""
    return shlex.join(["hpctrain", *map(str, words)])


def command(*words: object) -> str:
    """Return a command of hpctrain in backticks, for a message: `hpctrain resume 'my run'`."""
    return f"`{command_line(*words)}`"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a mistyped one, for a correction in a message.

    Args:
        name: The mistyped name.
        names: Known names, of which the first of equally similar ones counts.

    Returns:
        The name; None if no name is similar.
    """
    if len(name) > _MOST_LETTERS:
        return None
    known = list(names)
    ratios = [SequenceMatcher(None, each, name).ratio() for each in known]
    near = [
        (ratio, -number)
        for number, (each, ratio) in enumerate(zip(known, ratios, strict=True))
        if ratio >= _LEAST_SIMILARITY or _begins(each, name) or _is_typing_error(each, name)
    ]
    return known[-max(near)[1]] if near else None


def either(choices: Iterable[object]) -> str:
    """Return the choices as text, in their order: "a, b or c"; "a" for one.

    Args:
        choices: At least one choice; each is formatted by `str`.
    """
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


def ranges(numbers: Iterable[int], separator: str) -> str:
    """Return the numbers in ascending order, with consecutive ones as ranges: "0-2,5" with the separator ",".

    The numbers must be distinct. The text is "" for none.
    """
    joined: list[list[int]] = []
    for number in sorted(numbers):
        if joined and number == joined[-1][-1] + 1:
            joined[-1][1:] = [number]
        else:
            joined.append([number])
    return separator.join("-".join(map(str, each)) for each in joined)


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,), gap: str = "  ") -> list[str]:
    """Return the lines of a table whose columns are as wide as their longest cells.

    Args:
        rows: Cells of each row; all rows have the same number of cells.
        left: Numbers of the columns that are aligned to the left. All others are aligned to the right.
        gap: Text between two columns.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        gap.join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(rows: Sequence[Sequence[str]], left: Container[int], width: int | None) -> list[str]:
    """Return the lines of a table that fits into a terminal.

    If the table is wider than the terminal, each row becomes a block: its first cell, and below it one line
    for each other cell that is not empty, with the name of the column.

    Args:
        rows: The heads of the columns, and then the rows.
        left: As in `table`.
        width: Width of the terminal in characters; None if lines may have any length.
    """
    lines = table(rows, left)
    if width is None or all(len(line) <= width for line in lines):
        return lines
    head, *others = rows
    names = max(map(len, head[1:]), default=0)
    stacked: list[str] = []
    for first, *cells in others:
        stacked.append(first)
        stacked += [
            f"  {name.ljust(names)}  {cell}".rstrip()
            for name, cell in zip(head[1:], cells, strict=True)
            if cell
        ]
    return stacked


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
        or character in _DIRECTION_MARKS
        or code & 0xFFFE == 0xFFFE
        or 0xFDD0 <= code <= 0xFDEF
    )


def control_problem(text: str) -> str:
    """Return the end of a sentence that names the control characters of a text; "" if it has none.

    An example is "has a control character (U+0007); leave it out".
    """
    controls = list(dict.fromkeys(filter(is_control, text)))
    if not controls:
        return ""
    names = ", ".join(f"U+{ord(character):04X}" for character in controls[:3])
    several = f"control characters ({names}{', ...' * (len(controls) > 3)})"
    return f"has {several if len(controls) > 1 else f'a control character ({names})'}; leave it out"


def text_problem(text: str) -> str:
    """Return the end of a sentence that says where a text is not UTF-8, such as "is not UTF-8 text (byte 3)".

    It is "" if the text is UTF-8. Otherwise it contains surrogates, by which Python represents other bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not UTF-8 text (byte {len(text[: error.start].encode())})"
    return ""


def escaped(text: str, allowed: str = "") -> str:
    r"""Return a text with each control character as an escape sequence of Python, such as \n or \u001B.

    Args:
        text: The text; without control characters it is returned as it is.
        allowed: Characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(character) if is_control(character) and character not in allowed else character
        for character in text
    )


def _begins(one: str, other: str) -> bool:
    """Return True if one name is a prefix of the other one, with at least `_LEAST_LETTERS` letters."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) >= _LEAST_LETTERS and longer.startswith(shorter)


def _is_typing_error(one: str, other: str) -> bool:
    """Return True if two names of one length have the same letters, or differ in one letter."""
    if len(one) != len(other) or len(one) < _LEAST_LETTERS:
        return False
    return sorted(one) == sorted(other) or sum(map(str.__ne__, one, other)) == 1


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04X}" if code < 1 << 16 else f"\\U{code:08X}")
