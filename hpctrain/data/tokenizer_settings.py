"""Settings in the JSON files of a Hugging Face folder other than `tokenizer.json`.

They contain the special tokens, the ids that end an answer, the chat template and the context length. Token
files and checkpoints store them, so that `hpctrain export` can write them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import JSON_BYTES, parse_json, read_text

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, MODEL_CONFIG)
"""Names of the JSON files that contain settings."""

TEMPLATE_FILE, ADDITIONAL_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TEMPLATE_BYTES = 1 << 20
"""Largest size of a chat template in bytes. Published ones have at most 20 kB."""

SETTINGS = "tokenizer_settings"
"""Key of the settings in the state of a checkpoint, and name of their dataset in a token file."""

_ID = "_token_id"


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer and of the model that uses it.

    Attributes:
        files: Content of each file of `FILES` that the folder contains, by its name.
        jinja: Text of `chat_template.jinja`; None without such a file.
        end_of_document: Id of the token that ends a document; None if it is unknown.
        ends: Ids that ended a document or an assistant's turn in the training data.
        context: Longest `batch.sequence` of all runs that trained the model, in tokens; 0 if unknown.
    """

    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    jinja: str | None = None
    end_of_document: int | None = None
    ends: tuple[int, ...] = ()
    context: int = 0

    @staticmethod
    def of_folder(folder: Path) -> TokenizerSettings:
        """Read the settings of a Hugging Face folder.

        Raises:
            HpctrainError: a file does not have the form that `transformers` writes.
            InputOutputError: a file cannot be read.
        """
        files = {name: content for name in FILES if (content := _json_object(folder / name)) is not None}
        jinja = _template(folder / TEMPLATE_FILE)
        more = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja")) if jinja is not None else []
        if more:
            templates = [{"name": path.stem, "template": _template(path)} for path in more]
            templates = [{"name": "default", "template": jinja}, *templates]
            files[TOKENIZER_CONFIG] = {**files.get(TOKENIZER_CONFIG, {}), "chat_template": templates}
            jinja = None
        return TokenizerSettings(files, jinja)

    @staticmethod
    def from_object(value: object) -> TokenizerSettings:
        """Return the settings that `to_object` stored; unknown keys and wrong types are ignored."""
        stored = value if isinstance(value, dict) else {}
        files, jinja, end = stored.get("files"), stored.get("jinja"), stored.get("end_of_document")
        files = files if isinstance(files, dict) else {}
        return TokenizerSettings(
            {name: files[name] for name in FILES if isinstance(files.get(name), dict)},
            jinja if isinstance(jinja, str) else None,
            end if is_id(end) else None,
            parse_ids(stored.get("ends")),
            max(parse_ids(stored.get("context")), default=0),
        )

    @staticmethod
    def from_json(text: str) -> TokenizerSettings:
        """Return the settings that `to_json` stored."""
        return TokenizerSettings.from_object(parse_json(text))

    def to_object(self) -> dict[str, Any]:
        """Return the settings as a value that can be written as JSON."""
        return {
            "files": {name: dict(content) for name, content in self.files.items()},
            "jinja": self.jinja,
            "end_of_document": self.end_of_document,
            "ends": list(self.ends),
            "context": self.context,
        }

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return json.dumps(self.to_object())

    def file(self, name: str) -> Mapping[str, Any]:
        """Return the content of the file `name`; it is empty if the folder has no such file."""
        return self.files.get(name, {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by role, such as `eos_token`; the first one of a role with several."""
        roles = [role for role in self._special_token_values if role.endswith("_token")]
        return {role: tokens[0] for role in roles if (tokens := self.tokens_of(role))}

    def tokens_of(self, role: str) -> tuple[str, ...]:
        """Return the special tokens of a role: more than one if the value of its key is a list."""
        value = self._special_token_values.get(role)
        texts = [token_text(each) for each in (value if isinstance(value, list) else [value])]
        return tuple(text for text in texts if text is not None)

    @property
    def _special_token_values(self) -> dict[str, Any]:
        return {**self.file(SPECIAL_TOKENS_MAP), **_without_none(self.file(TOKENIZER_CONFIG))}

    @property
    def control_tokens(self) -> set[str]:
        """Tokens that these files call special, even if `tokenizer.json` does not."""
        ends = self.tokens_of("eos_token")
        return {*self.special_tokens.values(), *ends, *self._additional_control_tokens()}

    def _additional_control_tokens(self) -> Iterator[str]:
        for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                values = self.file(name).get(key)
                values = values.values() if isinstance(values, dict) else values
                if not isinstance(values, str) and values is not None:
                    yield from filter(None, map(token_text, values))
        decoder = self.file(TOKENIZER_CONFIG).get("added_tokens_decoder")
        for value in decoder.values() if isinstance(decoder, dict) else ():
            if isinstance(value, dict) and value.get("special") and isinstance(value.get("content"), str):
                yield value["content"]

    @property
    def config_end_ids(self) -> tuple[int, ...]:
        """Ids of `eos_token_id` in generation_config.json and config.json, without duplicates."""
        files = (self.file(GENERATION_CONFIG), self.file(MODEL_CONFIG))
        return tuple(dict.fromkeys(each for file in files for each in parse_ids(file.get("eos_token_id"))))

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None if there is none."""
        if self.jinja is not None:
            return self.jinja
        template = self.file(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(template, list):
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def with_template(self, text: str, tokens: Mapping[str, str]) -> TokenizerSettings:
        """Return the settings with another chat template.

        Args:
            text: The chat template.
            tokens: Special tokens that it uses, by role.
        """
        before, files, jinja = self.file(TOKENIZER_CONFIG), dict(self.files), self.jinja
        config = {**before, **{role: t for role, t in tokens.items() if self.special_tokens.get(role) != t}}
        if jinja is not None:
            jinja = text
        elif self.chat_template != text:
            named_templates = before.get("chat_template")
            named_templates = named_templates if isinstance(named_templates, list) else []
            named_templates = [
                each for each in named_templates if isinstance(each, dict) and each.get("name") != "default"
            ]
            config["chat_template"] = (
                [{"name": "default", "template": text}, *named_templates] if named_templates else text
            )
        files[TOKENIZER_CONFIG] = config
        return replace(self, files=files, jinja=jinja)

    def without_model(self) -> TokenizerSettings:
        """Return the settings without those of the folder's model, for use with another model."""
        ids = {
            name: {key: value for key, value in self.file(name).items() if key.endswith(_ID)}
            for name in (GENERATION_CONFIG, MODEL_CONFIG)
            if name in self.files
        }
        files = {**self.files, **ids}
        if TOKENIZER_CONFIG in files:
            files[TOKENIZER_CONFIG] = {
                key: value for key, value in files[TOKENIZER_CONFIG].items() if key != "model_max_length"
            }
        return replace(self, files=files)

    def after_training_on(self, corpus: TokenizerSettings, is_plain_text: bool) -> TokenizerSettings:
        """Return the settings of this model after training on a token file.

        Settings of the model stay as they are. Settings of the tokenizer are those of the token file. The
        chat template is that of the token file, unless the file contains plain text.

        Args:
            corpus: Settings of the token file.
            is_plain_text: True if the token file contains plain text, not conversations, preferences or
                prompts.
        """
        files = {**corpus.files, **self.files}
        replaced_names = [name for name in _TOKENIZER_FILES if name in corpus.files]
        if replaced_names:
            files = {name: each for name, each in files.items() if name not in _TOKENIZER_FILES}
            files |= {name: corpus.files[name] for name in replaced_names}
            if (length := self.file(TOKENIZER_CONFIG).get("model_max_length")) is not None:
                files[TOKENIZER_CONFIG] = {**corpus.file(TOKENIZER_CONFIG), "model_max_length": length}
        jinja = corpus.jinja if replaced_names or corpus.jinja is not None else self.jinja
        ends = merge_ids(self.ends, corpus.ends)
        merged = TokenizerSettings(files, jinja, corpus.end_of_document, ends, self.context)
        before = self.chat_template
        if before is not None and (is_plain_text or merged.chat_template is None):
            return merged.with_template(before, {})
        return merged


_TOKENIZER_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)


def token_text(value: object) -> str | None:
    """Return the text of a token that is stored as a string or as an object with "content"; else None."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def is_id(value: object) -> TypeGuard[int]:
    """Return True if a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_ids(value: object) -> tuple[int, ...]:
    """Return the token ids in a value that is one id or a list of ids; other values are skipped."""
    return tuple(each for each in (value if isinstance(value, list) else [value]) if is_id(each))


def merge_ids(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids of both tuples, in order and without duplicates."""
    return tuple(dict.fromkeys((*first, *second)))


def _without_none(file: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in file.items() if value is not None}


def _json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file."""
    try:
        content = parse_json(read_text(path, JSON_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise HpctrainError(f"{path}: is not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise HpctrainError(f"{path}: is not a JSON object")
    return content


def _template(path: Path) -> str | None:
    """Return the text of a template file; None if there is no such file."""
    try:
        return read_text(path, TEMPLATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise HpctrainError(f"{path}: is not UTF-8 text, so it cannot be a Jinja template") from None
