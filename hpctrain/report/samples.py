"""What a policy wrote for people to read: reading `samples.jsonl`, one JSON object an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import InputOutputError
from hpctrain.report.rows import scan_metrics

SAMPLES_FILE = "samples.jsonl"
SHOWN = 60
"""Answers that are read at most: the newest."""


@dataclass(frozen=True)
class ShownAnswer:
    """An answer to a prompt after `step`, `of` a rollout or an evaluation, and its rewards in words."""

    step: int
    of: str
    prompt: str
    text: str
    rewards: str
    tokens: str
    ended: str


def read_samples(path: Path) -> list[ShownAnswer]:
    """The newest answers in the order of the file, nothing where there is none; lines that are no answers are
    left out. InputOutputError where the file cannot be read.
    """
    if not path.exists():
        return []
    newest = deque[ShownAnswer](maxlen=SHOWN)
    for _, row in scan_metrics(path):
        if row is not None and isinstance(row.get("prompt"), str) and isinstance(row.get("text"), str):
            newest.append(_answer(row))
    return list(newest)


def try_samples(path: Path, problems: list[str]) -> list[ShownAnswer]:
    """The same; what keeps it from being read is added to the problems."""
    try:
        return read_samples(path)
    except InputOutputError as error:
        problems += error.problems
        return []


def _answer(row: Mapping[str, Any]) -> ShownAnswer:
    given = row.get("rewards")
    rewards = given if isinstance(given, dict) else {}
    words = ", ".join(
        f"{value:.4g}" if len(rewards) == 1 else f"{name} {value:.4g}" for name, value in _numbers(rewards)
    )
    told = (str(row.get(name, "")) for name in ("of", "tokens", "ended"))
    of, tokens, ended = told
    return ShownAnswer(row["step"], of, row["prompt"], row["text"], words, tokens, ended)


def _numbers(rewards: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in rewards.items() if isinstance(value, int | float)]
