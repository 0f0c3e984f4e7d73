"""Token file: an HDF5 file with all tokens of a corpus, its tokenizer and its checksums.

    /                 attributes: format, version, header_checksum and the fields of Header
    /tokens           uint8, uint16 or uint32 [tokens], the smallest type that holds the vocabulary
    /document_ends    int64 [documents], position after the last token of each document
    /tokenizer        uint8 [bytes], UTF-8: "bytes" or the JSON of a `tokenizers` tokenizer
    /checksums        uint32 [pieces], the CRC-32 of every `piece` tokens
    /tokenizer_settings  uint8 [bytes], UTF-8: JSON of TokenizerSettings, from the files next to the
                         tokenizer; its CRC-32 is its attribute `crc32`. Older files have none.

All numbers are little-endian and all datasets contiguous. `data/file_contents.py` describes what files of
conversations, preferences and prompts contain besides.

Elements are read from the file when they are needed, so the ranks of a node share one copy in the page cache.
The file is not mapped into memory, since a read from a truncated file or a failing disk raises an error, and
an access to mapped memory ends the process.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.comm.error_messages import error_reason
from hpctrain.data.file_contents import CONTENTS_VERSION, PROMPTS, Contents
from hpctrain.data.stored import BYTE_DTYPE, CHECKSUM_DTYPE, PiecedArray, StoredArray, require_range
from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.data.tokenizer_settings import SETTINGS, TokenizerSettings
from hpctrain.errors import HpctrainError, InputOutputError, require
from hpctrain.files import JSON_BYTES, open_regular, parse_json
from hpctrain.hdf5 import DAMAGE, SIGNATURE, CheckedFile, open_checked
from hpctrain.text import command

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "hpctrain tokens"
VERSION = 1
PIECE_TOKENS = 1 << 16  # with 16 bits, 128 KiB: the read-ahead of Linux, and 0.1 ms of checksums
MOST_PIECE_TOKENS = 1 << 24  # a complete piece is read to compare its checksum
MOST_IDS = 1 << 32  # ids fit into uint32
MOST_ELEMENTS = 1 << 60
MOST_TEXT_BYTES = JSON_BYTES
END_DTYPE = np.dtype("<i8")


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that can store range(vocabulary)."""
    return next(np.dtype(name) for name in ("u1", "<u2", "<u4") if vocabulary - 1 <= np.iinfo(name).max)


