"""A sample, what judges samples, and the plainest judge: whether the answer is what the row says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError
from hpctrain.words import kind_of


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
    """What judges samples, each by itself: a number for each, the more the better."""

    name: str
    """By which figures call it."""

    def check(self, others: Mapping[str, Any]) -> None:
        """ValueError, in words that go on from "the row", where a prompt's row lacks what this needs."""

    def start(self) -> None:
        """Have it ready. HpctrainError where it cannot be."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Finite numbers. HpctrainError, with the sample, where there is none for it."""

    def close(self) -> None:
        """End what it has started; what is asked afterwards starts it again."""


class ExactMatch:
    """1 where the completion is the answer, or one of the answers, that the row has under `key`, else 0."""

    name = "exact_match"

    def __init__(self, key: str = "answer") -> None:
        self.key = key

    def check(self, others: Mapping[str, Any]) -> None:
        """See Reward."""
        if self.key not in others:
            near = ", ".join(map(quoted, list(others)[:8])) or "nothing besides its prompt"
            raise ValueError(f"has no {quoted(self.key)}, with which exact-match compares (it has {near})")
        answers_of(others, self.key)

    def start(self) -> None:
        """See Reward."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """See Reward."""
        return [self._score(sample) for sample in samples]

    def close(self) -> None:
        """See Reward."""

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
        raise ValueError(
            f"has {kind_of(wrong[0])} as its {quoted(key)} (a text, or a list of texts, would do)"
        )
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"has an empty {quoted(key)}")
    return answers


def quoted(text: str) -> str:
    """A text of others within a sentence: clipped, and on one line."""
    return json.dumps(clipped(text), ensure_ascii=False)
