"""Parsing and formatting of sizes, times, counts and link speeds: "25 MB", "2 min 05 s", "124M"."""

from __future__ import annotations

import re
from math import isfinite
from typing import NamedTuple

from hpctrain.errors import HpctrainError

_NUMBER = r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
_PAIR = re.compile(_NUMBER + r"\s*([A-Za-z]*)")

_BYTES = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_BYTES |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)}
_BYTES |= {
    f"{letter}{end}": 1024**power for power, letter in enumerate("kmgtp", start=1) for end in ("ib", "i", "")
}

_TOO_MANY_BYTES = 1 << 63

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
_SECONDS |= {"sec": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400}
_SECONDS |= {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_SECONDS |= {"secs": 1, "m": 60, "mins": 60, "hr": 3600, "hrs": 3600}
_PARTS = re.compile(_PAIR.pattern + r"\s*")

_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
"""Times in the format of Slurm: 1-12:30:00, 1-12, 36:30:00, 90:00."""


# Case matters only in these units: "Mb/s" is refused, since some mean megabits by it and others megabytes.
_RATES = {f"{letter}bit/s": 1000**power / 8 for power, letter in enumerate(("", "k", "M", "G", "T"))}
_RATES |= {f"{letter}B/s": 1000**power for power, letter in enumerate(("", "k", "M", "G", "T"))}
_RATE = re.compile(_NUMBER + r"\s*([A-Za-z]+/s)")

_LOWEST_BANDWIDTH = 125.0
"""Lowest bandwidth of a link, in bytes per second: 1 kbit/s. With a lower one, a step would not end."""
_HIGHEST_LATENCY = 60.0
"""Highest latency of a link, in seconds."""


class UnitError(HpctrainError, ValueError):
    """Size, time or link that cannot be parsed. It is a `ValueError` for validation libraries."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "4096", "25 MB" (25 x 10^6) or "1.5 GiB" (1.5 x 2^30).

    "4G" and "4Gi" are binary (4 x 2^30), as Slurm, Kubernetes and `ls -h` have them. Case does not matter.

    Raises:
        UnitError: The text is no size, or one of 2^63 bytes or more.
    """
    match = _PAIR.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    try:
        if match is None or unit not in _BYTES:
            raise ValueError
        integer = match[1].replace("_", "").isdigit()
        size = int(match[1]) * _BYTES[unit] if integer else round(float(match[1]) * _BYTES[unit])
        if size >= _TOO_MANY_BYTES:
            raise ValueError
    except (ValueError, OverflowError):
        raise UnitError(f'"{text}" is not a size: write it as 25000000, "25 MB" or "24 MiB"') from None
    return size


def parse_seconds(text: str) -> float:
    """Return the seconds of a time such as "90", "90 s", "50 min", "1.5 h", "1 h 02 min" or "1-12:30:00".

    Times with colons or a day are read as Slurm reads them: "36:30:00" has hours, minutes and seconds,
    "90:00" minutes and seconds, "1-12" days and hours, "1-12:30" minutes as well.

    Raises:
        UnitError: The text is no time, or an infinite one.
    """
    written = text.strip()
    clock = _CLOCK.fullmatch(written)
    if clock and not written.isdigit():
        return _clock_seconds(text, clock)
    parts = [(match[1], match[2].lower()) for match in _PARTS.finditer(written)]
    complete = "".join(match[0] for match in _PARTS.finditer(written)) == written
    sizes = [1] if parts == [(written, "")] else [_SECONDS.get(unit, 0) for _, unit in parts]
    seconds = sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))
    # Each unit is smaller than the one before: "2 min 1 h" is a slip.
    in_order = sizes == sorted(set(sizes), reverse=True)
    if not parts or not complete or 0 in sizes or not in_order or not isfinite(seconds):
        raise UnitError(f'"{text}" is not a time: write it as 3000, "50 min", "1 h 30 min" or "1-12:30:00"')
    return seconds


