"""Chat templates, from the messages of a conversation to its text, in Jinja, as Hugging Face's tokenizers
have them.

A template is rendered in jinja2's sandbox with what transformers gives it (blocks trimmed, loop controls,
`raise_exception`, `strftime_now`, `{% generation %}`), and stopped where it loops long, after so many steps:
on every rank at the same place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.data.tokenizer_settings import TEMPLATE_BYTES, TokenizerSettings
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import read_text
from hpctrain.words import either, nearest, require

if TYPE_CHECKING:
    from hpctrain.data.sandbox import Sandbox

Message = Mapping[str, Any]
Range = tuple[int, int]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
RAW = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
BUILT_IN = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN, "raw": RAW}
"""By name: that of Qwen and others, that of Llama 3, "User: ..., Assistant: ...", and contents alone."""

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's thoughts have; templates read the first one, some the second."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template's `text`; `tokens` are names that it may use, such as eos_token; `title` is what messages
    call it; `now`, in ISO 8601, is what one that asks takes for the time.
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    title: str = "chat template"
    now: str = ""

    @staticmethod
    def of(
        argument: str | None, tokenizer: str, ends: str, settings: TokenizerSettings | None = None
    ) -> ChatTemplate:
        """Return the template that a user means.

        Args:
            argument: name of a built-in template, a Jinja file, or None for the template of the tokenizer.
            tokenizer: what the user calls the tokenizer.
            ends: token that ends a document, which is `eos_token` if the settings name none.
            settings: those of the tokenizer; None to read them from its folder.

        Raises:
            HpctrainError: there is no such template, or it cannot be parsed.
        """
        if settings is None:
            folder = Path(tokenizer)
            settings = TokenizerSettings.of_folder(folder) if folder.is_dir() else TokenizerSettings()
        tokens = {"eos_token": ends} | settings.special_tokens
        if argument is None:
            if (own := settings.chat_template) is None:
                names = either([*BUILT_IN, "a Jinja file"])
                raise HpctrainError(f"--tokenizer {tokenizer} has no chat template; --template takes {names}")
            text, title = own, f"chat_template of {tokenizer}"
        elif argument in BUILT_IN:
            text, title = BUILT_IN[argument], f"--template {argument}"
        else:
            text, title = _of_file(argument)
        # Where nothing asks for the time, a file does not depend on it.
        now = datetime.now().isoformat(timespec="seconds") if "strftime_now" in text else ""
        return ChatTemplate(text, tokens, title, now).parsed()

    @staticmethod
    def from_json(text: str) -> ChatTemplate:
        """Of what `to_json` made."""
        return ChatTemplate(**json.loads(text))

    def to_json(self) -> str:
        """All of it as text."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def parsed(self) -> ChatTemplate:
        """The same. HpctrainError where it cannot be parsed."""
        assert self.sandbox is not None
        return self

    @cached_property
    def sandbox(self) -> Sandbox:
        """What renders it. HpctrainError where it cannot be parsed."""
        require("jinja2", f"{self.title}: rendering it")
        from hpctrain.data.sandbox import Sandbox

        return Sandbox(self.text, self.title, datetime.fromisoformat(self.now) if self.now else None)

    def render(
        self, messages: Sequence[Message], prompt: bool = False, tools: Any = None
    ) -> tuple[str, list[Range]]:
        """The text of messages, with `prompt` up to where an assistant goes on; and the ranges of it that the
        template itself marks as generated. HpctrainError with what the template finds wrong, in words.
        """
        given = {"messages": [_with_thoughts(each) for each in messages], "tools": tools, "documents": None}
        return self.sandbox.render({**given, "add_generation_prompt": prompt, **self.tokens})


def _with_thoughts(message: Message) -> dict[str, Any]:
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _of_file(path: str) -> tuple[str, str]:
    title = f"--template {path}"
    try:
        return read_text(path, TEMPLATE_BYTES), title
    except FileNotFoundError:
        near = nearest(path, BUILT_IN)
        meant = f"did you mean {near}?" if near else f"it takes {either([*BUILT_IN, 'a Jinja file'])}"
        raise HpctrainError(f"{title}: no such file ({meant})") from None
    except OSError as error:
        raise InputOutputError(f"{title}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise HpctrainError(f"{title}: is not UTF-8, no Jinja template") from None
