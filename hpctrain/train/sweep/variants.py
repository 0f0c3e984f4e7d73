"""The runs of a sweep: every combination of values of some keys, each with a name and a folder of its own."""

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
MOST = 1000  # runs of a sweep
_SWEEP_BYTES = 16 << 20
_NAME_LENGTH = 80
_PROBLEMS = 20
_NAMING = ("run.title", "run.dir")


@dataclass(frozen=True)
class SweepVariant:
    """A run of a sweep: its name, the values that are its own by key, as written, and its deck."""

    name: str
    values: dict[str, str]
    settings: tuple[str, ...]
    deck: Deck

    @property
    def folder(self) -> Path:
        """Its run's folder."""
        return Path(self.deck.run.dir)

    @property
    def digest(self) -> str:
        """Of what its deck gives, but for how long it is trained: a sweep may go on with more steps."""
        keys = {
            key: value
            for key, value in deck_keys(self.deck).items()
            if key not in self.deck.sources.defaulted and key != "run.steps"
        }
        text = json.dumps(keys, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class BadValuesError(HpctrainError):
    """What is wrong with a deck of some of the values."""


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep, below one folder, and the keys that differ among them."""

    folder: Path
    keys: tuple[str, ...]
    variants: tuple[SweepVariant, ...]


def split_values(argument: str) -> tuple[str, list[str]]:
    """The key of a `--set` argument and its values, between commas that stand in no quotes or brackets.

    HpctrainError where it is none, or a value is there twice, or empty.
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
    """The runs of a deck for these `--set` arguments, of `ranks` each; HpctrainError with all problems."""
    given: dict[str, list[str]] = {}
    problems: list[str] = []
    for argument in arguments:
        try:
            key, values = split_values(argument)
        except HpctrainError as error:
            problems += error.problems
            continue
        if key in given:
            problems.append(f"--set {argument}: {key} is given twice; write all of its values with commas")
        given[key] = values
    if problems:
        raise HpctrainError(problems)
    count = prod(map(len, given.values()))
    if count > MOST:
        raise HpctrainError(f"the sweep would have {count} runs, more than {MOST}")
    keys = tuple(key for key, values in given.items() if len(values) > 1)
    fixed = [f"{key}={values[0]}" for key, values in given.items() if len(values) == 1]
    try:
        folder, title = _place(path, [*fixed, *(f"{key}={given[key][0]}" for key in keys)], name)
    except BadValuesError as error:  # which those of all runs are told beside
        problems += error.problems
        folder, title = Path("sweep"), "sweep"
    variants: list[SweepVariant] = []
    names: set[str] = set()
    for chosen in product(*(given[key] for key in keys)):
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
        told = list(dict.fromkeys(problems))
        more = [f"and {len(told) - _PROBLEMS} more problems"] if len(told) > _PROBLEMS else []
        raise HpctrainError(told[:_PROBLEMS] + more)
    return Sweep(folder, keys, tuple(variants))


def _place(path: Path, settings: Sequence[str], name: str | None) -> tuple[Path, str]:
    """The folder of the sweep, and the title of its runs; BadValuesError where the deck is wrong so."""
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


def _name(values: dict[str, str], taken: set[str]) -> str:
    """A name for a folder that tells the values: "peak=1e-4,seed=2"."""
    last = [key.rpartition(".")[2] for key in values]
    parts = []
    for key, value in values.items():
        short = key.rpartition(".")[2]
        label = short if last.count(short) == 1 else key
        told = re.sub(r"[^\w+.-]+", "-", value, flags=re.ASCII).strip("-.") or "value"
        parts.append(f"{label}={told}")
    name = ",".join(parts) or "all"
    while ".." in name:
        name = name.replace("..", ".")
    if len(name) > _NAME_LENGTH:
        digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        name = f"{name[: _NAME_LENGTH - 9]}-{digest}"
    number = 2
    found = name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    taken.add(found)
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def record(sweep: Sweep) -> None:
    """Write down the runs of a sweep in its folder, beside those that are there. HpctrainError where runs of
    the same names were begun with other decks; nothing is written then.
    """
    known = recorded(sweep.folder)
    others = [
        f"{each.folder}: was started with another deck; choose another --name, or remove that run"
        for each in sweep.variants
        if known.get(each.name, each.digest) != each.digest and each.folder.exists()
    ]
    if others:
        more = [f"and {len(others) - _PROBLEMS} more such runs"] if len(others) > _PROBLEMS else []
        raise HpctrainError(others[:_PROBLEMS] + more)
    known |= {each.name: each.digest for each in sweep.variants}
    with failing_as(f"{sweep.folder}: cannot be written"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        new = sweep.folder / f".{SWEEP_FILE}.new"
        write_text(new, strict_json({"runs": known}, indent=1) + "\n")
        new.replace(sweep.folder / SWEEP_FILE)


def recorded(folder: Path) -> dict[str, str]:
    """Names of the runs that were written down, with the digests of their decks. HpctrainError where what is
    there is no sweep's.
    """
    path = folder / SWEEP_FILE
    if not path.exists():
        return {}
    try:
        told: Any = parse_json(read_text(path, _SWEEP_BYTES))
        runs = told["runs"]
        if not all(isinstance(digest, str) for digest in runs.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise HpctrainError(f"{path}: was not written by a sweep; choose another --name") from None
    return dict(runs)
