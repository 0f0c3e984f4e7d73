"""A sample, what judges samples, and the plainest judge: whether the answer is what the row says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError
from hpctrain.text import kind_of


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt; the row of the prompt has `others`. Errors call it by its numbers."""

    prompt: str
    completion: str
    others: Mapping[str, Any] = field(default_factory=dict)
    prompt_number: int = 0
    sample_number: int = 0
    tokens: int = 0
    """Of the completion."""

    def __str__(self) -> str:
        return f"sample {self.sample_number} of prompt {self.prompt_number}"

    @property
    def told(self) -> str:
        """Its numbers and texts, clipped, for a sentence."""
        return f"{self} (prompt {quoted(self.prompt)}, completion {quoted(self.completion)})"


class Reward(Protocol):
    """Function that rates samples independently of each other. Higher numbers are better."""

    name: str
    """By which figures call it."""

    def check(self, others: Mapping[str, Any]) -> None:
        """Check that a prompt's row has the fields that this reward needs.

        Raises:
            ValueError: A field is missing or wrong. The message continues a sentence that begins with "the
                row".
        """

    def start(self) -> None:
        """Start the reward, for example its processes.

        Raises:
            HpctrainError: The reward cannot start.
        """

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return a finite number for each sample.

        Raises:
            HpctrainError: There is no number for a sample. The message names the sample.
        """

    def close(self) -> None:
        """End what `start` has started. A later call of `scores` starts it again."""


class ExactMatch:
    """1 where the completion is the answer, or one of the answers, that the row has under `key`, else 0."""

    name = "exact_match"

    def __init__(self, key: str = "answer") -> None:
        self.key = key

    def check(self, others: Mapping[str, Any]) -> None:
        """Check that a prompt's row has the fields that this reward needs."""
        if self.key not in others:
            near = ", ".join(map(quoted, list(others)[:8])) or "only its prompt"
            raise ValueError(f"has no {quoted(self.key)}, which exact-match requires (it has {near})")
        answers_of(others, self.key)

    def start(self) -> None:
        """Start the reward, for example its processes."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return a finite number for each sample."""
        return [self._score(sample) for sample in samples]

    def close(self) -> None:
        """End what `start` has started. A later call of `scores` starts it again."""

    def _score(self, sample: Sample) -> float:
        try:
            self.check(sample.others)
        except ValueError as error:
            number, prompt = sample.prompt_number, quoted(sample.prompt)
            raise HpctrainError(f"exact-match: the row of prompt {number} ({prompt}) {error}") from None
        return float(is_exact_match(sample.completion, answers_of(sample.others, self.key)))


def is_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether a text is one of the answers, but for blanks around both."""
    return text.strip() in {answer.strip() for answer in answers}


def answers_of(others: Mapping[str, Any], key: str) -> list[str]:
    """The texts, any of which will do, that a row has under `key`; ValueError where that is something else,
    or is empty.
    """
    given = others[key]
    answers = given if isinstance(given, list) else [given]
    wrong = [answer for answer in answers if not isinstance(answer, str)]
    if wrong:
        raise ValueError(f"has {kind_of(wrong[0])} as its {quoted(key)} (expected a text or a list of texts)")
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"has an empty {quoted(key)}")
    return answers


def quoted(text: str) -> str:
    """A text of others within a sentence: clipped, and on one line."""
    return json.dumps(clipped(text), ensure_ascii=False)
