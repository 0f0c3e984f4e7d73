"""Tables, event files and services that receive the metrics of a run, as [report] of the deck says."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text, strict_json
from hpctrain.report.metric_rows import Row
from hpctrain.report.runs import deck_keys
from hpctrain.watch.csv_file import CsvFile
from hpctrain.watch.event_file import EventFile
from hpctrain.watch.feed import Feed, RowWriter
from hpctrain.watch.service import Service

DASHBOARDS_FILE = "dashboards.json"
"""File with the name by which services know the run, so that a resumed run continues there."""

SECONDS_TO_END = 20.0
"""Seconds that a run waits at its end for all dashboards together."""

_FILE_BYTES = 10_000


class Dashboards:
    """Dashboards that a deck asks for, on rank 0. Their failures do not affect the run (see `Feed`)."""

    def __init__(self, deck: Deck, step: int) -> None:
        """Start the dashboards.

        Args:
            deck: Deck of the run, whose folder and metrics.jsonl exist.
            step: Step after which the run continues.
        """
        self._feeds = [Feed(name, make) for name, make in _writers(deck, step).items()]

    def write(self, row: Callable[[], Row]) -> None:
        """Pass the metrics of a step to all dashboards. `row` is only called if there are dashboards."""
        if self._feeds:
            values = row()
            for feed in self._feeds:
                feed.write(values)

    def roll_back(self, step: int) -> None:
        """Tell all dashboards that the run continues after an earlier step."""
        for feed in self._feeds:
            feed.roll_back(step)

    def close(self, completed: bool) -> None:
        """End all dashboards. Wait at most `SECONDS_TO_END` until they have written everything.

        Args:
            completed: True if the run ended as planned, False if it failed.
        """
        for feed in self._feeds:
            feed.end(completed)
        deadline = time.monotonic() + SECONDS_TO_END
        for feed in self._feeds:
            feed.close(deadline - time.monotonic())
        self._feeds = []


def require_packages(deck: Deck) -> None:
    """Check that the packages of all dashboards are installed.

    Raises:
        HpctrainError: Keys of [report] require packages that are not installed.
    """
    problems = [
        deck.problem(key, f"requires the package {package}, which is not installed: pip install {package}")
        for key, package in deck.report.packages.items()
        if not _installed(package)
    ]
    if problems:
        raise HpctrainError(problems)


def _installed(package: str) -> bool:
    """Return True if a package is installed. A folder of its name, such as `wandb` makes, does not count."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _writers(deck: Deck, step: int) -> dict[str, Callable[[], RowWriter]]:
    """Return the functions that make the writers, by key of the deck."""
    keys, folder = deck.report, Path(deck.run.dir)
    writers: dict[str, Callable[[], RowWriter]] = {}
    if keys.csv:
        writers["report.csv"] = partial(CsvFile, folder, step)
    if keys.tensorboard:
        writers["report.tensorboard"] = partial(EventFile, folder, step)
    if keys.wandb != "off" or keys.trackio:
        facts = {"id": _service_id(folder, step), "name": deck.run.title, "folder": str(folder.absolute())}
        run_facts = {**facts, "config": deck_keys(deck), "mode": keys.wandb}
        if keys.wandb != "off":
            writers["report.wandb"] = partial(Service, "wandb", run_facts)
        if keys.trackio:
            writers["report.trackio"] = partial(Service, "trackio", run_facts)
    return writers


def _service_id(folder: Path, step: int) -> str:
    """Return the name by which services know the run: 8 hexadecimal digits, stored for resumed runs."""
    path = folder / DASHBOARDS_FILE
    if step:
        try:
            known = parse_json(read_text(path, _FILE_BYTES))["id"]
            if re.fullmatch(r"[0-9a-f]{8}", known):
                return str(known)
        except (OSError, ValueError, TypeError, KeyError):
            pass
    new_id = secrets.token_hex(4)
    try:
        path.write_text(strict_json({"id": new_id}) + "\n", encoding="utf-8")
    except OSError as error:
        sentence = "%s: cannot be written, so a resumed run appears as a new run in wandb and trackio: %s"
        logging.getLogger("hpctrain").warning(sentence, path, error.strerror or error)
    return new_id
