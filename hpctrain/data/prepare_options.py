"""Options of `hpctrain prepare` for text and for rows of conversations, preferences and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.file_contents import TEXT_KIND
from hpctrain.data.text_pieces import PIECE

Say = Callable[[str], None]
"""Function that prints a line for the user. It is called on rank 0."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of the tokenization of text and of rows.

    Attributes:
        globs: Patterns of the files of folders; none for the usual endings of files.
        tokenizer: Argument of `read_tokenizer`; None for "bytes".
        end_of_document: Argument of `read_tokenizer`.
        replace: True if an existing output is replaced. It stays as it is until the new file is complete.
        piece_bytes: Size of the pieces into which files are cut, in bytes.
    """

    globs: Sequence[str] = ()
    tokenizer: str | None = None
    end_of_document: str | None = None
    replace: bool = False
    piece_bytes: int = PIECE


@dataclass(frozen=True, kw_only=True)
class TextOptions(PrepareOptions):
    """Options of the tokenization of text.

    Attributes:
        train_bpe: Vocabulary of a tokenizer that is trained on the text on rank 0, and written next to the
            output; None for no training.
        text_key: Key or column with the text of JSON and tables.
        binary: True if files that are binary or not UTF-8 are read. The tokenizer "bytes" takes their bytes.
            In others, and in JSON, U+FFFD replaces what is not text. If False, such a file is an error if a
            path names it, and is left out of a folder.
        shard_bytes: Largest size of a token file in bytes of tokens, except for larger documents. There are
            then several files, named as in ShardFiles. None for one file.
    """

    train_bpe: int | None = None
    text_key: str = "text"
    binary: bool = False
    shard_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowOptions(PrepareOptions):
    """Options of the tokenization of conversations, preferences or prompts.

    Attributes:
        kind: Kind of the rows: "chat", "preferences" or "prompts".
        template: Name of a chat template, or a Jinja file; None for the template of the tokenizer's folder.
    """

    kind: str
    template: str | None = None


@dataclass(frozen=True)
class PreparationResult:
    """Result of `hpctrain prepare`.

    Attributes:
        path: The token file, or the pattern of several.
        files: Number of input files.
        size: Their size on the disk in bytes.
        documents: Number of documents.
        tokens: Number of tokens.
        vocabulary: Size of the vocabulary.
        seconds: Duration in seconds.
        shards: Number of token files.
        kind: Kind of the contents.
        rows: Number of rows; 0 for text.
        learned: Number of learned tokens; 0 for text.
    """

    path: Path
    files: int
    size: int
    documents: int
    tokens: int
    vocabulary: int
    seconds: float
    shards: int = 1
    kind: str = TEXT_KIND
    rows: int = 0
    learned: int = 0
