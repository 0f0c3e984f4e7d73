"""Prompts: what is to be continued, as an argument, from a file or stdin, or several as lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import parse_json, read_text
from hpctrain.text import escaped, text_problem

MOST_BYTES = 64 << 20
"""Of a file of prompts."""

STDIN = "-"

TOLD = ("text", "tokens", "ended", "sample")
"""What is told of a sample of a line, which has no such keys of its own."""


@dataclass(frozen=True)
class Prompt:
    """A text, and what else its line of JSON holds, which goes with it."""

    text: str = ""
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from: at most one of these. None begin a document."""

    text: str | None = None
    file: str | None = None
    json_lines: str | None = None

    def read(self) -> list[Prompt]:
        """All of them; HpctrainError where they will not do, InputOutputError where they cannot be read."""
        given = {"--prompt": self.text, "--prompt-file": self.file, "--json-lines": self.json_lines}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise HpctrainError(f"{' and '.join(names)} conflict with each other")
        if self.json_lines is not None:
            return list(
                _of_lines(_named("--json-lines", self.json_lines), _text("--json-lines", self.json_lines))
            )
        if self.file is None:
            if problem := text_problem(self.text or ""):
                raise HpctrainError(f"--prompt: {problem}")
            return [Prompt(self.text or "")]
        text = _text("--prompt-file", self.file).removesuffix("\n")
        if not text:
            empty = f"{_named('--prompt-file', self.file)}: is empty; leave it out to start a document"
            raise HpctrainError(empty)
        return [Prompt(text)]


def _of_lines(where: str, text: str) -> Iterator[Prompt]:
    found, problems = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_of_line(line))
        except ValueError as error:
            problems.append(f"{where}, line {number}: {error}")
    if not found and not problems:
        problems.append(f'{where}: has no prompts (expected lines such as {{"prompt": "..."}})')
    if problems:
        raise HpctrainError(problems[:_MOST_PROBLEMS])
    yield from found


_MOST_PROBLEMS = 10


def _of_line(line: str) -> Prompt:
    """The prompt of a line; a ValueError says what is wrong with it."""
    try:
        given = parse_json(line)
    except ValueError:
        raise ValueError(f'is not JSON: {escaped(clipped(line))} (expected {{"prompt": "..."}})') from None
    others = dict(given) if isinstance(given, dict) else {"prompt": given}
    if "prompt" not in others and "text" in others:
        raise ValueError('has a "text" but no "prompt" (expected {"prompt": "..."})')
    if told := next((name for name in TOLD if name in others), None):
        raise ValueError(f'has the key "{told}", which is reserved for the output; rename it')
    if "prompt" not in others:
        return Prompt(others=others)
    prompt = others.pop("prompt")
    if not isinstance(prompt, str):
        raise ValueError(  # noqa: TRY004
            'must be a string, or an object with a string "prompt"'
        )
    if not prompt:
        raise ValueError('its prompt is empty; leave "prompt" out to start a document')
    if problem := text_problem(prompt):
        raise ValueError(f"its prompt {problem}")
    return Prompt(prompt, others)


def _named(option: str, name: str) -> str:
    return f"{option} {'- (stdin)' if name == STDIN else name}"


def _text(option: str, name: str) -> str:
    where = _named(option, name)
    try:
        if name != STDIN:
            return read_text(name, MOST_BYTES)
        content = sys.stdin.buffer.read(MOST_BYTES + 1) if sys.stdin is not None else b""
        if len(content) > MOST_BYTES:
            raise HpctrainError(f"{where}: has more than {MOST_BYTES} bytes")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{where}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputOutputError(f"{where}: cannot be read ({error.strerror or error})") from None
