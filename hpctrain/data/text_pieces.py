"""Pieces of input files, and the documents and rows in them.

A plain file is one document. Files of JSON lines (`.jsonl`, `.ndjson`, `.jsonlines`) have one document per
line, JSON lists (`.json`) one per entry, and a column of a `.parquet` table one per row. All but tables may
be compressed (`.gz`, `.zst`).

Files are cut at places that depend only on the file, so any number of ranks reads the same pieces: after the
first newline that follows every PIECE bytes, or, in text without newlines, before the next space or
character. Bytes that are not UTF-8 become U+FFFD, or, in raw sources, surrogates as in Python. Line ends stay
as they are. An unpaired UTF-16 surrogate, which JSON can contain as an escape, is not UTF-8 either.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from hpctrain.data.input_files import BINARY, JSON, NOT_UTF8, TextSource
from hpctrain.data.packed import DamagedError, table_rows, table_texts
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import parse_json

PIECE = 4 << 20
SEARCH = 64 << 10
PROBLEMS = 10
_LIST_BLOCK = 1 << 20
_LONGEST_ENTRY = 256 << 20
HALF = re.compile("[\ud800-\udfff]")

ErrorHandler = Callable[[HpctrainError], None]
"""Function that receives every problem of a file; reading continues after it."""


@dataclass(frozen=True)
class TextPiece:
    """Bytes `begin` to `end` of a source, before the cuts are moved to the end of a line.

    A compressed source is one piece, but its decompressed text is cut every `step` bytes as that of other
    files.
    """

    source: TextSource
    begin: int
    end: int
    step: int

    @property
    def size(self) -> int:
        """Number of bytes on the disk."""
        return self.end - self.begin


def cut_into_pieces(sources: Sequence[TextSource], size: int = PIECE) -> list[TextPiece]:
    """Return the pieces of all sources, of about `size` bytes, in order. Some files are one piece."""
    assert size >= 8, size  # a cut looks at whole characters of the next piece
    return [
        TextPiece(source, begin, min(begin + stride, source.size), size)
        for source in sources
        for stride in (source.size if source.is_one_piece else size,)
        for begin in range(0, source.size, stride)
    ]


def share_of(pieces: Sequence[TextPiece], rank: int, ranks: int) -> Sequence[TextPiece]:
    """Return the pieces of a rank: those whose middle is in the rank's share of all bytes."""
    total = sum(piece.size for piece in pieces)
    first = last = before = 0
    for piece in pieces:
        owner = (2 * before + piece.size) * ranks // (2 * total)
        first += owner < rank
        last += owner <= rank
        before += piece.size
    return pieces[first:last]


def read_piece(piece: TextPiece, text_key: str, handle_error: ErrorHandler) -> Iterator[tuple[str, bool]]:
    """Yield parts of documents in order, each with True if the document ends after it.

    Args:
        piece: The piece.
        text_key: Key of JSON objects, or column of tables, with the text.
        handle_error: Function that receives an error for each line without a text, or for an unreadable file.
    """
    if piece.source.table:
        with _errors_to(piece, handle_error):
            for text in table_texts(piece.source.path, text_key):
                yield text, True
        return
    with _errors_to(piece, handle_error), piece.source.open() as file:
        if piece.source.lines or piece.source.is_list:
            yield from _read_lines(file, piece, text_key, handle_error)
        else:
            for block, begin, ends in _blocks(file, piece):
                yield _decode(block, begin, piece.source.raw), ends


@dataclass(frozen=True)
class JsonRow:
    """JSON value of a line, list entry or table row; `number` counts from 1 in the piece."""

    value: Any
    piece: TextPiece
    number: int

    @property
    def where(self) -> str:
        """Place of the row in its file, for messages; counting lines reads the file again."""
        if self.piece.source.is_list:
            return f"{self.piece.source.path}: entry {self.number}"
        before = 0 if self.piece.source.table else _lines_before(self.piece)
        return f"{self.piece.source.path}:{before + self.number}"


