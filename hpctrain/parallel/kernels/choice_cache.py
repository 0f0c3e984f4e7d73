"""File that caches the measured kernels of matrix products for all runs of a user."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.files import parse_json, read_text, user_cache
from hpctrain.parallel.kernels.matmul_kernels import KERNELS
from hpctrain.parallel.kernels.timing import MEASUREMENT

FILE = "products.json"

_FILE_BYTES, _MOST_PROCESSORS = 1 << 20, 20
"""Largest size of the file, and largest number of types of processors in it."""

MOST_KNOWN, LONGEST_NAME = 500, 1000
"""Largest number of stored choices of a processor or run, and length of a name."""


def cache_file() -> Path:
    """Return the file that caches the choices of all runs of a user."""
    return user_cache() / FILE


def read_cache() -> dict[str, dict[str, str]]:
    """Return the cached choices of this version of the measurement, by processor and name of the product."""
    suffix = f"; {MEASUREMENT}"
    return {name.removesuffix(suffix): each for name, each in _read_all().items() if name.endswith(suffix)}


def _read_all() -> dict[str, dict[str, str]]:
    """Return all valid choices of the cache, by processor and version of the measurement.

    Other versions of this package have entries of their own.
    """
    with suppress(OSError, ValueError):
        rows = parse_json(read_text(cache_file(), _FILE_BYTES))
        if isinstance(rows, dict):
            newest = list(rows.items())[-_MOST_PROCESSORS:]
            return {name: known_kernels(each) for name, each in newest if len(name) <= LONGEST_NAME}
    return {}


def write_cache(identity: str, choices: Mapping[str, str]) -> None:
    """Add choices to the cache, the newest last. Nothing happens if the cache cannot be written. Local.

    Args:
        identity: Type of processor.
        choices: Kernel by name of the product.
    """
    path, cached, key = cache_file(), _read_all(), f"{identity}; {MEASUREMENT}"
    processor_choices = {**cached.pop(key, {})}
    for name, choice in choices.items():
        processor_choices.pop(name, None)
        processor_choices[name] = choice
    cached[key] = dict(list(processor_choices.items())[-MOST_KNOWN:])
    text = json.dumps(dict(list(cached.items())[-_MOST_PROCESSORS:]), indent=1)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        if not path.is_absolute():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def known_kernels(stored: object) -> dict[str, str]:
    """Return the valid choices of a stored object, by name. It may come from a file that anybody wrote."""
    rows = list(stored.items())[-MOST_KNOWN:] if isinstance(stored, Mapping) else []
    return {
        name: how
        for name, how in rows
        if isinstance(name, str) and isinstance(how, str) and how in KERNELS and len(name) <= LONGEST_NAME
    }
