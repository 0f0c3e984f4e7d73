"""The rows of a task: questions with answers to choose from, or answers to be written."""

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

MOST_BYTES = 256 << 20
"""Of a file of a task."""

_MOST_PROBLEMS = 10
_FORM = '{"prompt": "...", "choices": ["...", "..."], "answer": 0} or {"prompt": "...", "answer": "..."}'


@dataclass(frozen=True)
class Choice:
    """Which of the texts goes on from the prompt: number `answer`."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class WrittenAnswer:
    """What is to be written behind the prompt: any of these, but for blanks around it."""

    prompt: str
    answers: tuple[str, ...]


def read_rows(path: Path, option: str = "--task") -> list[Choice] | list[WrittenAnswer]:
    """All rows of a file of lines of JSON, of one kind. HpctrainError with what is wrong, InputOutputError
    where it cannot be read.
    """
    where = f"{option} {path}"
    try:
        text = read_text(path, MOST_BYTES)
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{where}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputOutputError(f"{where}: cannot be read ({error.strerror or error})") from None
    rows, problems = list[Choice | WrittenAnswer](), list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_of_line(line))
        except ValueError as error:
            problems.append(f"{where}, line {number}: {error}")
    choices = [row for row in rows if isinstance(row, Choice)]
    written = [row for row in rows if isinstance(row, WrittenAnswer)]
    if not rows and not problems:
        problems.append(f"{where}: has no rows, such as {_FORM}")
    elif choices and written and not problems:
        problems.append(
            f"{where}: has {len(choices)} rows with choices and {len(written)} without: make two files"
        )
    if problems:
        raise HpctrainError(problems[:_MOST_PROBLEMS])
    return choices or written


def is_choice(rows: list[Choice] | list[WrittenAnswer]) -> TypeIs[list[Choice]]:
    """Which of both they are."""
    return isinstance(rows[0], Choice)


def _of_line(line: str) -> Choice | WrittenAnswer:
    """The row of a line; a ValueError says what is wrong with it."""
    try:
        given = parse_json(line)
    except ValueError:
        raise ValueError(f"is not JSON: {escaped(clipped(line))} (expected {_FORM})") from None
    if not isinstance(given, dict) or "prompt" not in given or "answer" not in given:
        raise ValueError(f"is not an object with a prompt and an answer (expected {_FORM})")
    (prompt,) = _texts([given["prompt"]], "prompt")
    if given.get("choices") is None:
        answer = given["answer"]
        answers = tuple(_texts(answer if isinstance(answer, list) else [answer], "answer"))
        if not answers or not all(each.strip() for each in answers):
            raise ValueError("its answer is empty")
        return WrittenAnswer(prompt, answers)
    choices = tuple(_texts(given["choices"], "choices"))
    if len(choices) < 2 or not all(choices):
        raise ValueError("its choices must be two texts or more, none of them empty")
    return Choice(prompt, choices, _number(given["answer"], choices))


def _number(answer: Any, choices: tuple[str, ...]) -> int:
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
