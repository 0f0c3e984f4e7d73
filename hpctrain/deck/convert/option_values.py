"""Conversion of single values of another trainer's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

from hpctrain.text import either

_MOST_DIGITS = 100
_UNSET = "is a shell variable that the script does not set, or sets to different values"
_UNKNOWN_ARITHMETIC = "is unsupported arithmetic (supported: + - * / % of whole numbers)"


class UnsupportedOptionError(Exception):
    """Error that is raised if no deck key expresses an option. The message completes a sentence about it."""


def number(value: object) -> float:
    """Return a finite number, given as a number or as text such as "1e-4". Local.

    Shell variables are not expanded here. Text that still has one, such as "$LR", is refused: the script does
    not set it, or sets it to different values.

    Raises:
        UnsupportedOptionError: The value is no finite number: a boolean, other text (also "True"), infinite,
            NaN, or text with a shell variable.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            converted = float(value)
        except (ValueError, OverflowError):
            converted = float("nan")
        if isfinite(converted):
            return converted
    raise UnsupportedOptionError(_unknown(value) or "is not a number")


def integer(value: object) -> int:
    """Return an integer, given as a whole number or as text ("8", "1e6", "8.0"); booleans are refused.

    Raises:
        UnsupportedOptionError: The value is not a whole number, or is a shell variable that is not set.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)  # a float might not hold it
    converted = number(value)
    if converted != int(converted):
        raise UnsupportedOptionError("is not a whole number")
    return int(converted)


def integer_above_0(value: object) -> int | None:
    """Return an integer if it is above 0, otherwise None, which sets no key. Raises as `integer`."""
    return integer(value) if integer(value) > 0 else None


def integer_above_1(value: object) -> int | None:
    """Return an integer if it is above 1, otherwise None, which sets no key. Raises as `integer`."""
    return integer(value) if integer(value) > 1 else None


def minutes(value: object) -> str:
    """Return a number of minutes in the notation of a deck, such as "90 min". Raises as `integer`.

    Args:
        value: Whole number of minutes, as `integer` takes it.
    """
    return f"{integer(value)} min"


def fp32_bytes(value: object) -> int:
    """Return the size in bytes of `value` fp32 elements, which have 4 bytes each. Raises as `integer`."""
    return 4 * integer(value)


def text(value: object) -> str:
    """Return `value` unchanged if it is text that is not empty and has no shell variable.

    Raises:
        UnsupportedOptionError: It is not text, is empty, or contains a dollar sign.
    """
    if not isinstance(value, str) or not value or "$" in value:
        raise UnsupportedOptionError(_unknown(value) or "is not text")
    return value


def switch(value: object) -> bool:
    """Return the state of a flag, which is given as a boolean or as "true" or "false" in any case.

    Raises:
        UnsupportedOptionError: The value is something else, such as 1 or None.
    """
    for on in (True, False):
        if is_switched(value, on):
            return on
    raise UnsupportedOptionError("must be true or false")


def inverted_flag(value: object) -> bool:
    """Return False for a flag that is set, and True for one that is not: the opposite of `switch`.

    Raises as `switch`.
    """
    return not switch(value)


def choice(value: object, choices: Mapping[str, object], refusal: str = "") -> object:
    """Return the deck's value for one of the other trainer's values.

    Args:
        value: Value of the other trainer. It is compared as `str(value).lower()`, so True is "true", None
            "none".
        choices: Values of the deck by those of the other trainer in lower case.
        refusal: Message of the error; "" for a message that lists the choices.

    Raises:
        UnsupportedOptionError: The value is not among the choices.
    """
    name = str(value).lower()
    if name not in choices:
        names = either([f'"{name}"' for name in choices])
        raise UnsupportedOptionError(refusal or f"is not supported (supported: {names})")
    return choices[name]


def _unknown(value: object) -> str:
    """Return why a shell expression has no value here; "" if the value is not an expression."""
    if "$((" in str(value):
        return _UNKNOWN_ARITHMETIC
    return _UNSET if "$" in str(value) else ""


def is_switched(value: object, on: bool) -> bool:
    """Return True if a flag has the state `on`, as a boolean or as "true" or "false" in any case.

    It is False for every other value, whatever `on` is.
    """
    return value is on or str(value).lower() == str(on).lower()


CONVERSIONS: Mapping[str, Callable[[object], object]] = {
    function.__name__: function
    for function in (
        *(bool, str, text, number, integer, integer_above_0, integer_above_1),
        *(minutes, fp32_bytes, inverted_flag),
    )
}
"""Conversions that rows of all tables may name."""
