"""Text as documents: how files are cut into pieces, whether these are text, and what they say.

A plain file is one document. Files of JSON lines (`.jsonl`, `.ndjson`, `.jsonlines`) have one document
per line, JSON lists (`.json`) one per entry. All may be compressed (`.gz`, `.zst`). A column of a `.parquet`
table has one document per row.
Files are cut into pieces at places that depend on the file alone, so that any number of ranks reads
the same pieces: behind the first newline that follows every PIECE bytes, or, in text without newlines,
before the next space or character. Bytes that are not UTF-8 become U+FFFD, or, in raw sources, the
surrogates that stand for them in Python; line ends stay as they are. Half of a pair of UTF-16, which JSON can
have as an escape, is not UTF-8 either.
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

# Called with every problem found in a file; reading goes on behind it.
Complaint = Callable[[HpctrainError], None]


@dataclass(frozen=True)
class TextPiece:
    """Bytes `begin` to `end` of a source, before its cuts are moved to the end of a line.

    A compressed source is one piece, but its text is cut every `step` bytes like any other.
    """

    source: TextSource
    begin: int
    end: int
    step: int

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self.end - self.begin


def cut_into_pieces(sources: Sequence[TextSource], size: int = PIECE) -> list[TextPiece]:
    """Return all sources as pieces of about `size` bytes, in order; some files are one piece."""
    assert size >= 8, size  # a cut looks at whole characters of the next piece
    return [
        TextPiece(source, begin, min(begin + stride, source.size), size)
        for source in sources
        for stride in (source.size if source.whole else size,)
        for begin in range(0, source.size, stride)
    ]


def share_of(pieces: Sequence[TextPiece], rank: int, ranks: int) -> Sequence[TextPiece]:
    """A contiguous run of the pieces: those whose middle lies in this rank's share of all bytes."""
    total = sum(piece.size for piece in pieces)
    first = last = seen = 0
    for piece in pieces:
        owner = (2 * seen + piece.size) * ranks // (2 * total)
        first += owner < rank
        last += owner <= rank
        seen += piece.size
    return pieces[first:last]


def read_piece(piece: TextPiece, text_key: str, complain: Complaint) -> Iterator[tuple[str, bool]]:
    """Parts of documents in order, and whether the document ends behind the part.

    What cannot be read, a line that is no JSON object or has no text under `text_key`, goes to
    `complain` as one sentence with file and line.
    """
    if piece.source.table:
        with _complaining(piece, complain):
            for text in table_texts(piece.source.path, text_key):
                yield text, True
        return
    with _complaining(piece, complain), piece.source.open() as file:
        if piece.source.lines or piece.source.is_list:
            yield from _read_lines(file, piece, text_key, complain)
        else:
            for block, begin, ends in _blocks(file, piece):
                yield _decode(block, begin, piece.source.raw), ends


@dataclass(frozen=True)
class JsonRow:
    """A JSON value, the `number`th line of a piece or row of a table."""

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


def read_rows(piece: TextPiece, complain: Complaint) -> Iterator[JsonRow]:
    """The lines of a piece as JSON, whatever its file is called, or the rows of a table.

    What cannot be read goes to `complain`, as of `read_piece`.
    """
    with _complaining(piece, complain):
        if piece.source.table:
            for number, value in enumerate(table_rows(piece.source.path), 1):
                yield JsonRow(value, piece, number)
            return
        if piece.source.path.lower().endswith(JSON) and not piece.source.json:
            wanted = "expected a JSON list of rows, or one row per line"
            complain(HpctrainError(f"{piece.source.path}: is a single JSON value; {wanted}"))
            return
        with piece.source.open() as file:
            yield from _json_rows(file, piece, complain)


def examine_piece(piece: TextPiece, complain: Complaint) -> int | None:
    """Why a piece is no text: BINARY (it has a zero byte) or NOT_UTF8; None where it is, as in a table."""
    fault = None
    if piece.source.table:
        return None
    with _complaining(piece, complain), piece.source.open() as file:
        for block, _, _ in _blocks(file, piece):
            if b"\0" in block:
                return BINARY
            try:
                block.decode("utf-8")
            except UnicodeDecodeError:
                fault = NOT_UTF8
    return fault


@contextmanager
def _complaining(piece: TextPiece, complain: Complaint) -> Iterator[None]:
    """What cannot be read goes to `complain`."""
    path = piece.source.path
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        complain(InputOutputError(f"{path}: is damaged or truncated gzip ({error})"))
    except DamagedError as error:
        complain(InputOutputError(f"{path}: is damaged or truncated ({error})"))
    except HpctrainError as error:
        complain(error)
    except OSError as error:
        complain(InputOutputError(f"{path}: cannot be read ({error.strerror or error})"))


