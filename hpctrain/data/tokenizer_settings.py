"""Settings that a Hugging Face folder holds beside `tokenizer.json` and the weights.

They name the special tokens, the ids that end an answer, the chat template and the context length. A token
file and a checkpoint keep them, so that `hpctrain export` can write them again.
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
"""Names of the JSON files that hold settings."""

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TEMPLATE_BYTES = 1 << 20
"""Largest size of a chat template; published ones have at most 20 kB."""

SETTINGS = "tokenizer_settings"
"""Key of the settings in the state of a checkpoint, and name of their dataset in a token file."""

_ID = "_token_id"


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer and of the model that uses it.

    Attributes:
        files: content of each JSON file of `FILES` that the folder has, by its name.
        jinja: text of `chat_template.jinja`; None without such a file.
        end_of_document: id of the token that ends a document; None if it is not known.
        ends: ids that end what was learned, a document of text or an assistant's turn.
        context: most tokens in a sequence of the runs that a model comes from; 0 if they are not known.
    """

    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    jinja: str | None = None
    end_of_document: int | None = None
    ends: tuple[int, ...] = ()
    context: int = 0

    @staticmethod
    def of_folder(folder: Path) -> TokenizerSettings:
        """Read the settings of a folder.

        Raises:
            HpctrainError: a file is not what `transformers` writes.
            InputOutputError: a file cannot be read.
        """
        files = {name: content for name in FILES if (content := _json_object(folder / name)) is not None}
        jinja = _template(folder / TEMPLATE_FILE)
        more = sorted((folder / MORE_TEMPLATES).glob("*.jinja")) if jinja is not None else []
        if more:
            named = [{"name": path.stem, "template": _template(path)} for path in more]
            named = [{"name": "default", "template": jinja}, *named]
            files[TOKENIZER_CONFIG] = {**files.get(TOKENIZER_CONFIG, {}), "chat_template": named}
            jinja = None
        return TokenizerSettings(files, jinja)

    @staticmethod
    def from_object(value: object) -> TokenizerSettings:
        """Restore what `to_object` made. Parts of another form, or of a later version, are left out."""
        stored = value if isinstance(value, dict) else {}
        files, jinja, end = stored.get("files"), stored.get("jinja"), stored.get("end_of_document")
        files = files if isinstance(files, dict) else {}
        return TokenizerSettings(
            {name: files[name] for name in FILES if isinstance(files.get(name), dict)},
            jinja if isinstance(jinja, str) else None,
            end if is_id(end) else None,
            ids_of(stored.get("ends")),
            max(ids_of(stored.get("context")), default=0),
        )

    @staticmethod
    def from_json(text: str) -> TokenizerSettings:
        """Restore what `to_json` made."""
        return TokenizerSettings.from_object(parse_json(text))

    def to_object(self) -> dict[str, Any]:
        """Return the settings as a value that JSON can express."""
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
        """Return the content of a file; it is empty if the folder has none of this name."""
        return self.files.get(name, {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their roles, such as `eos_token`."""
        both = {**self.file(SPECIAL_TOKENS_MAP), **_without_none(self.file(TOKENIZER_CONFIG))}
        named = {role: content_of(value) for role, value in both.items() if role.endswith("_token")}
        return {role: content for role, content in named.items() if content is not None}

    @property
    def control_tokens(self) -> set[str]:
        """Tokens that these files call special, whatever `tokenizer.json` says of them."""
        return {*self.special_tokens.values(), *self._more_control_tokens()}

    def _more_control_tokens(self) -> Iterator[str]:
        for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                values = self.file(name).get(key)
                values = values.values() if isinstance(values, dict) else values
                if not isinstance(values, str) and values is not None:
                    yield from filter(None, map(content_of, values))
        decoder = self.file(TOKENIZER_CONFIG).get("added_tokens_decoder")
        for value in decoder.values() if isinstance(decoder, dict) else ():
            if isinstance(value, dict) and value.get("special") and isinstance(value.get("content"), str):
                yield value["content"]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of `eos_token_id` in the configurations of generation and model, each once."""
        files = (self.file(GENERATION_CONFIG), self.file(MODEL_CONFIG))
        return tuple(dict.fromkeys(each for file in files for each in ids_of(file.get("eos_token_id"))))

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
        """Return the settings with another chat template and the special tokens that it uses, by role."""
        before, files, jinja = self.file(TOKENIZER_CONFIG), dict(self.files), self.jinja
        config = {**before, **{role: t for role, t in tokens.items() if self.special_tokens.get(role) != t}}
        if jinja is not None:
            jinja = text
        elif self.chat_template != text:
            others = before.get("chat_template")
            others = others if isinstance(others, list) else []
            others = [each for each in others if isinstance(each, dict) and each.get("name") != "default"]
            config["chat_template"] = [{"name": "default", "template": text}, *others] if others else text
        files[TOKENIZER_CONFIG] = config
        return replace(self, files=files, jinja=jinja)

    def without_model(self) -> TokenizerSettings:
        """Return what concerns the tokenizer alone, for models that are not the folder's."""
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

    def trained_on(self, corpus: TokenizerSettings, of_text: bool) -> TokenizerSettings:
        """Return the settings of a model with these, once it was trained on tokens with those of `corpus`.

        Settings of the model remain. Of its tokenizer, those count that made the tokens. The chat template is
        that of the rows that were trained on, or, of a corpus `of_text`, stays as it was.
        """
        files = {**corpus.files, **self.files}
        own = [name for name in _OF_TOKENIZER if name in corpus.files]
        if own:
            files = {name: each for name, each in files.items() if name not in _OF_TOKENIZER}
            files |= {name: corpus.files[name] for name in own}
            if (length := self.file(TOKENIZER_CONFIG).get("model_max_length")) is not None:
                files[TOKENIZER_CONFIG] = {**corpus.file(TOKENIZER_CONFIG), "model_max_length": length}
        jinja = corpus.jinja if own or corpus.jinja is not None else self.jinja
        ends = joined(self.ends, corpus.ends)
        merged = TokenizerSettings(files, jinja, corpus.end_of_document, ends, self.context)
        before = self.chat_template
        if before is not None and (of_text or merged.chat_template is None):
            return merged.with_template(before, {})
        return merged


_OF_TOKENIZER = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)


def content_of(value: object) -> str | None:
    """Return the text of a token, which is a string or an object with its content; else None."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def is_id(value: object) -> TypeGuard[int]:
    """Return True if a value can be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def ids_of(value: object) -> tuple[int, ...]:
    """Return the ids of one, or of a list of them; what is no id is left out."""
    return tuple(each for each in (value if isinstance(value, list) else [value]) if is_id(each))


def joined(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return all ids of both, in order, each once."""
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
        raise HpctrainError(f"{path}: is no JSON that can be read ({error})") from None
    if not isinstance(content, dict):
        raise HpctrainError(f"{path}: is no JSON object, as transformers writes it")
    return content


def _template(path: Path) -> str | None:
    """Return the text of a template; None if there is no such file."""
    try:
        return read_text(path, TEMPLATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise HpctrainError(f"{path}: is not UTF-8, so it is no Jinja template") from None
