"""Reading of `samples.jsonl`, which has a JSON object for each recorded answer of a policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import InputOutputError
from hpctrain.report.metric_rows import scan_metrics

SAMPLES_FILE = "samples.jsonl"
SHOWN = 60
"""Largest number of answers, the newest ones."""


@dataclass(frozen=True)
class SampledAnswer:
    """Answer of a policy.

    Attributes:
        step: Step after which it was sampled.
        of: "rollout" or the evaluation.
        prompt: The prompt.
        text: The answer.
        rewards: Its rewards as text.
        tokens: Number of its tokens.
        ended: How it ended.
    """

    step: int
    of: str
    prompt: str
    text: str
    rewards: str
    tokens: str
    ended: str


def read_samples(path: Path) -> list[SampledAnswer]:
    """Return the newest answers in the order of the file; [] without the file. Invalid lines are left out.

    Raises:
        InputOutputError: The file cannot be read.
    """
    if not path.exists():
        return []
    newest = deque[SampledAnswer](maxlen=SHOWN)
    for _, row in scan_metrics(path):
        if row is not None and isinstance(row.get("prompt"), str) and isinstance(row.get("text"), str):
            newest.append(_answer(row))
    return list(newest)


def try_samples(path: Path, problems: list[str]) -> list[SampledAnswer]:
    """Return the newest answers. If the file cannot be read, add the reason to `problems`."""
    try:
        return read_samples(path)
    except InputOutputError as error:
        problems += error.problems
        return []


def _answer(row: Mapping[str, Any]) -> SampledAnswer:
    values = row.get("rewards")
    rewards = values if isinstance(values, dict) else {}
    words = ", ".join(
        f"{value:.4g}" if len(rewards) == 1 else f"{name} {value:.4g}" for name, value in _numbers(rewards)
    )
    texts = (str(row.get(name, "")) for name in ("of", "tokens", "ended"))
    of, tokens, ended = texts
    return SampledAnswer(row["step"], of, row["prompt"], row["text"], words, tokens, ended)


def _numbers(rewards: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in rewards.items() if isinstance(value, int | float)]
