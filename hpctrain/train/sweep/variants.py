"""Runs of a sweep: every combination of values of some keys, each with its own name and folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.toml import parse_argument
from hpctrain.errors import HpctrainError, InputOutputError, failing_as
from hpctrain.files import parse_json, read_text, strict_json, write_text
from hpctrain.report.runs import deck_keys
from hpctrain.text import control_problem

SWEEP_FILE = "sweep.json"
MAX_RUNS = 1000
_SWEEP_BYTES = 16 << 20
_NAME_LENGTH = 80
_PROBLEMS = 20
_NAMING = ("run.title", "run.dir")


@dataclass(frozen=True)
class SweepVariant:
    """Run of a sweep: its name, its values by key as written, its `--set` arguments and its deck."""

    name: str
    values: dict[str, str]
    settings: tuple[str, ...]
    deck: Deck

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.deck.run.dir)

    @property
    def digest(self) -> str:
        """Digest of the deck without `run.steps`, since a sweep may continue with more steps."""
        keys = {
            key: value
            for key, value in deck_keys(self.deck).items()
            if key not in self.deck.sources.defaulted and key != "run.steps"
        }
        text = json.dumps(keys, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class BadValuesError(HpctrainError):
    """Error of a deck with the values of one run of the sweep."""


@dataclass(frozen=True)
class Sweep:
    """Runs of a sweep, below one folder, and the keys that differ among them."""

    folder: Path
    keys: tuple[str, ...]
    variants: tuple[SweepVariant, ...]


def split_values(argument: str) -> tuple[str, list[str]]:
    """Return the key of a `--set` argument and its values, between commas outside of quotes and brackets.

    Raises:
        HpctrainError: The argument is invalid, or a value is empty or occurs twice.
    """
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[\w-]+\.[\w.-]+", key):
        raise HpctrainError(f"--set {argument}: must be section.key=VALUE,VALUE,... such as run.seed=1,2,3")
    if problem := control_problem(argument):
        raise HpctrainError(f"--set {argument}: {problem}")
    if key in _NAMING:
        raise HpctrainError(f"--set {argument}: is set by the sweep for each run; name the sweep with --name")
    values = [value.strip() for value in _parts(text)]
    if len(values) == 1:
        return key, values
    if "" in values:
        raise HpctrainError(f"--set {argument}: has an empty value between two commas")
    known: dict[str, str] = {}
    for value in values:
        same = repr(parse_argument(value))
        if same in known:
            raise HpctrainError(f"--set {argument}: has {value} twice")
        known[same] = value
    return key, values


def _parts(text: str) -> Iterator[str]:
    part, quote, depth = "", "", 0
    for letter in text:
        if letter == "," and not quote and depth == 0:
            yield part
            part = ""
            continue
        part += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
    yield part


def make_sweep(path: Path, arguments: Sequence[str], ranks: int, name: str | None) -> Sweep:
    """Return the runs of a deck for `--set` arguments; raise HpctrainError for all problems."""
    values_by_key: dict[str, list[str]] = {}
    problems: list[str] = []
    for argument in arguments:
        try:
            key, values = split_values(argument)
        except HpctrainError as error:
            problems += error.problems
            continue
        if key in values_by_key:
            problems.append(f"--set {argument}: {key} is given twice; write all of its values with commas")
        values_by_key[key] = values
    if problems:
        raise HpctrainError(problems)
    count = prod(map(len, values_by_key.values()))
    if count > MAX_RUNS:
        raise HpctrainError(f"the sweep would have {count} runs, more than {MAX_RUNS}")
    keys = tuple(key for key, values in values_by_key.items() if len(values) > 1)
    fixed = [f"{key}={values[0]}" for key, values in values_by_key.items() if len(values) == 1]
    try:
        folder, title = _folder_and_title(
            path, [*fixed, *(f"{key}={values_by_key[key][0]}" for key in keys)], name
        )
    except BadValuesError as error:  # reported together with those of all runs
        problems += error.problems
        folder, title = Path("sweep"), "sweep"
    variants: list[SweepVariant] = []
    names: set[str] = set()
    for chosen in product(*(values_by_key[key] for key in keys)):
        own = dict(zip(keys, chosen, strict=True))
        short = _name(own, names)
        changes = [f"{key}={value}" for key, value in own.items()]
        settings = [*fixed, *changes, f"run.title={_quoted(f'{title} {short}')}"]
        settings.append(f"run.dir={_quoted(str(folder / short))}")
        try:
            deck = read_deck(path, settings, ranks, read_source_keys)
        except HpctrainError as error:
            problems += error.problems
            continue
        variants.append(SweepVariant(short, own, tuple(settings), deck))
    if problems:
        unique = list(dict.fromkeys(problems))
        more = [f"and {len(unique) - _PROBLEMS} more problems"] if len(unique) > _PROBLEMS else []
        raise HpctrainError(unique[:_PROBLEMS] + more)
    return Sweep(folder, keys, tuple(variants))


def _folder_and_title(path: Path, settings: Sequence[str], name: str | None) -> tuple[Path, str]:
    """Return the folder of the sweep and the title of its runs; raise BadValuesError for an invalid deck."""
    try:
        deck = read_deck(path, settings, None, read_source_keys)
    except InputOutputError:
        raise
    except HpctrainError as error:
        raise BadValuesError(error.problems) from None
    named = f"{deck.run.title}-sweep" if name is None else name
    if "/" in named or named in ("", ".", "..") or control_problem(named) or len(named) > _NAME_LENGTH:
        raise HpctrainError(
            f"--name {named}: must be a folder name without slashes, of at most {_NAME_LENGTH} characters"
        )
    return Path(deck.run.dir).parent / named, deck.run.title


def _name(values: dict[str, str], used: set[str]) -> str:
    """Return a unique folder name with the values, such as "peak=1e-4,seed=2"."""
    last = [key.rpartition(".")[2] for key in values]
    parts = []
    for key, value in values.items():
        short = key.rpartition(".")[2]
        label = short if last.count(short) == 1 else key
        text = re.sub(r"[^\w+.-]+", "-", value, flags=re.ASCII).strip("-.") or "value"
        parts.append(f"{label}={text}")
    name = ",".join(parts) or "all"
    while ".." in name:
        name = name.replace("..", ".")
    if len(name) > _NAME_LENGTH:
        digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        name = f"{name[: _NAME_LENGTH - 9]}-{digest}"
    number = 2
    unique = name
    while unique in used:
        unique, number = f"{name}-{number}", number + 1
    used.add(unique)
    return unique


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def record_runs(sweep: Sweep) -> None:
    """Add the runs of a sweep to the file in its folder.

    Raises:
        HpctrainError: Runs of the same names were started with other decks. Nothing is written.
    """
    known = recorded_digests(sweep.folder)
    conflicts = [
        f"{each.folder}: was started with another deck; choose another --name, or remove that run"
        for each in sweep.variants
        if known.get(each.name, each.digest) != each.digest and each.folder.exists()
    ]
    if conflicts:
        count = len(conflicts) - _PROBLEMS
        more = [f"and {count} more such runs"] if count > 0 else []
        raise HpctrainError(conflicts[:_PROBLEMS] + more)
    known |= {each.name: each.digest for each in sweep.variants}
    with failing_as(f"{sweep.folder}: cannot be written"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        new = sweep.folder / f".{SWEEP_FILE}.new"
        write_text(new, strict_json({"runs": known}, indent=1) + "\n")
        new.replace(sweep.folder / SWEEP_FILE)


def recorded_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the decks in the file of a sweep, by name of the run.

    Raises:
        HpctrainError: The file was not written by a sweep.
    """
    path = folder / SWEEP_FILE
    if not path.exists():
        return {}
    try:
        content: Any = parse_json(read_text(path, _SWEEP_BYTES))
        runs = content["runs"]
        if not all(isinstance(digest, str) for digest in runs.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise HpctrainError(f"{path}: was not written by a sweep; choose another --name") from None
    return dict(runs)