def read_rows(piece: TextPiece, handle_error: ErrorHandler) -> Iterator[JsonRow]:
    """Yield the rows of a table, or the lines or list entries of another file as JSON.

    `handle_error` receives an error for each line that is not JSON, and for an unreadable file.
    """
    with _errors_to(piece, handle_error):
        if piece.source.table:
            for number, value in enumerate(table_rows(piece.source.path), 1):
                yield JsonRow(value, piece, number)
            return
        if piece.source.path.lower().endswith(JSON) and not piece.source.json:
            expected = "expected a JSON list of rows, or one row per line"
            handle_error(HpctrainError(f"{piece.source.path}: is a single JSON value; {expected}"))
            return
        with piece.source.open() as file:
            yield from _json_rows(file, piece, handle_error)


def examine_piece(piece: TextPiece, handle_error: ErrorHandler) -> int | None:
    """Return why a piece is not text: BINARY (it has a zero byte) or NOT_UTF8. None if it is, or a table."""
    fault = None
    if piece.source.table:
        return None
    with _errors_to(piece, handle_error), piece.source.open() as file:
        for block, _, _ in _blocks(file, piece):
            if b"\0" in block:
                return BINARY
            try:
                block.decode("utf-8")
            except UnicodeDecodeError:
                fault = NOT_UTF8
    return fault


@contextmanager
def _errors_to(piece: TextPiece, handle_error: ErrorHandler) -> Iterator[None]:
    """Pass errors of reading inside the block to `handle_error`."""
    path = piece.source.path
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        handle_error(InputOutputError(f"{path}: is damaged or truncated gzip ({error})"))
    except DamagedError as error:
        handle_error(InputOutputError(f"{path}: is damaged or truncated ({error})"))
    except HpctrainError as error:
        handle_error(error)
    except OSError as error:
        handle_error(InputOutputError(f"{path}: cannot be read ({error.strerror or error})"))


