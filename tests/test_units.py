from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpctrain.errors import HpctrainError
from hpctrain.units import (
    Link,
    UnitError,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_link,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096 B", 4096),
        ("25 MB", 25_000_000),
        ("25mb", 25_000_000),
        (" 24 MiB ", 24 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("1e3 kB", 1_000_000),
        ("9007199254740993", 2**53 + 1),
        ("2 TB", 2 * 10**12),
        ("1 PiB", 2**50),
        ("4G", 4 * 2**30),
        ("512Mi", 2**29),
        ("64 k", 2**16),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1 MB", "25 MX", "1 MB 2", "1.2.3 kB", "nan", "25 MB/s"])
def test_no_size(text: str) -> None:
    with pytest.raises(UnitError, match="is not a size: write it as"):
        parse_bytes(text)


def test_unit_errors_are_user_errors_and_value_errors() -> None:
    error = UnitError("x")
    assert isinstance(error, HpctrainError)
    assert isinstance(error, ValueError)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (25_000_000, "25 MB"),
        (1_236_000_000, "1.24 GB"),
        (999_999, "1 MB"),
        (12_340, "12.3 kB"),
        (-25_000_000, "-25 MB"),
    ],
)
def test_bytes_as_text(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_bytes_as_binary_text() -> None:
    assert [format_bytes(2**power, binary=True) for power in (0, 10, 28, 31)] == [
        "1 B",
        "1 KiB",
        "256 MiB",
        "2 GiB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12"), (999, "999"), (1300, "1.3K"), (124_439_808, "124M"), (6_738_415_616, "6.74B"), (1e12, "1T")],
)
def test_counts_as_text(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1.23e-5, "12.3 us"),
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (1.239, "1.24 s"),
        (59.4, "59.4 s"),
        (59.8, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (90_000, "1 d 01 h"),
        (-2, "-2 s"),
    ],
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(some.integers(min_value=0, max_value=10**17))
def test_sizes_survive_printing_to_three_digits(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005, abs=0.5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("1_500", 1500),
        ("2.5", 2.5),
        (" 90 s ", 90),
        ("250ms", 0.25),
        ("12 us", 1.2e-5),
        ("50 min", 3000),
        ("1 Minute", 60),
        ("1.5 h", 5400),
        ("1 h 30 min", 5400),
        ("2 d 03 h", 183_600),
        ("5 m", 300),
        ("1-12:30:00", 131_400),
        ("1-12", 129_600),
        ("0-01:30", 5400),
        ("36:30:00", 131_400),
        ("90:00", 5400),
        ("1 day 2 hours 3 minutes 4 seconds", 93_784),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "soon", "5 mo", "-5 min", "1 30 min", "30 min 1 h", "1 h 1 h", "1 h 30", "1:30 h", "5 min,"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UnitError, match="is not a time: write it as"):
        parse_seconds(text)


@given(some.integers(min_value=1, max_value=86_400 * 9))
def test_times_survive_printing_to_two_units(seconds: int) -> None:
    cut_off = 1 if seconds < 3600 else 60 if seconds < 86_400 else 3600
    assert 0 <= seconds - parse_seconds(format_seconds(seconds)) < cut_off


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100 Mbit/s, 20 ms", Link(12.5e6, 0.02)),
        ("100Mbit/s,20ms", Link(12.5e6, 0.02)),
        ("12.5 MB/s", Link(12.5e6)),
        ("1 Gbit/s, 50 us", Link(125e6, 5e-5)),
        (" 1e3 kB/s , 0 ", Link(1e6)),
        ("1 kbit/s, 1 min", Link(125.0, 60.0)),
    ],
)
def test_links(text: str, link: Link) -> None:
    parsed = parse_link(text)
    assert parsed == pytest.approx(link)
    assert parse_link(str(parsed)) == pytest.approx(parsed)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "100",
            "100 Mbit",
            "100 Mb/s",
            "100 mbit/s",
            "-1 Mbit/s",
            "0 Mbit/s",
            "999 bit/s",
            "1e999 Gbit/s",
        ),
        *(
            "nan Mbit/s",
            "１００ Mbit/s",
            "100 Mbit/s,",
            "100 Mbit/s, 20",
            "20 ms, 100 Mbit/s",
            "100 Mbit/s, 61 s",
            "1 Tbit/s, -1 s",
        ),
        *("100 Mbit/s, 20 ms, 3", "100 Mbit/s; rm", "100 Mbit/s\n, 20 ms x"),
    ],
)
def test_no_link(text: str) -> None:
    with pytest.raises(UnitError, match='is not a link: write it as "100 Mbit/s" or'):
        parse_link(text)


def test_speeds_are_told_in_bits() -> None:
    assert [format_rate(rate) for rate in (125, 12.5e6, 1.25e9)] == ["1 kbit/s", "100 Mbit/s", "10 Gbit/s"]
