"""Prompts of `hpctrain generate`: an argument, a text file or stdin, or lines of JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import parse_json, read_text
from hpctrain.text import escaped, text_problem

MAX_BYTES = 64 << 20
"""Largest size of a file of prompts."""

STDIN = "-"
"""Name of a file that stands for stdin."""

OUTPUT_KEYS = ("text", "tokens", "ended", "sample")
"""Keys that the output adds to a line of JSON, which therefore must not have them."""

_MAX_PROBLEMS = 10
"""Largest number of lines that an error names."""


@dataclass(frozen=True)
class Prompt:
    """Text to continue.

    Attributes:
        text: The text; empty to begin a document.
        other_keys: Further keys of its line of JSON, which are copied to the output.
    """

    text: str = ""
    other_keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptOptions:
    """Options that say where prompts come from; at most one is set. Without one, the prompt is empty.

    Attributes:
        text: The prompt (--prompt).
        file: File with one prompt (--prompt-file).
        json_lines: File with a line of JSON for each prompt (--json-lines).
    """

    text: str | None = None
    file: str | None = None
    json_lines: str | None = None

    def read(self) -> list[Prompt]:
        """Read and return the prompts. Local.

        Raises:
            HpctrainError: Several options are set, or a file is not valid.
            InputOutputError: A file cannot be read.
        """
        options = {"--prompt": self.text, "--prompt-file": self.file, "--json-lines": self.json_lines}
        names = [name for name, value in options.items() if value is not None]
        if len(names) > 1:
            raise HpctrainError(f"{' and '.join(names)} conflict with each other")
        if self.json_lines is not None:
            place = _place("--json-lines", self.json_lines)
            return _parse_lines(place, _read_file(place, self.json_lines))
        if self.file is None:
            if problem := text_problem(self.text or ""):
                raise HpctrainError(f"--prompt: {problem}")
            return [Prompt(self.text or "")]
        place = _place("--prompt-file", self.file)
        text = _read_file(place, self.file).removesuffix("\n")
        if not text:
            raise HpctrainError(f"{place}: is empty; leave it out to start a document")
        return [Prompt(text)]


def _parse_lines(place: str, text: str) -> list[Prompt]:
    """Return the prompts of a file with lines of JSON.

    Args:
        place: Option and name of the file, for messages.
        text: Contents of the file.

    Raises:
        HpctrainError: Some lines are not valid, or there are none. The error names the first ones.
    """
    prompts, problems = list[Prompt](), list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse_line(line))
        except ValueError as error:
            problems.append(f"{place}, line {number}: {error}")
    if not prompts and not problems:
        problems.append(f'{place}: has no prompts (expected lines such as {{"prompt": "..."}})')
    if problems:
        raise HpctrainError(problems[:_MAX_PROBLEMS])
    return prompts


def _parse_line(line: str) -> Prompt:
    """Return the prompt of a line of JSON.

    Raises:
        ValueError: The line is not valid; the error says why.
    """
    try:
        value = parse_json(line)
    except ValueError:
        raise ValueError(f'is not JSON: {escaped(clipped(line))} (expected {{"prompt": "..."}})') from None
    keys = dict(value) if isinstance(value, dict) else {"prompt": value}
    if "prompt" not in keys and "text" in keys:
        raise ValueError('has a "text" but no "prompt" (expected {"prompt": "..."})')
    if reserved := next((name for name in OUTPUT_KEYS if name in keys), None):
        raise ValueError(f'has the key "{reserved}", which is reserved for the output; rename it')
    if "prompt" not in keys:
        return Prompt(other_keys=keys)
    prompt = keys.pop("prompt")
    if not isinstance(prompt, str):
        raise ValueError(  # noqa: TRY004
            'must be a string, or an object with a string "prompt"'
        )
    if not prompt:
        raise ValueError('its prompt is empty; leave "prompt" out to start a document')
    if problem := text_problem(prompt):
        raise ValueError(f"its prompt {problem}")
    return Prompt(prompt, keys)


def _place(option: str, name: str) -> str:
    """Return an option with the name of its file, for messages."""
    return f"{option} {'- (stdin)' if name == STDIN else name}"


def _read_file(place: str, name: str) -> str:
    """Return the text of a file or of stdin.

    Args:
        place: Option and name of the file, for messages.
        name: Name of the file, or STDIN.

    Raises:
        HpctrainError: The file is too large or is not UTF-8 text.
        InputOutputError: The file cannot be read.
    """
    try:
        if name != STDIN:
            return read_text(name, MAX_BYTES)
        content = sys.stdin.buffer.read(MAX_BYTES + 1) if sys.stdin is not None else b""
        if len(content) > MAX_BYTES:
            raise HpctrainError(f"{place}: has more than {MAX_BYTES} bytes")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{place}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputOutputError(f"{place}: cannot be read ({error.strerror or error})") from None
