"""What a run tells besides its own files: tables, event files and services, as `[report]` says."""

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
from hpctrain.report.rows import Row
from hpctrain.report.runs import deck_keys
from hpctrain.watch.csv_file import CsvFile
from hpctrain.watch.event_file import EventFile
from hpctrain.watch.feed import Feed, RowWriter
from hpctrain.watch.service import Service

DASHBOARDS_FILE = "dashboards.json"
"""By what name services know the run, for what is made of it after a resume."""

SECONDS_TO_END = 20.0
"""That a run which is over waits for all of them together."""

_FILE_BYTES = 10_000


class Dashboards:
    """All that a deck asks for; on rank 0. What becomes of them is nothing to the run: see `Feed`."""

    def __init__(self, deck: Deck, step: int) -> None:
        """The run goes on after `step`; its folder and metrics.jsonl are there."""
        self._feeds = [Feed(name, make) for name, make in _writers(deck, step).items()]

    def write(self, row: Callable[[], Row]) -> None:
        """A step was made, whose row is asked for where anybody takes it."""
        if self._feeds:
            told = row()
            for feed in self._feeds:
                feed.write(told)

    def go_back(self, step: int) -> None:
        """The run goes on from the state after an earlier step."""
        for feed in self._feeds:
            feed.go_back(step)

    def close(self, whole: bool) -> None:
        """The run is over: wait for what has not been written, but not for long."""
        for feed in self._feeds:
            feed.end(whole)
        deadline = time.monotonic() + SECONDS_TO_END
        for feed in self._feeds:
            feed.close(deadline - time.monotonic())
        self._feeds = []


def require_packages(deck: Deck) -> None:
    """HpctrainError with every key of [report] that asks for a package which is not installed."""
    problems = [
        deck.problem(key, f"requires the package {package}, which is not installed: pip install {package}")
        for key, package in deck.report.packages.items()
        if not _installed(package)
    ]
    if problems:
        raise HpctrainError(problems)


def _installed(package: str) -> bool:
    """A folder of that name, such as `wandb` makes where it is used, is no package."""
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def _writers(deck: Deck, step: int) -> dict[str, Callable[[], RowWriter]]:
    """How to make each writer, by its key."""
    keys, folder = deck.report, Path(deck.run.dir)
    found: dict[str, Callable[[], RowWriter]] = {}
    if keys.csv:
        found["report.csv"] = partial(CsvFile, folder, step)
    if keys.tensorboard:
        found["report.tensorboard"] = partial(EventFile, folder, step)
    if keys.wandb != "off" or keys.trackio:
        facts = {"id": _known_as(folder, step), "name": deck.run.title, "folder": str(folder.absolute())}
        facts_all = {**facts, "config": deck_keys(deck), "mode": keys.wandb}
        if keys.wandb != "off":
            found["report.wandb"] = partial(Service, "wandb", facts_all)
        if keys.trackio:
            found["report.trackio"] = partial(Service, "trackio", facts_all)
    return found


def _known_as(folder: Path, step: int) -> str:
    """Eight letters and digits that stay with a run: those in its file, where it goes on."""
    path = folder / DASHBOARDS_FILE
    if step:
        try:
            known = parse_json(read_text(path, _FILE_BYTES))["id"]
            if re.fullmatch(r"[0-9a-f]{8}", known):
                return str(known)
        except (OSError, ValueError, TypeError, KeyError):
            pass
    own = secrets.token_hex(4)
    try:
        path.write_text(strict_json({"id": own}) + "\n", encoding="utf-8")
    except OSError as error:
        sentence = "%s: cannot be written, so a resumed run appears as a new run in wandb and trackio: %s"
        logging.getLogger("hpctrain").warning(sentence, path, error.strerror or error)
    return own