def _blocks(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """The bytes of a piece, where they begin in the file, and whether they are its last ones."""
    return (_read_stream if piece.source.whole else _read_plain)(file, piece)


def _read_plain(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """One piece of a plain file, the last one perhaps empty."""
    begin, end = (_seek_cut(file, offset, piece) for offset in (piece.begin, piece.end))
    file.seek(begin)
    block = file.read(end - begin)
    if len(block) != end - begin:
        raise OSError("it became shorter while it was read")
    yield block, begin, piece.end == piece.source.size


def _read_stream(file: BufferedIOBase, piece: TextPiece) -> Iterator[tuple[bytes, int, bool]]:
    """All pieces of a compressed file, cut where the same text, not compressed, is cut."""
    block, begin, end = b"", 0, piece.step
    while True:
        wanted = end + min(SEARCH, piece.step) - begin
        while len(block) < wanted and (more := file.read(wanted - len(block))):
            block += more
        if begin + len(block) <= end:
            yield block, begin, True
            return
        length = end - begin + _cut(block[end - begin :])
        yield block[:length], begin, False
        block, begin, end = block[length:], begin + length, end + piece.step


def _read_lines(
    file: BufferedIOBase, piece: TextPiece, text_key: str, complain: Complaint
) -> Iterator[tuple[str, bool]]:
    """Yield the documents of the lines that begin in the piece, or of all rows of a whole file."""
    for row in _json_rows(file, piece, complain):
        content = row.value.get(text_key) if isinstance(row.value, dict) else None
        half = HALF.search(content) if isinstance(content, str) else None
        if not isinstance(content, str):
            complain(HpctrainError(f"{row.where}: has no text under {text_key!r}; see --field"))
        elif half is not None and not piece.source.lenient:
            problem = f"has text that is not UTF-8 (U+{ord(half[0]):04X}); give --binary to read it"
            complain(HpctrainError(f"{row.where}: {problem}"))
        elif content:
            yield content if half is None else HALF.sub("\ufffd", content), True


def _json_rows(file: BufferedIOBase, piece: TextPiece, complain: Complaint) -> Iterator[JsonRow]:
    """Yield the JSON values of a piece: entries of a list, or lines."""
    return (_rows_of_list if piece.source.is_list else _rows_of_lines)(file, piece, complain)


def _rows_of_list(file: BufferedIOBase, piece: TextPiece, complain: Complaint) -> Iterator[JsonRow]:
    """Yield the entries of a JSON list, which is read a part at a time."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("replace").decode
    text, number, at_end = "", 0, False
    began = ended = False
    while not ended:
        text = text.lstrip(" \t\r\n" + ("," if number else ""))
        wrong = ""
        if not began and text:
            began, text = True, text[1:]  # the bracket, by which the file was found to be a list
            continue
        if text.startswith("]"):
            ended = True
            continue
        try:
            value, length = decoder.raw_decode(text)
            if length < len(text) or at_end:  # a number may go on behind what was read
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
            complain(HpctrainError(f"{piece.source.path}: entry {number + 1} {wrong or 'is too long'}"))
            return
        block = file.read(max(_LIST_BLOCK, len(text)))
        at_end = not block
        text += decode(block, final=at_end)


def _rows_of_lines(file: BufferedIOBase, piece: TextPiece, complain: Complaint) -> Iterator[JsonRow]:
    """The lines, as JSON, that begin in the piece, or all lines of a compressed file."""
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
        complain(HpctrainError(f"{piece.source.path}:{_lines_before(piece) + number}: {wrong}"))


def _lines_before(piece: TextPiece) -> int:
    """Lines that begin before the piece: counted only when there is something to complain about."""
    if not piece.begin:
        return 0
    count, left = 1, piece.begin - 1  # a newline as the last byte ends a line, but begins none before us
    with piece.source.open() as file:
        while left and (block := file.read(min(left, PIECE))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _seek_cut(file: BufferedIOBase, offset: int, piece: TextPiece) -> int:
    """Where the cut at the nominal `offset` really is."""
    if offset in {0, piece.source.size}:
        return offset
    file.seek(offset)
    return offset + _cut(file.read(min(SEARCH, piece.step)))


def _cut(block: bytes) -> int:
    """Bytes of `block` that still belong to the piece before it."""
    newline = block.find(b"\n")
    if newline >= 0:
        return newline + 1
    space = block.find(b" ")
    if space >= 0:
        return space
    return next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def _decode(block: bytes, begin: int, raw: bool = False) -> str:
    """UTF-8 text, without the mark that some systems put at the begin of a file; with `raw`, all bytes."""
    if raw:
        return block.decode("utf-8", errors="surrogateescape")
    return (block if begin else block.removeprefix(codecs.BOM_UTF8)).decode("utf-8", errors="replace")
