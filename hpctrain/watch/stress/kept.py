"""The rates of nodes that are kept, a line of JSON each time a node was tested, newest last."""

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
"""Of these the newest stay; the file may have a tenth more until the others are taken out."""

_BYTES = 8 << 20
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_SECONDS = 5.0  # for which others that write it are waited for
_LONGEST = 1000  # characters of a name


def usual_file() -> Path:
    """Where rates are kept if no other file is named: beside what is kept of kernels."""
    return user_cache() / FILE


def check_file(path: Path) -> None:
    """HpctrainError where a file that a user names could not be written, or is none of rates."""
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
    """What is kept, oldest first; nothing where there is no such file.

    Lines that are torn, or that others have written, do not count.
    """
    with suppress(OSError):
        return [kept for kept, _ in _rows(read_bytes(path, _BYTES))]
    return []


def keep_rates(path: Path, nodes: Sequence[Node], day: str) -> str:
    """Add a line a node; why that could not be, or "".

    Those who write the file at the same time, from whichever nodes, wait for each other as far as its file
    system has locks. Each adds its lines at once.
    """
    rows = [
        {
            "node": node.name,
            "device": node.device,
            "ranks": len(node.ranks),
            "day": day,
            "rates": _told(node.rates),
        }
        for node in nodes
        if node.rates
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path) as descriptor:
            add_lines(descriptor, map(strict_json, rows))
            _shorten(path, descriptor)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _shorten(path: Path, descriptor: int) -> None:
    """Leave the newest rows, where there are too many."""
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
def _alone(path: Path) -> Iterator[int]:
    """The file, open to add to, while no other process of ours adds to it."""
    deadline = monotonic() + _SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, deadline)
            # Who had it before may have put a shorter one in its place.
            there = path.stat() if path.exists() else None
            same = there is not None and os.path.samestat(there, os.fstat(descriptor))
            if same or monotonic() > deadline:
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    """Wait for the lock; without it, where there are no locks or it takes too long, a line may get lost."""
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
    """The lines that could have been kept, with what they tell."""
    rows = []
    for line in content.splitlines():
        with suppress(ValueError):
            kept = _kept(parse_json(line))
            if kept is not None:
                rows.append((kept, line))
    return rows


def _kept(row: Any) -> EarlierRates | None:
    """Anybody may have written it."""
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


def _told(rates: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{rate:.4g}") for name, rate in rates.items() if MEASURES[name].slow}
