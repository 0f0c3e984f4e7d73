"""Chat templates in Jinja, as Hugging Face's tokenizers have them, which turn messages into text.

A template is rendered in a child process (`data/template_process.py`), in jinja2's sandbox, with the settings
and functions of transformers: trimmed blocks, loop controls, `raise_exception`, `strftime_now` and
`{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.data.template_process import Range, RenderRequest, TemplateProcess
from hpctrain.data.tokenizer_settings import TEMPLATE_BYTES, TokenizerSettings
from hpctrain.errors import HpctrainError, InputOutputError, require
from hpctrain.files import read_text
from hpctrain.text import either, nearest

Message = Mapping[str, Any]

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
"""Built-in templates by name: those of Qwen and of Llama 3, "User: ... Assistant: ...", and contents without
roles.
"""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        text: The template.
        tokens: Special tokens by the name that the template uses, such as eos_token.
        title: Name of the template in messages.
        now: Time that the template gets if it asks for the time, in ISO 8601.
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
            argument: Name of a built-in template, a Jinja file, or None for the template of the tokenizer.
            tokenizer: What the user calls the tokenizer.
            ends: Token that ends a document, which is `eos_token` if the settings name none.
            settings: Settings of the tokenizer; None to read them from its folder.

        Raises:
            HpctrainError: there is no such template. Whether it is valid is checked by `process.start`.
        """
        if settings is None:
            folder = Path(tokenizer)
            settings = TokenizerSettings.of_folder(folder) if folder.is_dir() else TokenizerSettings()
        tokens = {"eos_token": ends} | settings.special_tokens
        if argument is None:
            if settings.chat_template is None:
                names = either([*BUILT_IN, "a Jinja file"])
                raise HpctrainError(f"--tokenizer {tokenizer}: has no chat template; give --template {names}")
            text, title = settings.chat_template, f"chat_template of {tokenizer}"
        elif argument in BUILT_IN:
            text, title = BUILT_IN[argument], f"--template {argument}"
        else:
            text, title = _of_file(argument)
        # A template that does not ask for the time stores none, so that its token file is reproducible.
        now = datetime.now().isoformat(timespec="seconds") if "strftime_now" in text else ""
        return ChatTemplate(text, tokens, title, now)

    @staticmethod
    def from_json(text: str) -> ChatTemplate:
        """Return the template that `to_json` stored."""
        return ChatTemplate(**json.loads(text))

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @cached_property
    def process(self) -> TemplateProcess:
        """Child process that renders the template; it starts with the first request."""
        require("jinja2", f"{self.title}: rendering it")
        return TemplateProcess(self.title, {"text": self.text, "now": self.now, "tokens": {**self.tokens}})

    def render(
        self, messages: Sequence[Message], prompt: bool = False, tools: Any = None
    ) -> tuple[str, list[Range]]:
        """Render messages, with `prompt` up to where the assistant answers.

        Returns:
            The text, and the ranges of it that the template itself marks as generated.

        Raises:
            HpctrainError: The template is invalid, rejects the messages, or exceeds a limit.
        """
        [outcome] = self.process.render([RenderRequest(messages, tools, [(len(messages), prompt)])])
        if isinstance(outcome, HpctrainError):
            raise outcome
        return outcome[0]


def _of_file(path: str) -> tuple[str, str]:
    title = f"--template {path}"
    try:
        return read_text(path, TEMPLATE_BYTES), title
    except FileNotFoundError:
        near = nearest(path, BUILT_IN)
        meant = f"did you mean {near}?" if near else f"expected {either([*BUILT_IN, 'a Jinja file'])}"
        raise HpctrainError(f"{title}: no such file ({meant})") from None
    except OSError as error:
        raise InputOutputError(f"{title}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise HpctrainError(f"{title}: is not UTF-8 text, so it cannot be a Jinja template") from None
