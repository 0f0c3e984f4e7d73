"""Rows of a task file: prompts with answers to choose from, or with answers that the model has to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypeIs

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import parse_json, read_text
from hpctrain.text import escaped, text_problem

MAX_FILE_BYTES = 256 << 20
"""Largest size of a task file, in bytes."""

_MAX_PROBLEMS = 10
_EXAMPLES = '{"prompt": "...", "choices": ["...", "..."], "answer": 0} or {"prompt": "...", "answer": "..."}'


@dataclass(frozen=True)
class Choice:
    """Prompt with possible continuations.

    Attributes:
        prompt: The prompt.
        choices: The continuations.
        answer: Index of the right one.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class WrittenAnswer:
    """Prompt whose continuation the model writes.

    Attributes:
        prompt: The prompt.
        answers: Right continuations. White space at both ends does not matter.
    """

    prompt: str
    answers: tuple[str, ...]


def read_rows(path: Path, option: str = "--task") -> list[Choice] | list[WrittenAnswer]:
    """Return the rows of a file of JSON lines. All rows have the same kind.

    Args:
        path: The file.
        option: Option of the command line that names the file, for messages.

    Raises:
        HpctrainError: Lines of the file are wrong. It has the first problems.
        InputOutputError: The file cannot be read.
    """
    where = f"{option} {path}"
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{where}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputOutputError(f"{where}: cannot be read ({error.strerror or error})") from None
    rows, problems = list[Choice | WrittenAnswer](), list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse_line(line))
        except ValueError as error:
            problems.append(f"{where}, line {number}: {error}")
    choices = [row for row in rows if isinstance(row, Choice)]
    written = [row for row in rows if isinstance(row, WrittenAnswer)]
    if not rows and not problems:
        problems.append(f"{where}: has no rows, such as {_EXAMPLES}")
    elif choices and written and not problems:
        problems.append(
            f"{where}: has {len(choices)} rows with choices and {len(written)} without: make two files"
        )
    if problems:
        raise HpctrainError(problems[:_MAX_PROBLEMS])
    return choices or written


def is_choice(rows: list[Choice] | list[WrittenAnswer]) -> TypeIs[list[Choice]]:
    """Return True if the rows have choices."""
    return isinstance(rows[0], Choice)


def _parse_line(line: str) -> Choice | WrittenAnswer:
    """Return the row of a line; raise a ValueError with the problem if there is none."""
    try:
        fields = parse_json(line)
    except ValueError:
        raise ValueError(f"is not JSON: {escaped(clipped(line))} (expected {_EXAMPLES})") from None
    if not isinstance(fields, dict) or "prompt" not in fields or "answer" not in fields:
        raise ValueError(f"is not an object with a prompt and an answer (expected {_EXAMPLES})")
    (prompt,) = _texts([fields["prompt"]], "prompt")
    if fields.get("choices") is None:
        answer = fields["answer"]
        answers = tuple(_texts(answer if isinstance(answer, list) else [answer], "answer"))
        if not answers or not all(each.strip() for each in answers):
            raise ValueError("its answer is empty")
        return WrittenAnswer(prompt, answers)
    choices = tuple(_texts(fields["choices"], "choices"))
    if len(choices) < 2 or not all(choices):
        raise ValueError("its choices must be two texts or more, none of them empty")
    return Choice(prompt, choices, _answer_index(fields["answer"], choices))


def _answer_index(answer: Any, choices: tuple[str, ...]) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str) and choices.count(answer) == 1:
        return choices.index(answer)
    raise ValueError(
        f"its answer must be one of its choices, or the number of one, from 0 to {len(choices) - 1}"
    )


def _texts(values: Any, name: str) -> Iterator[str]:
    for value in values if isinstance(values, list) else [None]:
        if not isinstance(value, str):
            raise ValueError(f"its {name} must be text")  # noqa: TRY004
        if problem := text_problem(value):
            raise ValueError(f"its {name} {problem}")
        yield value
