"""The token file: one HDF5 file with all tokens of a corpus, its tokenizer and its checksums.

    /                 attributes: format, version, header_checksum and the fields of Header
    /tokens           uint8, uint16 or uint32 [tokens], the smallest type that holds the vocabulary
    /document_ends    int64 [documents], the token behind each document's last one
    /tokenizer        uint8 [bytes], UTF-8: "bytes" or the JSON of a `tokenizers` tokenizer
    /checksums        uint32 [pieces], the CRC-32 of every `piece` tokens

All numbers are little-endian and all datasets contiguous, so that /tokens can be mapped into memory:
the ranks of a node share one copy, the page cache's, and nothing is read before it is used.
"""

from __future__ import annotations

import json
import mmap
import zlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.errors import InputOutputError

FORMAT = "hpctrain tokens"
VERSION = 1
PIECE_TOKENS = 1 << 20
ENDS = np.dtype("<i8")
CHECKSUM = np.dtype("<u4")
TEXT = np.dtype("u1")


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds range(vocabulary)."""
    return next(np.dtype(name) for name in ("u1", "<u2", "<u4") if vocabulary - 1 <= np.iinfo(name).max)


@dataclass(frozen=True)
class Header:
    """What is known of a token file without reading its tokens; stored as attributes."""

    vocabulary: int
    end_of_document: int
    tokens: int
    documents: int
    piece: int
    document_ends_checksum: int
    tokenizer_checksum: int
    source: str
    package: str

    @property
    def pieces(self) -> int:
        """How many checksums there are."""
        return -(-self.tokens // self.piece)

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def attributes(self) -> dict[str, Any]:
        """All attributes of the file.

        Text has a fixed length: HDF5 keeps other text in a heap without checksums, and can crash on it.
        """
        values = {"format": FORMAT, "version": VERSION, **asdict(self), "header_checksum": self.checksum}
        return {
            name: np.bytes_(value.encode("utf-8", "replace")) if isinstance(value, str) else value
            for name, value in values.items()
        }


class TokenFile:
    """A token file, opened for reading; every problem is an InputOutputError that begins with `key`.

    Opening checks the header and that the file is as long as it says; `verify` reads all of it.
    `vocabulary`, `end_of_document`, `tokens` (how many) and `documents` come from the header.
    """

    def __init__(self, path: str | Path, key: str = "data.tokens") -> None:
        self.path = Path(path)
        self.where = f"{key} = {path}"
        self._require_file()
        try:
            # Read-only, and never changed once it has its name: no lock that a file system may lack.
            file = h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise InputOutputError(f"{self.where}: is truncated or damaged ({error})") from None
        with file:
            try:
                self._open(file)
            except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise InputOutputError(f"{self.where}: is damaged ({error})") from None

    @property
    def vocabulary(self) -> int:
        """All ids are below it."""
        return self.header.vocabulary

    @property
    def end_of_document(self) -> int:
        """The id that follows every document."""
        return self.header.end_of_document

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.header.tokens

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return self.header.documents

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token in the file."""
        return token_type(self.header.vocabulary)

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer's JSON, None where the tokens are bytes."""
        return None if self.tokenizer_text == BYTES else self.tokenizer_text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, and makes text of them."""
        return Tokenizer.from_text(self.tokenizer_text)

    def read(self, start: int, count: int) -> Tensor:
        """Tokens start .. start + count - 1, int64 [count]."""
        tokens = torch.from_numpy(self.view(start, count).astype(np.int64))
        # The pages stay in the page cache, but not in this process: else its memory grew with what it reads.
        pages: object = self._tokens.base
        assert isinstance(pages, mmap.mmap)
        pages.madvise(mmap.MADV_DONTNEED)
        return tokens

    def view(self, start: int, count: int) -> npt.NDArray[Any]:
        """The same tokens where they lie, in the file's own type; read-only."""
        assert 0 <= start <= start + count <= self.tokens, (start, count, self.tokens)
        return self._tokens[start : start + count]

    def document_end(self, document: int) -> int:
        """The token behind the last one of a document (its end of document)."""
        return int(self._ends[document])

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare everything with its checksum, of the tokens this rank's share of `ranks`."""
        problems = []
        if rank == 0 and zlib.crc32(self._ends.data) != self.header.document_ends_checksum:
            problems.append(f"{self.where}: the document boundaries are damaged (wrong checksum)")
        pieces = self.header.pieces
        for piece in range(pieces * rank // ranks, pieces * (rank + 1) // ranks):
            start = piece * self.header.piece
            tokens = self._tokens[start : start + self.header.piece]
            if zlib.crc32(tokens.data) != self._checksums[piece]:
                problems.append(
                    f"{self.where}: tokens {start} to {start + len(tokens) - 1} are damaged (wrong checksum)"
                )
        if problems:
            raise InputOutputError(problems)

    def _require_file(self) -> None:
        """Refuse what is no HDF5 file at all."""
        try:
            if self.path.is_dir():
                raise InputOutputError(
                    f"{self.where}: is a folder; it must be a file from `hpctrain prepare`"
                )
            with self.path.open("rb"):
                pass
        except FileNotFoundError:
            raise InputOutputError(f"{self.where}: no such file; `hpctrain prepare` makes one") from None
        except OSError as error:
            raise InputOutputError(f"{self.where}: cannot be read ({error.strerror})") from None
        if not h5py.is_hdf5(self.path):
            raise InputOutputError(
                f"{self.where}: is no token file (not HDF5, or cut short); `hpctrain prepare` makes one"
            )

    def _open(self, file: h5py.File) -> None:
        """Check the header and map the datasets."""
        attributes = file.attrs
        if "format" not in attributes or _text(attributes["format"]) != FORMAT:
            raise InputOutputError(
                f"{self.where}: is HDF5, but no token file of ours; `hpctrain prepare` makes one"
            )
        if (version := int(attributes["version"])) > VERSION:
            raise InputOutputError(
                f"{self.where}: has version {version}; this hpctrain reads up to {VERSION}: take a newer one"
            )
        stored: dict[str, Any] = {
            field.name: (_text if field.type == "str" else int)(attributes[field.name])
            for field in fields(Header)
        }
        self.header = Header(**stored)
        if self.header.checksum != int(attributes["header_checksum"]):
            raise ValueError("its header has a wrong checksum")
        self._tokens = self._map(file, "tokens", self.dtype, self.tokens)
        self._ends = self._map(file, "document_ends", ENDS, self.documents)
        self._checksums = self._map(file, "checksums", CHECKSUM, self.header.pieces)
        text = self._map(file, "tokenizer", TEXT, file["tokenizer"].size)
        if zlib.crc32(text.data) != self.header.tokenizer_checksum:
            raise ValueError("its tokenizer has a wrong checksum")
        self.tokenizer_text = text.tobytes().decode("utf-8")

    def _map(self, file: h5py.File, name: str, dtype: np.dtype[Any], size: int) -> npt.NDArray[Any]:
        """A contiguous dataset as an array that reads the file when it is touched."""
        dataset = file[name]
        offset = dataset.id.get_offset()
        if dataset.shape != (size,) or dataset.dtype != dtype or offset is None:
            raise ValueError(f"/{name} is {dataset.dtype} {dataset.shape}, not {dtype} ({size},)")
        end, length = offset + size * dtype.itemsize, self.path.stat().st_size
        if end > length:
            raise InputOutputError(f"{self.where}: is truncated: {length} bytes of at least {end} are there")
        return np.memmap(self.path, dtype, "r", offset, (size,))


def _text(value: Any) -> str:
    """An attribute as text."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
