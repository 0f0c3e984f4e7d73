"""Text as documents: which files are meant, how they are cut into pieces, and what the pieces say.

A plain file is one document, a `.jsonl` file one document a line; either may be compressed (`.gz`).
Files are cut into pieces at places that depend on the file alone, so that any number of ranks reads
the same pieces: behind the first newline that follows every PIECE bytes, or, in text without newlines,
before the next space or character. Bytes that are not UTF-8 become U+FFFD; line ends stay as they are.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePosixPath

from hpctrain.errors import HpctrainError, InputOutputError

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".jsonl")
PIECE = 4 << 20
SEARCH = 64 << 10
PROBLEMS = 10

# Called with every problem found in a file; reading goes on behind it.
Complaint = Callable[[HpctrainError], None]


@dataclass(frozen=True)
class Source:
    """One input file; `size` is its length on the disk in bytes."""

    path: str
    size: int

    @property
    def compressed(self) -> bool:
        """Whether it is gzip, by its name."""
        return self.path.endswith(".gz")

    @property
    def lines(self) -> bool:
        """Whether every line is a document of its own."""
        return self.path.removesuffix(".gz").endswith(".jsonl")

    def open(self) -> BufferedIOBase:
        """The file, decompressed."""
        return gzip.open(self.path, "rb") if self.compressed else Path(self.path).open("rb")


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of a source, before its cuts are moved to the end of a line.

    A compressed source is one piece, but its text is cut every `step` bytes like any other.
    """

    source: Source
    begin: int
    end: int
    step: int

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self.end - self.begin


def find_sources(paths: Sequence[str], globs: Sequence[str], without: Sequence[Path] = ()) -> list[Source]:
    """The files meant by `paths`, in the order given, inside folders sorted by name, each once.

    A file that is named is taken; in folders (searched in depth, hidden ones and hidden files left out)
    those are taken whose name, or path where the pattern has a slash, matches one of `globs`, by
    default those with TEXT_ENDINGS, compressed or not. `without` are never taken. Empty files have
    no document and are left out. HpctrainError names every path that gives nothing.
    """
    problems: list[HpctrainError] = []
    found: dict[str, Source] = {}
    avoided = {os.path.realpath(path) for path in without}
    for given in paths:
        folder = Path(given)
        try:
            files = _matches(folder, globs) if folder.is_dir() else [folder]
            if not files:
                wanted = ", ".join(globs) if globs else "*" + ", *".join(TEXT_ENDINGS)
                problems.append(
                    HpctrainError(f"{given}: no file in this folder matches {wanted}; see --glob")
                )
            for file in files:
                real = os.path.realpath(file)
                if real not in avoided:
                    found.setdefault(real, Source(str(file), file.stat().st_size))
        except FileNotFoundError:
            problems.append(InputOutputError(f"{given}: no such file or folder"))
        except OSError as error:
            problems.append(InputOutputError(f"{error.filename}: cannot be read ({error.strerror})"))
    raise_all(problems)
    return [source for source in found.values() if source.size]


def raise_all(problems: Sequence[HpctrainError]) -> None:
    """Raise all problems as one error, of the graver class; nothing where there is none."""
    if problems:
        grave = any(isinstance(problem, InputOutputError) for problem in problems)
        texts = [text for problem in problems for text in problem.problems]
        raise (InputOutputError if grave else HpctrainError)(texts)


def cut_into_pieces(sources: Sequence[Source], size: int = PIECE) -> list[Piece]:
    """All sources as pieces of about `size` bytes, in order; compressed files cannot be cut."""
    assert size >= 8, size  # a cut looks at whole characters of the next piece
    return [
        Piece(source, begin, min(begin + stride, source.size), size)
        for source in sources
        for stride in (source.size if source.compressed else size,)
        for begin in range(0, source.size, stride)
    ]


def share_of(pieces: Sequence[Piece], rank: int, ranks: int) -> Sequence[Piece]:
    """A contiguous run of the pieces: those whose middle lies in this rank's share of all bytes."""
    total = sum(piece.size for piece in pieces)
    first = last = seen = 0
    for piece in pieces:
        owner = (2 * seen + piece.size) * ranks // (2 * total)
        first += owner < rank
        last += owner <= rank
        seen += piece.size
    return pieces[first:last]


