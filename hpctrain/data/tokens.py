"""The token file: one HDF5 file with all tokens of a corpus, its tokenizer and its checksums.

    /                 attributes: format, version, header_checksum and the fields of Header
    /tokens           uint8, uint16 or uint32 [tokens], the smallest type that holds the vocabulary
    /document_ends    int64 [documents], the token behind each document's last one
    /tokenizer        uint8 [bytes], UTF-8: "bytes" or the JSON of a `tokenizers` tokenizer
    /checksums        uint32 [pieces], the CRC-32 of every `piece` tokens

All numbers are little-endian and all datasets contiguous. They are read where they lie, when they are used:
the ranks of a node share one copy, the page cache's. Unlike memory that is mapped, a read of a file that
was cut, or of a disk that fails, is an error that can be told.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.comm.outcome import reason
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import InputOutputError
from hpctrain.files import open_regular
from hpctrain.words import command

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "hpctrain tokens"
VERSION = 1
PIECE_TOKENS = 1 << 16  # of 16 bits: what the kernel reads ahead anyway, and 0.1 ms to sum up
ENDS = np.dtype("<i8")
CHECKSUM = np.dtype("<u4")
TEXT = np.dtype("u1")
BLOCK = 1 << 20


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


@dataclass(frozen=True)
class StoredArray:
    """A contiguous dataset in a file that is open; `where` begins what is said of it."""

    where: str
    file: int
    offset: int
    dtype: np.dtype[Any]
    size: int

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Elements [count]; InputOutputError where they cannot be read."""
        assert 0 <= start <= start + count <= self.size, (start, count, self.size)
        values = np.empty(count, self.dtype)
        rest = memoryview(values.view(TEXT).data)
        offset = self.offset + start * self.dtype.itemsize
        while rest:
            try:
                done = os.preadv(self.file, [rest], offset)
            except OSError as error:
                raise InputOutputError(f"{self.where}: cannot be read ({error.strerror})") from None
            if not done:
                raise InputOutputError(f"{self.where}: has become shorter since it was opened")
            rest, offset = rest[done:], offset + done
        return values

    def checksum(self) -> int:
        """CRC-32 of all elements."""
        crc = 0
        for start in range(0, self.size, BLOCK):
            crc = zlib.crc32(self.read(start, min(BLOCK, self.size - start)).data, crc)
        return crc