def _clock_seconds(text: str, clock: re.Match[str]) -> float:
    """Return the seconds of a time with colons or a day."""
    days, *fields = clock.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is None and len(numbers) == 2:
        hours, minutes, seconds = 0, *numbers
    else:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    if seconds >= 60 or (minutes >= 60 and (hours or days)):
        raise UnitError(f'"{text}" is not a time: minutes and seconds must be below 60, as in "1-12:30:00"')
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + seconds


class Link(NamedTuple):
    """Network link of one rank.

    Attributes:
        bytes_per_second: Bandwidth in each direction.
        latency: Latency in seconds.
    """

    bytes_per_second: float
    latency: float = 0.0

    def __str__(self) -> str:
        speed = format_rate(self.bytes_per_second)
        return f"{speed}, {format_seconds(self.latency)}" if self.latency else speed


def parse_link(text: str) -> Link:
    """Return the link of a text such as "100 Mbit/s, 20 ms".

    The speed is in bit/s or B/s, with k, M, G or T. The latency may be left out.

    Raises:
        UnitError: The text is not a link, its speed is below 1 kbit/s, or its latency above 1 min.
    """
    speed, comma, latency = text.partition(",")
    match = _RATE.fullmatch(speed.strip())
    rate = float(match[1]) * _RATES.get(match[2], 0) if match else 0.0
    try:
        seconds = parse_seconds(latency) if comma else 0.0
        if seconds and latency.strip()[-1:].isdigit():  # a latency without a unit is probably not in seconds
            seconds = -1.0
    except UnitError:
        seconds = -1.0
    if not _LOWEST_BANDWIDTH <= rate < float("inf") or not 0 <= seconds <= _HIGHEST_LATENCY:
        raise UnitError(
            f'"{text}" is not a link: write it as "100 Mbit/s" or "12.5 MB/s, 20 ms", a speed of at least '
            "1 kbit/s and a latency of at most 1 min"
        )
    return Link(rate, seconds)


def format_rate(bytes_per_second: float) -> str:
    """Return a speed in bits per second with its unit: "100 Mbit/s", "1.25 Gbit/s".

    Args:
        bytes_per_second: The speed, in bytes per second.
    """
    number, name = _scaled(8 * bytes_per_second, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))
    return f"{number} {name}"


def format_bytes(size: float, *, binary: bool = False) -> str:
    """Return a size with its unit: "25 MB", or in powers of 1024 if `binary`: "256 MiB"."""
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB") if binary else ("B", "kB", "MB", "GB", "TB", "PB")
    number, name = _scaled(size, 1024 if binary else 1000, names)
    return f"{number} {name}"


def format_count(count: float) -> str:
    """Return a count with at most three digits and K, M, B, T or Q: "124M", "1.3K", "12"."""
    number, name = _scaled(count, 1000, ("", "K", "M", "B", "T", "Q"))
    return f"{number}{name}"


def format_seconds(seconds: float) -> str:
    """Return a rounded time with its units: "12.3 us", "1.24 s", "2 min 05 s", "1 h 02 min", "2 d 03 h".

    A negative time begins with "-".
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 1:
        number, name = _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))
        return f"{number} {name}"
    integer = round(seconds)
    if integer < 60:
        return f"{_three_digits(seconds)} s"
    for large, small, large_name, small_name in ((60, 1, "min", "s"), (3600, 60, "h", "min")):
        if integer < large * (60 if small == 1 else 24):
            return f"{integer // large} {large_name} {integer % large // small:02d} {small_name}"
    return f"{integer // 86400} d {integer % 86400 // 3600:02d} h"


def _three_digits(number: float) -> str:
    """Return three significant digits without trailing zeros: 1.24, 12.4, 124, 25."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(number: float, step: int, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the number in the largest unit in which it is at least 1 after rounding, and the unit's name."""
    index = 0
    while index + 1 < len(names) and abs(number) >= step * (1 - 0.0005):
        number /= step
        index += 1
    return _three_digits(number), names[index]
