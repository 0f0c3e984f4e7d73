"""Interface of rewards, the samples that they score, and the reward `exact-match`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError
from hpctrain.text import kind_of


@dataclass(frozen=True)
class Sample:
    """Completion of a prompt.

    Attributes:
        prompt: Text of the prompt.
        completion: Text of the completion.
        other_keys: Other keys of the prompt's row, such as "answer".
        prompt_number: Number of the prompt, for messages.
        sample_number: Number of this sample among those of the prompt, for messages.
        token_count: Number of tokens of the completion.
    """

    prompt: str
    completion: str
    other_keys: Mapping[str, Any] = field(default_factory=dict)
    prompt_number: int = 0
    sample_number: int = 0
    token_count: int = 0

    def __str__(self) -> str:
        return f"sample {self.sample_number} of prompt {self.prompt_number}"

    @property
    def description(self) -> str:
        """Numbers and shortened texts of the sample, for messages."""
        return f"{self} (prompt {quoted(self.prompt)}, completion {quoted(self.completion)})"


class Reward(ABC):
    """Function that rates samples independently of each other. Higher numbers are better.

    Attributes:
        name: Name of the reward in metrics.
    """

    name: str

    def check(self, other_keys: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Check that a prompt's row has the fields that this reward needs.

        Raises:
            ValueError: A field is missing or wrong. The message continues a sentence that begins with "the
                row".
        """

    def start(self) -> None:  # noqa: B027 - optional
        """Start the reward, for example its processes.

        Raises:
            HpctrainError: The reward cannot start.
        """

    @abstractmethod
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return a finite number for each sample.

        Raises:
            HpctrainError: There is no number for a sample. The message names the sample.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """End what `start` has started. A later call of `scores` starts it again."""


class ExactMatch(Reward):
    """Reward that is 1 if the completion equals an answer in the prompt's row, else 0.

    Attributes:
        key: Field of the row that has the answer, or a list of accepted answers.
    """

    name = "exact_match"

    def __init__(self, key: str = "answer") -> None:
        self.key = key

    @override
    def check(self, other_keys: Mapping[str, Any]) -> None:
        if self.key not in other_keys:
            names = ", ".join(map(quoted, list(other_keys)[:8])) or "only its prompt"
            raise ValueError(f"has no {quoted(self.key)}, which exact-match requires (it has {names})")
        accepted_answers(other_keys, self.key)

    @override
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        try:
            self.check(sample.other_keys)
        except ValueError as error:
            number, prompt = sample.prompt_number, quoted(sample.prompt)
            raise HpctrainError(f"exact-match: the row of prompt {number} ({prompt}) {error}") from None
        return float(is_exact_match(sample.completion, accepted_answers(sample.other_keys, self.key)))


def is_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Return True if a text equals one of the answers, without white space at both ends."""
    return text.strip() in {answer.strip() for answer in answers}


def accepted_answers(other_keys: Mapping[str, Any], key: str) -> list[str]:
    """Return the accepted answers in a prompt's row.

    Args:
        other_keys: Fields of the row.
        key: Field that has the answer, or a list of them.

    Raises:
        ValueError: The field has something else, or an empty answer. The message continues "the row".
    """
    value = other_keys[key]
    answers = value if isinstance(value, list) else [value]
    wrong = [answer for answer in answers if not isinstance(answer, str)]
    if wrong:
        raise ValueError(f"has {kind_of(wrong[0])} as its {quoted(key)} (expected a text or a list of texts)")
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"has an empty {quoted(key)}")
    return answers


def quoted(text: str) -> str:
    """Return a text of unknown origin in quotes, shortened and on one line, for messages."""
    return json.dumps(clipped(text), ensure_ascii=False)