@dataclass(frozen=True)
class Header:
    """Attributes of a token file, which are known without reading its tokens."""

    vocabulary: int
    end_of_document: int
    tokens: int
    documents: int
    piece: int
    document_ends_checksum: int
    tokenizer_checksum: int
    source: str
    package: str

    def require_bounds(self) -> None:
        """Raise ValueError if `hpctrain prepare` cannot have written one of the numbers."""
        for name, least, most in (
            ("vocabulary", 1, MOST_IDS),
            ("end_of_document", 0, self.vocabulary - 1),
            ("tokens", 1, MOST_ELEMENTS),
            ("documents", 1, MOST_ELEMENTS),
            ("piece", 1, MOST_PIECE_TOKENS),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)} is out of range [{least}, {most}]")

    @property
    def pieces(self) -> int:
        """Number of checksums."""
        return -(-self.tokens // self.piece)

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def attributes(self, contents: Contents) -> dict[str, Any]:
        """Return all attributes of the file, including those of its contents.

        Text has a fixed length, since HDF5 keeps other text in a heap without checksums and can crash on it.
        """
        version = VERSION if contents.is_text else CONTENTS_VERSION
        values = {"format": FORMAT, "version": version, **asdict(self), "header_checksum": self.checksum}
        return contents.attributes() | {
            name: np.bytes_(value.encode("utf-8", "replace")) if isinstance(value, str) else value
            for name, value in values.items()
        }


class TokenFile:
    """Token file that is open for reading.

    Opening it checks the header and the sizes of all datasets. `read` verifies a piece when it first reads
    it, and `verify` verifies all pieces. Every error is an InputOutputError that begins with the key and the
    path.

    Attributes:
        vocabulary: Size of the vocabulary; all ids are smaller.
        end_of_document: Id that follows every document of text.
        tokens: Number of tokens.
        documents: Number of documents.
        dtype: Type of a token in the file.
    """

    def __init__(self, path: str | Path, key: str = "data.tokens") -> None:
        self.path = Path(path)
        self.where = f"{key} = {path}"
        self._require_file()
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        try:
            with open_checked(self.path) as file:
                self._open(file)
        except DAMAGE as error:
            raise self._error(f"is damaged or truncated ({error_reason(error)})") from None
        self._stamp = self._last_change()

    @property
    def kind(self) -> str:
        """Kind of the contents: "text", "chat", "preferences" or "prompts"."""
        return self.contents.kind

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the tokens. An InputOutputError is raised if it cannot be read."""
        if self.tokenizer_text != BYTES:
            require("tokenizers", f"{self.where}: reading its tokenizer")
        try:
            return Tokenizer(self.tokenizer_text, f"{self.where}: its tokenizer", self.tokenizer_settings)
        except HpctrainError as error:
            raise InputOutputError(error.problems) from None

    @cached_property
    def tokenizer_settings(self) -> TokenizerSettings:
        """Settings of the tokenizer, with the chat template of conversations, preferences and prompts."""
        known = replace(self._settings, end_of_document=self.end_of_document)
        if self._old:
            known = replace(
                known, ends=(self.end_of_document,) if self.contents.is_text else self._turn_end()
            )
        if self.contents.is_text:
            return known
        template = parse_json(self.template_text)
        return known.with_template(template["text"], template["tokens"])

    def _turn_end(self) -> tuple[int, ...]:
        """Return the control token at the end of the first row, for old files without settings."""
        end = self.document_end(0) if self.documents else 0
        places = self.learned(0, end).nonzero()
        if not len(places) or self.kind == PROMPTS:
            return ()
        last = int(self.read(int(places[-1, 0]), 1)[0])
        settings = TokenizerSettings(end_of_document=self.end_of_document)
        control = Tokenizer(self.tokenizer_text, settings=settings).control
        return (last,) if last in control.values() else ()

    @cached_property
    def fingerprint(self) -> int:
        """Checksum of all tokens, computed from the checksums of the pieces."""
        known = self._tokens.checksums.checksum()
        if self._learned is not None:
            known = zlib.crc32(f"{self._learned.checksums.checksum()}".encode(), known)
        return zlib.crc32(f"{self.tokens} {self.header.document_ends_checksum}".encode(), known)

    def read(self, start: int, count: int) -> Tensor:
        """Return the tokens `start` to `start + count - 1`, int64 [count].

        The checksum of a piece is compared when it is first read, and again after the file has changed.

        Raises:
            InputOutputError: A checksum is wrong, or a token is not in the vocabulary.
        """
        import torch  # late: it takes long to import, and callers that read only headers do not need it

        require_range(start, count, self.tokens)
        tokens = np.empty(count, np.int64)
        self._read(self._tokens, start, tokens)
        return torch.from_numpy(tokens)

    def learned(self, start: int, count: int) -> Tensor:
        """Return which of these tokens are learned, bool [count], with the errors of `read`."""
        import torch

        learned = np.ones(count, np.uint8)
        if self._learned is not None:
            self._read(self._learned, start, learned)
        return torch.from_numpy(learned).bool()

    def other_keys(self, row: int) -> dict[str, Any]:
        """Return the other keys of a row of preferences or prompts, with the errors of `read`."""
        assert self._other_keys is not None
        require_range(row, 1, self.contents.rows)
        begin = int(self._other_ends.read(row - 1, 1)[0]) if row else 0
        text = np.empty(int(self._other_ends.read(row, 1)[0]) - begin, np.uint8)
        self._read(self._other_keys, begin, text)
        try:
            keys = parse_json(text.tobytes())
        except ValueError:
            keys = None
        if not isinstance(keys, dict):
            raise self._error(f"is damaged (the other keys of row {row} are not a JSON object)")
        return keys

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Return the position after the last token of every document, int64 [documents]."""
        return self._verified_ends.read(0, self.documents).astype(np.int64)

    def document_end(self, document: int) -> int:
        """Return the position after the last token of a document."""
        return int(self._verified_ends.read(document, 1)[0])

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare the checksums of all data, each of `ranks` ranks its share of the pieces.

        Raises:
            InputOutputError: With all damaged pieces of the share.
        """
        problems: list[str] = []
        if rank == 0:
            try:
                self._compare_document_ends()
            except InputOutputError as error:
                problems += error.problems
        for array in (self._tokens, self._learned, self._other_keys):
            problems += array.problems(rank, ranks) if array is not None else ()
        if problems:
            raise InputOutputError(problems)

    @cached_property
    def _verified_ends(self) -> StoredArray:
        self._compare_document_ends()
        return self._ends

    def _compare_document_ends(self) -> None:
        """Raise InputOutputError if the ends of documents are damaged or not in order."""
        try:
            self._compare_ends(
                self._ends, self.header.document_ends_checksum, self.tokens, "the document boundaries"
            )
        except ValueError as error:
            raise self._error(f"is damaged ({error})") from None

    @staticmethod
    def _compare_ends(ends: StoredArray, checksum: int, last: int, noun: str) -> None:
        """Raise ValueError unless the ends have this checksum, do not decrease, and end with `last`."""
        crc, before, ordered = 0, 0, True
        for values in ends.blocks():
            crc = zlib.crc32(values.data, crc)
            ordered = ordered and before <= values[0] and bool((np.diff(values) >= 0).all())
            before = int(values[-1])
        if crc != checksum:
            raise ValueError(f"{noun} are damaged (wrong checksum)")
        if not ordered or before != last:
            raise ValueError(f"{noun} do not increase from 0 to {last}")

    def _read(self, array: PiecedArray, start: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the elements from `start` on. If the file has changed, verify its pieces again."""
        if (stamp := self._last_change()) != self._stamp:
            self._stamp = stamp
            for each in (self._tokens, self._learned, self._other_keys):
                if each is not None:
                    each.forget()
        array.read(start, len(out), out)

    def _last_change(self) -> tuple[int, int]:
        """Return the length of the file and the time of its last change."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _error(self, sentence: str) -> InputOutputError:
        return InputOutputError(f"{self.where}: {sentence}")

    def _require_file(self) -> None:
        """Raise InputOutputError if the file is missing or not an HDF5 file."""
        try:
            with open_regular(self.path) as stream:
                signature = stream.read(len(SIGNATURE))
        except FileNotFoundError:
            absolute = self.path.absolute()
            relative = f" (looked for {absolute}, relative to the working directory)"
            place = "" if self.path.is_absolute() else relative
            remedy = f"create it with {command('prepare', absolute, 'TEXT')}"
            raise self._error(f"no such file{place}; {remedy}") from None
        except IsADirectoryError:
            raise self._error("is a folder; it must be a file from `hpctrain prepare`") from None
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from None
        if signature != SIGNATURE:
            raise self._error(
                "is not a token file (not HDF5, or truncated); create one with `hpctrain prepare`"
            )

    def _open(self, file: CheckedFile) -> None:
        """Check the header and find the datasets."""
        if not file.has_attribute("format") or file.text("format") != FORMAT:
            raise self._error("is an HDF5 file, but not a token file; create one with `hpctrain prepare`")
        version = file.integer("version")
        if version < VERSION:
            raise ValueError(f"its version is {version}")
        if version > CONTENTS_VERSION:
            known = f"this hpctrain reads versions up to {CONTENTS_VERSION}"
            raise self._error(f"has version {version}, but {known}; use a newer hpctrain")
        self.header = header = Header(**_fields(Header, file))
        self.contents = Contents()
        if version >= CONTENTS_VERSION:
            self.contents = Contents(**_fields(Contents, file))
        if header.checksum != file.integer("header_checksum") or (
            not self.contents.is_text and self.contents.checksum != file.integer("contents_checksum")
        ):
            raise ValueError("its header has a wrong checksum")
        header.require_bounds()
        self.contents.require_bounds(header.tokens, header.documents)
        self.vocabulary, self.end_of_document = header.vocabulary, header.end_of_document
        self.tokens, self.documents = header.tokens, header.documents
        self.dtype = token_type(header.vocabulary)
        checksums = self._find(file, "checksums", CHECKSUM_DTYPE, header.pieces)
        tokens = self._find(file, "tokens", self.dtype, self.tokens)
        self._tokens = PiecedArray(tokens, checksums, header.piece, "tokens", header.vocabulary)
        self._ends = self._find(file, "document_ends", END_DTYPE, self.documents)
        self.tokenizer_text = self._read_text(file, "tokenizer", header.tokenizer_checksum)
        self._settings, self._old = TokenizerSettings(), f"/{SETTINGS}" not in file.datasets
        if not self._old:
            settings = file.dataset(f"/{SETTINGS}")
            text = self._read_text(file, SETTINGS, file.integer("crc32", settings))
            self._settings = TokenizerSettings.from_json(text)
        self._learned: PiecedArray | None = None
        self._other_keys: PiecedArray | None = None
        self.template_text = ""
        if self.contents.is_text:
            return
        self.template_text = self._read_text(file, "template", self.contents.template_checksum)
        self._learned = self._find_pieces(file, "learned", self.tokens, "tokens")
        if self.contents.has_other_keys:
            self._other_keys = self._find_pieces(file, "others", self.contents.others, "bytes")
            self._other_ends = self._find(file, "others_ends", END_DTYPE, self.contents.rows)
            self._compare_ends(
                self._other_ends,
                self.contents.others_ends_checksum,
                self.contents.others,
                "the ends of its rows",
            )

    def _find_pieces(self, file: CheckedFile, name: str, size: int, noun: str) -> PiecedArray:
        """Find a dataset of bytes and the checksums of its pieces."""
        piece = self.header.piece
        checksums = self._find(file, f"{name}_checksums", CHECKSUM_DTYPE, -(-size // piece))
        return PiecedArray(self._find(file, name, BYTE_DTYPE, size), checksums, piece, f"{noun} of /{name}")

    def _read_text(self, file: CheckedFile, name: str, checksum: int) -> str:
        """Read a complete text and compare its checksum."""
        size = file.dataset(f"/{name}").elements
        if size > MOST_TEXT_BYTES:
            raise ValueError(f"/{name} has {size} bytes, more than {MOST_TEXT_BYTES}")
        text = self._find(file, name, BYTE_DTYPE, size).read(0, size)
        if zlib.crc32(text.data) != checksum:
            raise ValueError(f"its {name} has a wrong checksum")
        return text.tobytes().decode("utf-8")

    def _find(self, file: CheckedFile, name: str, dtype: np.dtype[Any], size: int) -> StoredArray:
        """Find a dataset of this type that has `size` elements."""
        dataset = file.dataset(f"/{name}")
        if dataset.shape != (size,) or dataset.dtype != dtype:
            raise ValueError(f"/{name} is {dataset.dtype} {dataset.shape}, not {dtype} ({size},)")
        return StoredArray(self.where, self._file, dataset.offset, dtype, size)


def _fields(kind: type[Header | Contents], file: CheckedFile) -> dict[str, Any]:
    """Read the fields of a dataclass from the attributes."""
    return {
        field.name: file.text(field.name) if field.type == "str" else file.integer(field.name)
        for field in fields(kind)
    }
