"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizers` JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.control_tokens import (
    Content,
    byte_characters,
    control_names,
    disable_randomness,
    hide_control_tokens,
    mark_lost_text,
    require_token,
    special_tokens,
    token_ids,
    unknown_id,
)
from hpctrain.data.special_token_check import eos_token_problem, special_token_warnings
from hpctrain.data.tokenizer_settings import TokenizerSettings, is_id
from hpctrain.errors import HpctrainError, InputOutputError, require
from hpctrain.files import JSON_BYTES, parse_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BYTES = "bytes"
BYTE_VALUES = 256
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Usual names of the token that ends a document; the most specific ones come first."""


class Tokenizer:
    """Conversion of text to token ids and back.

    Attributes:
        text: "bytes" (ids 0-255 are the bytes of UTF-8, 256 ends a document), or the JSON of a `tokenizers`
            tokenizer.
        settings: Settings in the files next to that JSON.
        vocabulary: Size of the vocabulary; all ids are smaller.
        end_of_document: Id that follows every document.
        control: Ids of the control tokens by name; text is never encoded as one of them.
        ends: Ids that end generated text, including `end_of_document`.
        ignored_settings: Settings that `of_files` removed from the JSON, such as "model.dropout = 0.1".
        unknown: Id that replaces text outside the vocabulary; None if the tokenizer has none.
    """

    def __init__(
        self, text: str, where: str = "tokenizer", settings: TokenizerSettings | None = None
    ) -> None:
        """Read a tokenizer.

        Args:
            text: "bytes" or the JSON, as the attribute `text`.
            where: Beginning of error messages.
            settings: Settings with the id of the token that ends a document. Without an id, as in old files,
                it is the first name in `END_NAMES` that the vocabulary contains.

        Raises:
            HpctrainError: the text is not a usable tokenizer.
        """
        self.text, self._where = text, where
        self.settings = settings or TokenizerSettings()
        self._library: Library | None = None
        self._lost: int | None = None
        self.unknown: int | None = None
        self.ignored_settings: tuple[str, ...] = ()
        if text == BYTES:
            self.vocabulary, self.end_of_document = BYTE_VALUES + 1, BYTE_VALUES
            self.control: Mapping[str, int] = {END_OF_TEXT: BYTE_VALUES}
        else:
            self._read(text, where)
        of_files = {*self.settings.config_end_ids} & {*self.control.values()}
        learned = {number for number in self.settings.ends if number < self.vocabulary}
        self.ends: Collection[int] = frozenset({self.end_of_document, *self.listed_ends} | of_files | learned)

    def _read(self, text: str, where: str) -> None:
        content = parse_tokenizer(text, where)
        self.unknown = unknown_id(content)
        guarded = GuardedTokenizer(content, self.settings, where)
        self.end_of_document, self.control = guarded.end_of_document, guarded.control
        self._library = guarded.library
        self._lost = self.end_of_document if guarded.marks_lost_text else None
        # The text of a special added token is encoded as ordinary text: only hpctrain ends documents.
        self._library.encode_special_tokens = True
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1  # ids may have gaps

    @property
    def listed_ends(self) -> tuple[int, ...]:
        """Ids of the tokens of `eos_token` if it is a list; all of them end generated text."""
        names = self.settings.tokens_of("eos_token")
        return tuple(self.control[name] for name in names if name in self.control) if len(names) > 1 else ()

    @property
    def end_name(self) -> str:
        """Name of the token that ends a document."""
        return next(name for name, number in self.control.items() if number == self.end_of_document)

    @classmethod
    def from_argument(cls, argument: str, end_of_document: str | None = None) -> Tokenizer:
        """Read the tokenizer that a user names.

        Args:
            argument: "bytes", a `tokenizers` JSON file, or a folder with a `tokenizer.json`.
            end_of_document: Name of the token that ends a document; None to take it from the files.

        Raises:
            HpctrainError: there is no usable tokenizer, or the token that ends a document is unknown.
            InputOutputError: a file cannot be read.
        """
        if argument == BYTES:
            if end_of_document is not None:
                raise HpctrainError(
                    f"--end-of-document {end_of_document}: requires --tokenizer FILE.json or DIR; "
                    "the tokenizer `bytes` has no such token (leave it out)"
                )
            return cls(BYTES, settings=TokenizerSettings(end_of_document=BYTE_VALUES, ends=(BYTE_VALUES,)))
        path, where = Path(argument), f"tokenizer = {argument}"
        try:
            if path.is_dir():
                path /= TOKENIZER_FILE
            text = read_text(path, JSON_BYTES)
        except FileNotFoundError:
            raise InputOutputError(
                f"{where}: no such file{'' if path == Path(argument) else f', {path}'}; "
                "give `bytes`, a tokenizer.json or the Hugging Face folder that contains it, or a token file"
            ) from None
        except OSError as error:
            raise InputOutputError(f"{where}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            text = ""
        # With another name, the other files of the folder do not belong to this tokenizer.
        in_folder = path.name == TOKENIZER_FILE
        settings = TokenizerSettings.of_folder(path.parent) if in_folder else TokenizerSettings()
        return cls.of_files(text, settings.without_model(), where, end_of_document)

    @classmethod
    def of_files(
        cls, text: str, settings: TokenizerSettings, where: str, end_of_document: str | None = None
    ) -> Tokenizer:
        """Return the tokenizer of a JSON and the files next to it.

        Settings that make tokens random, truncated or padded are removed from the JSON.

        Args:
            text: The JSON.
            settings: Settings in the files next to it.
            where: Beginning of error messages.
            end_of_document: Name of the token that ends a document; None to find it in the files.

        Raises:
            HpctrainError: the token that ends a document is unknown, or the JSON is not a usable tokenizer.
        """
        content = parse_tokenizer(text, where)
        try:
            end = find_end_of_document(content, settings, where, end_of_document)
        except HpctrainError:
            library_of(content, where)  # raises a better error if the JSON is not a tokenizer at all
            raise
        removed = disable_randomness(content)
        text = json.dumps(content) if removed else text
        tokenizer = cls(text, where, replace(settings, end_of_document=end, ends=(end,)))
        tokenizer.ignored_settings = tuple(removed)
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """Train a byte-level BPE as in GPT-2 (Radford et al. 2019), which can encode every text.

        Args:
            texts: The texts.
            vocabulary: Largest number of tokens. There are fewer if the text has no more pairs to merge.

        Raises:
            HpctrainError: The vocabulary is too small.
        """
        require("tokenizers", "training a tokenizer")
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocabulary < BYTE_VALUES + 1:
            raise HpctrainError(
                f"train-bpe = {vocabulary}: must be at least {BYTE_VALUES + 1} (the bytes and {END_OF_TEXT})"
            )
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        library.train_from_iterator(texts, trainer)
        return cls.of_files(library.to_str(), TokenizerSettings(), "train-bpe")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end of document. Lone surrogates become question marks."""
        return [int(i) for i in self.encode_array(text)]

    def encode_array(
        self, text: str, errors: str = "replace"
    ) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint8]:
        """Return the ids of `text` as an array [n], uint8 for the tokenizer "bytes" and uint32 for others.

        Args:
            text: The text.
            errors: Treatment of lone surrogates by the tokenizer "bytes", as in `str.encode`. Others replace
                them by question marks.

        Raises:
            HpctrainError: The tokenizer cannot encode the text.
        """
        raw = text.encode("utf-8", errors if self._library is None else "replace")
        if self._library is None:
            return np.frombuffer(raw, dtype=np.uint8)
        replaced = raw.decode("utf-8")
        try:
            # The fast variant stores no offsets and needs a quarter of the memory.
            [encoding] = self._library.encode_batch_fast([replaced], add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            sentence = (
                f"cannot encode a text: {error}; use a tokenizer whose vocabulary contains its unk_token"
            )
            raise HpctrainError(f"{self._where}: {sentence}") from None
        ids = np.array(encoding.ids, dtype=np.uint32)
        if self._lost is not None and (ids == self._lost).any():
            raise HpctrainError(f"{self._where}: {lost_text(self._library, replaced, self._lost)}")
        return ids

    def decode(self, ids: Sequence[int], errors: str = "replace") -> str:
        """Return the text of `ids`. Ends of documents and ids beyond the vocabulary have none.

        Args:
            ids: Token ids.
            errors: Treatment of bytes that are not UTF-8 by the tokenizer "bytes", as in `bytes.decode`.
                Others replace them by U+FFFD.
        """
        if self._library is None:
            return bytes(i for i in ids if 0 <= i < BYTE_VALUES).decode("utf-8", errors=errors)
        known = [i for i in ids if 0 <= i < self.vocabulary and i != self.end_of_document]
        return self._library.decode(known, skip_special_tokens=True)


class GuardedTokenizer:
    """Tokenizer of the `tokenizers` library that never encodes text as a control token.

    Attributes:
        library: The tokenizer, in which the control tokens are renamed.
        hidden: New names of the control tokens, by their original names.
        control: Ids of the control tokens, by their original names.
        end_of_document: Id of the token that ends a document.
        marks_lost_text: True if characters outside the vocabulary are encoded as `end_of_document`.
    """

    def __init__(self, content: Content, settings: TokenizerSettings, where: str) -> None:
        """Build the tokenizer of `content`, which is changed in place; errors as for `Tokenizer`."""
        ids = token_ids(content)
        if settings.end_of_document is None:
            end = next((name for name in END_NAMES if name in ids), None)
            if end is None:
                raise HpctrainError(
                    f"{where}: the vocabulary has no token that ends a document; "
                    f"it must contain one of {', '.join(END_NAMES)}"
                )
        else:
            names = {number: name for name, number in ids.items()}
            if settings.end_of_document not in names:
                sentence = (
                    f"token {settings.end_of_document}, which ends a document, is not in the vocabulary"
                )
                raise HpctrainError(f"{where}: {sentence}")
            end = names[settings.end_of_document]
        disable_randomness(content)
        self.end_of_document = ids[end]
        self.control = {name: ids[name] for name in control_names(content, settings.control_tokens, end)}
        self.hidden = hide_control_tokens(content, self.control)
        self.marks_lost_text = mark_lost_text(content, self.hidden[end])
        self.library = library_of(content, where)


def find_end_of_document(
    content: Content, settings: TokenizerSettings, where: str, named: str | None = None
) -> int:
    """Return the id of the token that ends a document.

    It is the first of these that exists: the token `named` by the user, `eos_token` (or the first one of its
    list) of tokenizer_config.json, a special token in `eos_token_id` of generation_config.json or
    config.json, and the only special token with a name in `END_NAMES`.

    Raises:
        HpctrainError: `eos_token` is wrong, none of these exists, or several special tokens have a name in
            `END_NAMES`.
    """
    ids, special = token_ids(content), special_tokens(content)
    if named is not None:
        return require_token(ids, named, f"{where}: --end-of-document")
    if problem := eos_token_problem(settings, ids):
        raise HpctrainError(f"{where}: {problem}; name another one with --end-of-document TOKEN")
    if (of_config := settings.special_tokens.get("eos_token")) is not None:
        return ids[of_config]
    of_special = {ids[name] for name in special}
    for number in settings.config_end_ids:
        if number in of_special:
            return number
    candidates = [name for name in END_NAMES if name in special]
    if len(candidates) == 1:
        return ids[candidates[0]]
    if candidates:
        sentence = f"has several special tokens that may end a document ({', '.join(candidates)})"
    else:
        names = ", ".join(END_NAMES)
        sentence = f"has no eos_token and none of {names}, so the token that ends a document is unknown"
    warnings = special_token_warnings(settings, ids, of_special)
    problems = [f"{where}: {each}" for each in warnings if "eos_token_id" in each]
    raise HpctrainError([*problems, f"{where}: {sentence}; name it with --end-of-document TOKEN"])


def lost_text(library: Library, text: str, lost: int) -> str:
    """Return an error message about the first character of a text that the vocabulary does not contain.

    Args:
        library: The tokenizer, which encodes such characters as `lost`.
        text: The text.
        lost: Id that marks them.
    """
    for character in dict.fromkeys(text):
        if lost in library.encode(character, add_special_tokens=False).ids:
            sentence = f"{character!r} (U+{ord(character):04X})"
            break
    else:
        sentence = "a part of the text"
    return (
        f"{sentence} is not in the vocabulary, and without model.unk_token the tokenizer would drop it; "
        "use a tokenizer with an unk_token, or a byte-level one"
    )


def load_library(text: str, where: str) -> Library:
    """Return the library's tokenizer of an unchanged JSON.

    Raises:
        HpctrainError: the text is not such a JSON. The message begins with `where`.
    """
    return library_of(parse_tokenizer(text, where), where)


def parse_tokenizer(text: str, where: str) -> Content:
    """Return the content of a tokenizer's JSON.

    Raises:
        HpctrainError: the text is no such JSON. The message begins with `where`.
    """
    wrong = f"{where}: is not a `tokenizers` JSON"
    try:
        content: Any = parse_json(text)
    except ValueError:
        raise HpctrainError(f"{wrong} (it is not JSON); give `bytes` or a tokenizer.json") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise HpctrainError(f"{wrong} (it has no `model`); give `bytes` or a tokenizer.json")
    try:
        ids = token_ids(content)
        special_tokens(content)
        if not all(is_id(each) for each in ids.values()):
            raise ValueError("an id is not a whole number")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        sentence = f"its vocabulary is malformed: {error}"
        raise HpctrainError(f"{wrong} that this version can read: {sentence}") from None
    return content


def library_of(content: Content, where: str) -> Library:
    """Return the library's tokenizer of a parsed JSON; errors as of `load_library`."""
    require("tokenizers", f"{where}: reading it")
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise HpctrainError(
            f"{where}: is not a `tokenizers` JSON that this version can read: {error}"
        ) from None


def bytes_json() -> str:
    """Return "bytes" as a `tokenizers` JSON: a byte-level BPE without merges, each byte with its own id."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE({letter: byte for byte, letter in enumerate(byte_characters())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    text: str = library.to_str()
    return text
