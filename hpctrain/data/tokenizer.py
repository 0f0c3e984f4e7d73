"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizers` JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import JSON_BYTES, parse_json, read_text
from hpctrain.words import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BYTES = "bytes"
BYTE_VALUES = 256
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
# What the published vocabularies call the end of a document, the most specific first.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """Token ids in range(`vocabulary`), of which `end_of_document` follows every document.

    `text` is all of it: "bytes" (ids 0-255 are the bytes of UTF-8, 256 ends a document) or the JSON of
    a `tokenizers` tokenizer.
    """

    def __init__(self, text: str, where: str = "tokenizer") -> None:
        """Read `text`; HpctrainError, beginning with `where`, when it is no tokenizer of use to us."""
        self.text = text
        self._library: Library | None = None
        if text == BYTES:
            self.vocabulary, self.end_of_document = BYTE_VALUES + 1, BYTE_VALUES
            return
        self._library = load_library(text, where)
        ids = self._library.get_vocab(with_added_tokens=True)
        ends = [name for name in ENDS if name in ids]
        if not ends:
            raise HpctrainError(
                f"{where}: the vocabulary has no token that ends a document; "
                f"one of {', '.join(ENDS)} must be in it"
            )
        self.vocabulary = max(ids.values()) + 1  # ids may have holes, so their number does not do
        self.end_of_document = ids[ends[0]]
        # A file made for serving may cut or fill every text.
        self._library.no_truncation()
        self._library.no_padding()
        # Text that spells a special token is text: only we end documents.
        self._library.encode_special_tokens = True

    @classmethod
    def from_argument(cls, argument: str) -> Tokenizer:
        """The tokenizer a user names: "bytes", a `tokenizers` JSON file, or a folder that has one."""
        if argument == BYTES:
            return cls(BYTES)
        path = Path(argument)
        try:
            if path.is_dir():
                path /= TOKENIZER_FILE
            text = read_text(path, JSON_BYTES)
        except FileNotFoundError:
            raise InputOutputError(
                f"tokenizer = {argument}: no such file{'' if path == Path(argument) else f', {path}'}; "
                "give `bytes` or the path of a tokenizer.json"
            ) from None
        except OSError as error:
            raise InputOutputError(f"tokenizer = {argument}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            text = ""
        return cls(text, f"tokenizer = {argument}")

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """Byte-level BPE with at most `vocabulary` tokens (fewer where the text has no more pairs).

        Byte-level pair merging as in GPT-2 (Radford et al. 2019), so that every text can be encoded.
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
        return cls(library.to_str())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end of document. Lone surrogates become question marks."""
        return [int(i) for i in self.encode_array(text)]

    def encode_array(
        self, text: str, errors: str = "replace"
    ) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint8]:
        """The ids of `text` as an array [n], of uint8 for bytes, of uint32 for other tokenizers.

        `errors` says what becomes of lone surrogates, as in str.encode; a tokenizer from JSON takes text.
        """
        raw = text.encode("utf-8", errors if self._library is None else "replace")
        if self._library is None:
            return np.frombuffer(raw, dtype=np.uint8)
        # The fast form keeps no offsets into the text: a quarter of the memory.
        [encoding] = self._library.encode_batch_fast([raw.decode("utf-8")], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int], errors: str = "replace") -> str:
        """The text of `ids`; ends of documents and ids beyond the vocabulary have none.

        `errors` says what becomes of bytes that are not UTF-8, as in bytes.decode; a tokenizer from
        JSON always puts U+FFFD there.
        """
        if self._library is None:
            return bytes(i for i in ids if 0 <= i < BYTE_VALUES).decode("utf-8", errors=errors)
        known = [i for i in ids if 0 <= i < self.vocabulary and i != self.end_of_document]
        return self._library.decode(known, skip_special_tokens=True)


def load_library(text: str, where: str) -> Library:
    """The library's tokenizer of a JSON; HpctrainError, beginning with `where`, when it is none."""
    require("tokenizers", f"{where}: reading it")
    from tokenizers import Tokenizer as Library

    wrong = f"{where}: is no `tokenizers` JSON"
    try:
        content: Any = parse_json(text)
    except ValueError:
        raise HpctrainError(f"{wrong} (it is not JSON); give `bytes` or a tokenizer.json") from None
    if not isinstance(content, dict) or "model" not in content:
        raise HpctrainError(f"{wrong} (it has no `model`); give `bytes` or a tokenizer.json")
    try:
        return Library.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise HpctrainError(f"{wrong} that this version can read: {error}") from None


def bytes_json() -> str:
    """What "bytes" is as a `tokenizers` JSON: a byte-level BPE without merges, of every byte's own number."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE({letter: byte for byte, letter in enumerate(_letters())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    text: str = library.to_str()
    return text


def _letters() -> list[str]:
    """What stands for each byte in a byte-level vocabulary (GPT-2): its own character where that is seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(BYTE_VALUES)]