def read_piece(piece: Piece, text_key: str, complain: Complaint) -> Iterator[tuple[str, bool]]:
    """Parts of documents in order, and whether the document ends behind the part.

    What cannot be read, a line that is no JSON object or has no text under `text_key`, goes to
    `complain` as one sentence with file and line.
    """
    path = piece.source.path
    try:
        with piece.source.open() as file:
            if piece.source.lines:
                yield from _read_lines(file, piece, text_key, complain)
            else:
                yield from (_read_stream if piece.source.compressed else _read_plain)(file, piece)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        complain(InputOutputError(f"{path}: is damaged or cut short gzip ({error})"))
    except OSError as error:
        complain(InputOutputError(f"{path}: cannot be read ({error.strerror or error})"))


def _matches(folder: Path, globs: Sequence[str]) -> list[Path]:
    """The files of a folder that match, sorted by their path below it."""
    if any(not pattern.strip("/") for pattern in globs):
        raise HpctrainError("--glob: the pattern is empty; give one such as '*.txt'")

    def stop(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    files = [file for file in files if _wanted(file.relative_to(folder), globs) and file.is_file()]
    return sorted(files, key=lambda file: file.parts)


def _wanted(below: Path, globs: Sequence[str]) -> bool:
    if not globs:
        return below.name.removesuffix(".gz").endswith(TEXT_ENDINGS)
    return any(PurePosixPath(below.as_posix()).match(pattern) for pattern in globs)


def _read_plain(file: BufferedIOBase, piece: Piece) -> Iterator[tuple[str, bool]]:
    """One piece of a plain file, the last one perhaps empty."""
    begin, end = (_seek_cut(file, place, piece) for place in (piece.begin, piece.end))
    file.seek(begin)
    block = file.read(end - begin)
    if len(block) != end - begin:
        raise OSError("it became shorter while it was read")
    yield _decode(block, begin), piece.end == piece.source.size


def _read_stream(file: BufferedIOBase, piece: Piece) -> Iterator[tuple[str, bool]]:
    """All pieces of a compressed file, cut where the same text, not compressed, is cut."""
    block, begin, end = b"", 0, piece.step
    while True:
        wanted = end + _search(piece) - begin
        while len(block) < wanted and (more := file.read(wanted - len(block))):
            block += more
        if begin + len(block) <= end:
            yield _decode(block, begin), True
            return
        place = end - begin + _cut(block[end - begin :])
        yield _decode(block[:place], begin), False
        block, begin, end = block[place:], begin + place, end + piece.step


def _read_lines(
    file: BufferedIOBase, piece: Piece, text_key: str, complain: Complaint
) -> Iterator[tuple[str, bool]]:
    """The documents of the lines that begin in the piece, or of all lines of a compressed file."""
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
            document = json.loads(text)
        except json.JSONDecodeError as error:
            wrong = f"is no JSON ({error.msg} at column {error.colno})"
        except RecursionError:
            wrong = "is nested too deeply"
        else:
            content = document.get(text_key) if isinstance(document, dict) else None
            if isinstance(content, str):
                if content:
                    yield content, True
                continue
            wrong = f"has no text under {text_key!r}; see --text-key"
        complain(HpctrainError(f"{piece.source.path}:{_lines_before(piece) + number}: the line {wrong}"))


def _lines_before(piece: Piece) -> int:
    """Lines that begin before the piece: counted only when there is something to complain about."""
    if not piece.begin:
        return 0
    count, left = 1, piece.begin - 1  # a newline as the last byte ends a line, but begins none before us
    with piece.source.open() as file:
        while left and (block := file.read(min(left, PIECE))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _search(piece: Piece) -> int:
    return min(SEARCH, piece.step)


def _seek_cut(file: BufferedIOBase, place: int, piece: Piece) -> int:
    """Where the cut at the nominal `place` really is."""
    if place in {0, piece.source.size}:
        return place
    file.seek(place)
    return place + _cut(file.read(_search(piece)))


def _cut(block: bytes) -> int:
    """Bytes of `block` that still belong to the piece before it."""
    newline = block.find(b"\n")
    if newline >= 0:
        return newline + 1
    space = block.find(b" ")
    if space >= 0:
        return space
    return next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def _decode(block: bytes, begin: int) -> str:
    """UTF-8 text, without the mark that some systems put at the begin of a file."""
    return (block if begin else block.removeprefix(codecs.BOM_UTF8)).decode("utf-8", errors="replace")