class TokenFile:
    """A token file, opened for reading; every problem is an InputOutputError that begins with `key`.

    Opening checks the header and that the file is as long as it says; `read` verifies a piece when it first
    reads of it, `verify` all of them. All ids are below `vocabulary`, `end_of_document` follows every
    document; `tokens` and `documents` are how many there are, `dtype` is a token's type in the file.
    """

    def __init__(self, path: str | Path, key: str = "data.tokens") -> None:
        self.path = Path(path)
        self.where = f"{key} = {path}"
        self._require_file()
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        try:
            # Read-only, and never changed once it has its name: no lock that a file system may lack.
            file = h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise self._error(f"is truncated or damaged ({reason(error)})") from None
        with file:
            try:
                self._open(file)
            except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise self._error(f"is damaged ({reason(error)})") from None
        self._stamp = self._last_change()
        self._verified = bytearray(-(-self.header.pieces // 8))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, and makes text of them."""
        return Tokenizer(self.tokenizer_text)

    @cached_property
    def fingerprint(self) -> int:
        """A number that files of other tokens do not share; made from the checksums alone."""
        return zlib.crc32(
            f"{self.tokens} {self.header.document_ends_checksum}".encode(), self._checksums.checksum()
        )

    def read(self, start: int, count: int) -> Tensor:
        """Tokens start .. start + count - 1, int64 [count].

        Of pieces that this object has not read before, or of a file that was written to since, the
        checksums are compared; InputOutputError names the piece where they differ.
        """
        import torch  # what looks at a header alone need not wait for it

        assert 0 <= start <= start + count <= self.tokens, (start, count, self.tokens)
        if (stamp := self._last_change()) != self._stamp:
            self._stamp, self._verified = stamp, bytearray(len(self._verified))
        size, end = self.header.piece, start + count
        tokens = np.empty(count, np.int64)
        for piece in range(start // size, -(-end // size)):
            first, last = max(start, piece * size), min(end, (piece + 1) * size)
            tokens[first - start : last - start] = self._read_of_piece(piece, first, last)
        return torch.from_numpy(tokens)

    def document_end(self, document: int) -> int:
        """The token behind the last one of a document (its end of document)."""
        return int(self._verified_ends.read(document, 1)[0])

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare everything with its checksum, of the tokens this rank's share of `ranks`."""
        problems: list[str] = []
        if rank == 0:
            try:
                self._compare_ends()
            except InputOutputError as error:
                problems += error.problems
        pieces = self.header.pieces
        for piece in range(pieces * rank // ranks, pieces * (rank + 1) // ranks):
            try:
                self._read_piece(piece)
            except InputOutputError as error:
                problems += error.problems
        if problems:
            raise InputOutputError(problems)

    @cached_property
    def _verified_ends(self) -> StoredArray:
        self._compare_ends()
        return self._ends

    def _compare_ends(self) -> None:
        """InputOutputError where the document boundaries have another checksum."""
        if self._ends.checksum() != self.header.document_ends_checksum:
            raise self._error("the document boundaries are damaged (wrong checksum)")

    def _read_of_piece(self, piece: int, first: int, last: int) -> npt.NDArray[Any]:
        """Tokens first .. last - 1 of a piece, which is verified unless it was before."""
        byte, bit = piece // 8, 1 << piece % 8
        if self._verified[byte] & bit:
            return self._tokens.read(first, last - first)
        begin = piece * self.header.piece
        whole = self._read_piece(piece)
        self._verified[byte] |= bit
        return whole[first - begin : last - begin]

    def _read_piece(self, piece: int) -> npt.NDArray[Any]:
        """All tokens of a piece; InputOutputError where they have another checksum."""
        start = piece * self.header.piece
        tokens = self._tokens.read(start, min(self.header.piece, self.tokens - start))
        if zlib.crc32(tokens.data) != self._checksums.read(piece, 1)[0]:
            where = f"piece {piece + 1} of {self.header.pieces}, tokens {start} to {start + len(tokens) - 1}"
            again = "copy or prepare the file again"
            raise self._error(f"{where}, is not what was written (wrong checksum); {again}")
        return tokens

    def _last_change(self) -> tuple[int, int]:
        """Length of the file and when it was last written to."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _error(self, sentence: str) -> InputOutputError:
        return InputOutputError(f"{self.where}: {sentence}")

    def _require_file(self) -> None:
        """Refuse what is no HDF5 file at all."""
        try:
            open_regular(self.path).close()
        except FileNotFoundError:
            sought = self.path.absolute()
            looked = f" (looked for {sought}, relative to where this was started)"
            looked = "" if self.path.is_absolute() else looked
            made = f"{command('prepare', sought, 'TEXT')} makes one"
            raise self._error(f"no such file{looked}; {made}") from None
        except IsADirectoryError:
            raise self._error("is a folder; it must be a file from `hpctrain prepare`") from None
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from None
        if not h5py.is_hdf5(self.path):
            raise self._error("is no token file (not HDF5, or cut short); `hpctrain prepare` makes one")

    def _open(self, file: h5py.File) -> None:
        """Check the header and map the datasets."""
        attributes = file.attrs
        if "format" not in attributes or _text(attributes["format"]) != FORMAT:
            raise self._error("is HDF5, but no token file of ours; `hpctrain prepare` makes one")
        if (version := int(attributes["version"])) > VERSION:
            known = f"this hpctrain reads up to {VERSION}: take a newer one"
            raise self._error(f"has version {version}; {known}")
        stored: dict[str, Any] = {
            field.name: (_text if field.type == "str" else int)(attributes[field.name])
            for field in fields(Header)
        }
        self.header = header = Header(**stored)
        if header.checksum != int(attributes["header_checksum"]):
            raise ValueError("its header has a wrong checksum")
        self.vocabulary, self.end_of_document = header.vocabulary, header.end_of_document
        self.tokens, self.documents = header.tokens, header.documents
        self.dtype = token_type(header.vocabulary)
        self._tokens = self._find(file, "tokens", self.dtype, self.tokens)
        self._ends = self._find(file, "document_ends", ENDS, self.documents)
        self._checksums = self._find(file, "checksums", CHECKSUM, self.header.pieces)
        text = self._find(file, "tokenizer", TEXT, file["tokenizer"].size).read(0, file["tokenizer"].size)
        if zlib.crc32(text.data) != self.header.tokenizer_checksum:
            raise ValueError("its tokenizer has a wrong checksum")
        self.tokenizer_text = text.tobytes().decode("utf-8")

    def _find(self, file: h5py.File, name: str, dtype: np.dtype[Any], size: int) -> StoredArray:
        """A contiguous dataset that lies in the file with all its elements."""
        dataset = file[name]
        offset = dataset.id.get_offset()
        if dataset.shape != (size,) or dataset.dtype != dtype or offset is None:
            raise ValueError(f"/{name} is {dataset.dtype} {dataset.shape}, not {dtype} ({size},)")
        end, length = offset + size * dtype.itemsize, os.fstat(self._file).st_size
        if end > length:
            raise self._error(f"is truncated: {length} bytes of at least {end} are there")
        return StoredArray(self.where, self._file, offset, dtype, size)


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