def _blocks(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """Yield blocks of a piece, each with its place in the file and True if it is the last of the file."""
    return (_read_stream if piece.source.is_one_piece else _read_plain)(file, piece)


def _read_plain(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """Yield the piece of a plain file as one block, which may be empty at the end of the file."""
    begin, end = (_seek_cut(file, offset, piece) for offset in (piece.begin, piece.end))
    file.seek(begin)
    block = file.read(end - begin)
    if len(block) != end - begin:
        raise OSError("it was truncated while it was read")
    yield block, begin, piece.end == piece.source.size


def _read_stream(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """Yield the blocks of a compressed file, cut at the same places as its decompressed text would be."""
    block, begin, end = b"", 0, piece.step
    while True:
        needed = end + min(SEARCH, piece.step) - begin
        while len(block) < needed and (more := file.read(needed - len(block))):
            block += more
        if begin + len(block) <= end:
            yield block, begin, True
            return
        length = end - begin + _cut(block[end - begin :])
        yield block[:length], begin, False
        block, begin, end = block[length:], begin + length, end + piece.step


def _read_lines(
    file: BufferedIOBase, piece: TextPiece, text_key: str, handle_error: ErrorHandler
) -> Iterator[tuple[str, bool]]:
    """Yield the documents of the lines that begin in the piece, or of all rows of a file of one piece."""
    for row in _json_rows(file, piece, handle_error):
        content = row.value.get(text_key) if isinstance(row.value, dict) else None
        half = HALF.search(content) if isinstance(content, str) else None
        if not isinstance(content, str):
            handle_error(HpctrainError(f"{row.where}: has no text under {text_key!r}; see --field"))
        elif half is not None and not piece.source.lenient:
            problem = f"has text that is not UTF-8 (U+{ord(half[0]):04X}); give --binary to read it"
            handle_error(HpctrainError(f"{row.where}: {problem}"))
        elif content:
            yield content if half is None else HALF.sub("\ufffd", content), True


def _json_rows(file: BufferedIOBase, piece: TextPiece, handle_error: ErrorHandler) -> Iterator[JsonRow]:
    """Yield the JSON values of a piece: entries of a list, or lines."""
    return (_rows_of_list if piece.source.is_list else _rows_of_lines)(file, piece, handle_error)


def _rows_of_list(file: BufferedIOBase, piece: TextPiece, handle_error: ErrorHandler) -> Iterator[JsonRow]:
    """Yield the entries of a JSON list, which is read a part at a time."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("replace").decode
    text, number, at_end = "", 0, False
    is_open = at_close = False
    while not at_close:
        text = text.lstrip(" \t\r\n" + ("," if number else ""))
        wrong = ""
        if not is_open and text:
            is_open, text = True, text[1:]  # without the bracket that begins the list
            continue
        if text.startswith("]"):
            at_close = True
            continue
        try:
            value, length = decoder.raw_decode(text)
            if length < len(text) or at_end:  # at the end of the text, a number may have more digits
                number, text = number + 1, text[length:]
                yield JsonRow(value, piece, number)
                continue
        except json.JSONDecodeError as error:
            wrong = f"is not JSON ({error.msg})" if text else "is missing: the list has no end"
        except RecursionError:
            wrong = "is not JSON that can be read (nested too deeply)"
        except ValueError:
            wrong = "is not JSON that can be read (a number has too many digits)"
        if at_end or len(text) > _LONGEST_ENTRY:
            handle_error(HpctrainError(f"{piece.source.path}: entry {number + 1} {wrong or 'is too long'}"))
            return
        block = file.read(max(_LIST_BLOCK, len(text)))
        at_end = not block
        text += decode(block, final=at_end)


def _rows_of_lines(file: BufferedIOBase, piece: TextPiece, handle_error: ErrorHandler) -> Iterator[JsonRow]:
    """Yield the lines that begin in the piece, or all lines of a compressed file, as JSON."""
    if piece.begin:
        file.seek(piece.begin - 1)
        file.readline()
    number = 0
    while piece.source.compressed or file.tell() < piece.end:
        line = file.readline()
        if not line:
            return
        number += 1
        text = _decode(line, piece.begin + number - 1).strip()
        if not text:
            continue
        try:
            yield JsonRow(parse_json(text), piece, number)
            continue
        except json.JSONDecodeError as error:
            wrong = f"is not JSON ({error.msg} at column {error.colno})"
        except ValueError as error:
            wrong = f"is not JSON that can be read ({error})"
        handle_error(HpctrainError(f"{piece.source.path}:{_lines_before(piece) + number}: {wrong}"))


def _lines_before(piece: TextPiece) -> int:
    """Return the number of lines that begin before the piece. It is slow."""
    if not piece.begin:
        return 0
    count, left = 1, piece.begin - 1  # a newline as the last byte begins no line before the piece
    with piece.source.open() as file:
        while left and (block := file.read(min(left, PIECE))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _seek_cut(file: BufferedIOBase, offset: int, piece: TextPiece) -> int:
    """Return the place of the cut whose nominal place is `offset`."""
    if offset in {0, piece.source.size}:
        return offset
    file.seek(offset)
    return offset + _cut(file.read(min(SEARCH, piece.step)))


def _cut(block: bytes) -> int:
    """Return how many bytes of `block` belong to the piece before it."""
    newline = block.find(b"\n")
    if newline >= 0:
        return newline + 1
    space = block.find(b" ")
    if space >= 0:
        return space
    return next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def _decode(block: bytes, begin: int, raw: bool = False) -> str:
    """Decode UTF-8 text, without a byte order mark at the beginning of a file; `raw` keeps all bytes."""
    if raw:
        return block.decode("utf-8", errors="surrogateescape")
    return (block if begin else block.removeprefix(codecs.BOM_UTF8)).decode("utf-8", errors="replace")
