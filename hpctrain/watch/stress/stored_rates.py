"""File with the rates of earlier tests: one line of JSON per test of a node, newest last."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.files import add_lines, parse_json, read_bytes, require_writable, strict_json, user_cache
from hpctrain.text import escaped, is_control
from hpctrain.watch.stress.nodes import MEASURES, EarlierRates, Node

FILE = "node-rates.jsonl"
MOST_ROWS = 4000
"""Number of rows that remain when old ones are removed, which happens at 10% more rows."""

_BYTES = 8 << 20
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_SECONDS = 5.0
"""Seconds to wait for other processes that write the file."""

_LONGEST = 1000
"""Largest number of characters of a name."""


def default_rates_file() -> Path:
    """Return the file of rates if the user names no other one: in the user's cache of hpctrain."""
    return user_cache() / FILE


def check_file(path: Path) -> None:
    """Check that a file that the user names can be used for rates.

    Raises:
        HpctrainError: It cannot be written, or it is not a file of rates.
    """
    try:
        require_writable(path)
    except HpctrainError as error:
        raise HpctrainError([f"--rates {problem}" for problem in error.problems]) from None
    try:
        content = read_bytes(path, _BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HpctrainError(f"--rates {escaped(str(path))}: cannot be read: {error.strerror}") from None
    if content.strip() and not _rows(content):
        raise HpctrainError(f"--rates {escaped(str(path))}: is not a file of rates; name another one")


def read_rates(path: Path) -> list[EarlierRates]:
    """Return the stored rates, oldest first; [] if there is no such file.

    Incomplete and foreign lines are ignored.
    """
    with suppress(OSError):
        return [rates for rates, _ in _rows(read_bytes(path, _BYTES))]
    return []


def add_rates(path: Path, nodes: Sequence[Node], day: str) -> str:
    """Append a line for each node.

    Processes on all nodes that write the file at the same time wait for each other, if its file system has
    locks. Each adds all of its lines in one write.

    Args:
        path: File of rates.
        nodes: The tested nodes.
        day: Date such as "2026-11-02".

    Returns:
        Reason why the file could not be written, else "".
    """
    rows = [
        {
            "node": node.name,
            "device": node.device,
            "ranks": len(node.ranks),
            "day": day,
            "rates": _stored_values(node.rates),
        }
        for node in nodes
        if node.rates
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_locked(path) as descriptor:
            add_lines(descriptor, map(strict_json, rows))
            _shorten(path, descriptor)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _shorten(path: Path, descriptor: int) -> None:
    """Remove the oldest rows if there are too many."""
    content = os.pread(descriptor, _BYTES + 1, 0)
    if content.count(b"\n") <= 1.1 * MOST_ROWS and len(content) <= _BYTES // 2:
        return
    lines = [line for _, line in _rows(content)][-MOST_ROWS:]
    while sum(map(len, lines)) > _BYTES // 4:
        lines = lines[len(lines) // 2 :]
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(b"".join(line + b"\n" for line in lines))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _open_locked(path: Path) -> Iterator[int]:
    """Return a context manager with the descriptor of the file, open to append and locked."""
    deadline = monotonic() + _SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, deadline)
            # The process that had the lock before may have replaced the file by a shorter one.
            current = path.stat() if path.exists() else None
            same = current is not None and os.path.samestat(current, os.fstat(descriptor))
            if same or monotonic() > deadline:
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    """Wait for the lock. If there are no locks or it takes too long, go on without: lines may get lost."""
    while monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(0.02)
        except OSError:
            return
        else:
            return


def _rows(content: bytes) -> list[tuple[EarlierRates, bytes]]:
    """Return the valid lines with their rates."""
    rows = []
    for line in content.splitlines():
        with suppress(ValueError):
            rates = _parse_row(parse_json(line))
            if rates is not None:
                rows.append((rates, line))
    return rows


def _parse_row(row: Any) -> EarlierRates | None:
    """Return the rates of a row; None if it is not valid, since any program may have written it."""
    if not isinstance(row, dict):
        return None
    name, device, ranks, day = (row.get(each) for each in ("node", "device", "ranks", "day"))
    rates = row.get("rates")
    if not isinstance(name, str) or not isinstance(device, str) or not isinstance(day, str):
        return None
    if not isinstance(ranks, int) or not isinstance(rates, dict):
        return None
    if max(len(name), len(device)) > _LONGEST or any(map(is_control, name)) or not _DAY.fullmatch(day):
        return None
    numbers = {each: rates[each] for each in MEASURES if isinstance(rates.get(each), float)}
    usable = {each: rate for each, rate in numbers.items() if isfinite(rate) and rate > 0}
    return EarlierRates(name, device, ranks, day, usable)


def _stored_values(rates: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{rate:.4g}") for name, rate in rates.items() if MEASURES[name].slow}
