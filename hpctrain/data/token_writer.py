"""Writing of token files by all ranks together.

Each rank first stores its tokens in a TokenPart, a temporary file, so text is tokenized once and the corpus
is never in memory. When all counts are known, rank 0 creates the file in its full size, and every rank writes
its own range. The calls are not collective, since collective ones would hang if the disk of one rank failed.

Checksums belong to pieces of fixed size, whichever rank wrote them, so the file does not depend on the number
of ranks. The CRCs of the parts of a piece are combined.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

import hpctrain
from hpctrain.comm.error_messages import error_reason, with_final_name
from hpctrain.comm.parallel_files import open_on_all_ranks
from hpctrain.data.file_contents import Contents
from hpctrain.data.shard_files import TokenSlice
from hpctrain.data.stored import BYTE_DTYPE, CHECKSUM_DTYPE
from hpctrain.data.token_part import TokenPart
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import SETTINGS
from hpctrain.data.tokens import END_DTYPE, PIECE_TOKENS, Header, TokenFile
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import descriptor_of, flush_to_disk
from hpctrain.hdf5 import open_for_writing

if TYPE_CHECKING:
    from hpctrain.comm.world import World

CALL_BYTES = 64 << 20
ZEROS = bytes(1 << 20)
SOURCE_LENGTH = 1000

Part = TokenPart | TokenSlice
"""Tokens of one rank."""

Report = Callable[[str, int, int], None]
"""Function that shows progress: name of the activity, completed amount and total (bytes or tokens)."""


@dataclass(frozen=True)
class Range:
    """Range of a dataset that this rank writes.

    Attributes:
        name: Name of the dataset.
        dtype: Type of the elements.
        size: Number of elements of the dataset.
        start: First element of the range.
        count: Number of elements of the range.
        read: Function that returns elements of the range, from their first index and their number.
        attributes: Attributes of the dataset.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    start: int
    count: int
    read: Callable[[int, int], npt.NDArray[Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(name: str, size: int, start: int, values: npt.NDArray[Any]) -> Range:
        """Return the range of values in memory."""
        return Range(name, values.dtype, size, start, values.size, lambda at, n: values[at : at + n])

    @property
    def call_elements(self) -> int:
        """Number of elements that one call writes."""
        return CALL_BYTES // self.dtype.itemsize


@dataclass(frozen=True)
class RowsPart:
    """One rank's data besides tokens, for a file of conversations, preferences or prompts.

    Attributes:
        kind: Kind of the contents.
        template: The chat template as JSON.
        rows: Number of rows.
        learned: 1 for each learned token, else 0.
        learned_tokens: Number of learned tokens.
        other_keys: Bytes of the other keys of rows, where each document is a row; None if there are none.
    """

    kind: str
    template: str
    rows: int
    learned: TokenPart
    learned_tokens: int
    other_keys: TokenPart | None


class TokenWriter:
    """Writer of token files from the tokens of all ranks."""

    def __init__(self, world: World, tokenizer: Tokenizer, source: str, report: Report) -> None:
        """Prepare to write.

        Args:
            world: The world. All methods are collective.
            tokenizer: Tokenizer of the tokens.
            source: Description of the input, which the file stores.
            report: Function that shows progress.
        """
        self.world, self.tokenizer, self.source, self.report = world, tokenizer, source, report

    def write(self, out: Path, part: TokenPart, rows: RowsPart | None = None) -> Header:
        """Write the token file `out`; other arguments and errors as for `write_files`."""

        def place(temporary: Sequence[Path], paths: Sequence[Path]) -> None:
            temporary[0].replace(paths[0])
            flush_to_disk(out.parent)

        [header] = self.write_files([out], [part], place, rows)
        return header

    def write_files(
        self,
        outs: Sequence[Path],
        parts: Sequence[Part],
        place: Callable[[Sequence[Path], Sequence[Path]], None],
        rows: RowsPart | None = None,
    ) -> list[Header]:
        """Write token files and return their headers.

        Files are written under temporary names, flushed to disk, and read back to compare their checksums.

        Args:
            outs: The token files.
            parts: This rank's tokens in each file. A file has those of all ranks, in their order.
            place: Function that renames the files on rank 0, from their temporary and their final paths.
            rows: Data besides tokens; None for text.

        Raises:
            HpctrainError: On all ranks if there are no tokens.
            InputOutputError: On all ranks if a file cannot be written.
        """
        world = self.world
        world.ledger.activity = "writing the token file"
        partial = [out.with_name(f".{out.name}.partial") for out in outs]
        headers: list[Header] = []
        try:
            for temporary, out, part in zip(partial, outs, parts, strict=True):
                with with_final_name(temporary, out):
                    headers.append(self._write(temporary, part, rows))
                    with world.agreement():
                        if world.local_rank == 0:
                            flush_to_disk(temporary)
                    with world.agreement():
                        TokenFile(temporary, "written file").verify(world.rank, world.size)
            with with_final_name(partial[0], outs[0]), world.agreement():
                if world.rank == 0:
                    place(partial, outs)
        finally:
            for temporary in partial if world.rank == 0 else ():
                with suppress(OSError):
                    temporary.unlink()
        return headers

    def _write(self, path: Path, part: Part, rows: RowsPart | None) -> Header:
        """Write a complete file, but do not flush or rename it. Collective."""
        world, tokenizer = self.world, self.tokenizer
        counts = world.everyone.all_gather_object([part.tokens, len(part.ends)])
        tokens, documents = (sum(count[i] for count in counts) for i in (0, 1))
        with world.agreement():
            if not tokens:
                raise HpctrainError(f"{self.source}: no text found")
            needed = tokens * (part.dtype.itemsize + (rows is not None)) + documents * END_DTYPE.itemsize
            free = shutil.disk_usage(path.parent).free
            if free < needed:
                raise InputOutputError(
                    f"{path.parent}: the token file requires {needed} bytes, but {free} are free"
                )
        pieces = _pieces(world, "tokens", "checksums", part)
        ends, ends_checksum = _ends(world, "document_ends", part)
        text, tokenizer_checksum = _text(world, "tokenizer", tokenizer.text)
        settings, settings_checksum = _text(world, SETTINGS, tokenizer.settings.to_json())
        settings = replace(settings, attributes={"crc32": np.uint32(settings_checksum)})
        header = Header(
            vocabulary=tokenizer.vocabulary,
            end_of_document=tokenizer.end_of_document,
            tokens=tokens,
            documents=documents,
            piece=PIECE_TOKENS,
            document_ends_checksum=ends_checksum,
            tokenizer_checksum=tokenizer_checksum,
            source=self.source.encode("utf-8", "replace").decode()[:SOURCE_LENGTH],
            package=hpctrain.__version__,
        )
        contents, more = Contents(), list[Range]()
        if rows is not None:
            contents, more = _rows(world, rows)
        ranges = [text, settings, pieces[0], ends, pieces[1], *more]
        _write_file(world, path, header.attributes(contents), ranges, self.report)
        return header


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings.

    CRC-32 is affine: the first string changes the result as it would if `length` zeros followed it.

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second string.
        length: Length of the second string in bytes.
    """
    with_first, without = first, 0
    while length:
        zeros = ZEROS[:length]
        with_first, without = zlib.crc32(zeros, with_first), zlib.crc32(zeros, without)
        length -= len(zeros)
    return with_first ^ without ^ second


def _rows(world: World, rows: RowsPart) -> tuple[Contents, list[Range]]:
    """Return the description of the rows and the ranges of their data. Collective."""
    counts = world.everyone.all_gather_object([rows.rows, rows.learned_tokens])
    template, template_checksum = _text(world, "template", rows.template)
    ranges = [template, *_pieces(world, "learned", "learned_checksums", rows.learned)]
    others, ends_checksum = 0, 0
    if rows.other_keys is not None:
        ends, ends_checksum = _ends(world, "others_ends", rows.other_keys)
        checksums, texts = _pieces(world, "others", "others_checksums", rows.other_keys)
        others = texts.size
        ranges += [ends, checksums, texts]
    total, learned = (sum(count[i] for count in counts) for i in (0, 1))
    return Contents(rows.kind, total, learned, others, ends_checksum, template_checksum), ranges


def _text(world: World, name: str, text: str) -> tuple[Range, int]:
    """Return the range of a text, which rank 0 writes, and its checksum."""
    values = np.frombuffer(text.encode("utf-8"), BYTE_DTYPE)
    return Range.of(name, values.size, 0, values if world.rank == 0 else values[:0]), zlib.crc32(values.data)


def _ends(world: World, name: str, part: Part) -> tuple[Range, int]:
    """Return this rank's range of the ends of documents, and the checksum of all ends. Collective."""
    counts = world.everyone.all_gather_object([part.tokens, len(part.ends)])
    start, first = (sum(count[i] for count in counts[: world.rank]) for i in (0, 1))
    ends, checksum = np.array(part.ends, dtype=END_DTYPE) + start, 0
    for crc, length in world.everyone.all_gather_object([zlib.crc32(ends.data), ends.nbytes]):
        checksum = combine(checksum, crc, length)
    return Range.of(name, sum(count[1] for count in counts), first, ends), checksum


def _pieces(world: World, name: str, checksums_name: str, part: Part) -> tuple[Range, Range]:
    """Return this rank's ranges of the checksums of pieces, and of the elements. Collective."""
    counts = world.everyone.all_gather_object(part.tokens)
    start, total, segments = sum(counts[: world.rank]), sum(counts), list[list[int]]()
    with world.agreement():
        segments = _segments(part, start)
    checksums = _checksums(segments, world.everyone.all_gather_object(segments[:1]), start, world.rank)
    first = -(-start // PIECE_TOKENS)
    return (
        Range.of(checksums_name, -(-total // PIECE_TOKENS), first, checksums),
        Range(name, part.dtype, total, start, part.tokens, part.read),
    )


def _segments(part: Part, start: int) -> list[list[int]]:
    """Return [piece, CRC-32, bytes] of this rank's part of each piece in which it has elements."""
    segments = []
    at, end = start, start + part.tokens
    while at < end:
        piece = at // PIECE_TOKENS
        values = part.read(at - start, min((piece + 1) * PIECE_TOKENS, end) - at)
        segments.append([piece, zlib.crc32(values.data), values.nbytes])
        at += len(values)
    return segments


def _checksums(
    segments: list[list[int]], firsts: Sequence[list[list[int]]], start: int, rank: int
) -> npt.NDArray[Any]:
    """Return the checksums of the pieces that begin on this rank, [pieces].

    Args:
        segments: Result of `_segments` of this rank.
        firsts: First segment of every rank, in a list that is empty if the rank has none.
        start: Position of this rank's first element.
        rank: This rank.
    """
    pieces = segments[1:] if segments and start % PIECE_TOKENS else segments
    for following in firsts[rank + 1 :]:
        for piece, crc, length in following:
            if pieces and piece == pieces[-1][0]:
                pieces = [*pieces[:-1], [piece, combine(pieces[-1][1], crc, length), 0]]
    return np.array([crc for _, crc, _ in pieces], dtype=CHECKSUM_DTYPE)


def _write_file(
    world: World, path: Path, attributes: dict[str, Any], ranges: Sequence[Range], report: Report
) -> None:
    """Create the file on rank 0, and write its datasets on all ranks. Collective."""
    failures: list[Exception] = []
    with world.agreement(), _naming_the_file(path):
        if world.rank == 0:
            _create_file(path, attributes, ranges)
    # If a rank does not see the file, the folder is not shared, and opening the file together would hang.
    with world.agreement(), _naming_the_file(path), descriptor_of(path, os.O_RDWR):
        pass
    with world.agreement(), _naming_the_file(path):
        with open_on_all_ranks(path, world.everyone) as file:
            try:
                for piece in ranges:
                    _fill(h5py.h5d.open(file, piece.name.encode()), piece, report)
            except (OSError, RuntimeError, ValueError) as error:
                failures.append(error)
        if failures:
            raise failures[0]


@contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
    """Raise errors of the system and of HDF5 inside as an InputOutputError that names the file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise InputOutputError(f"{path}: the token file cannot be written ({error_reason(error)})") from None


def _create_file(path: Path, attributes: dict[str, Any], ranges: Sequence[Range]) -> None:
    """Create the file with all its datasets, without their elements. Local."""
    # The newer format also has checksums of HDF5's own structures.
    with open_for_writing(path, "w", libver=("v108", "v110")) as file:
        for name, value in attributes.items():
            file.attrs[name] = value
        for piece in ranges:
            _create_dataset(file, piece)
            file[piece.name].attrs.update(piece.attributes)


def _create_dataset(file: h5py.File, piece: Range) -> None:
    """Create a contiguous dataset with all its space, without filling it."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((piece.size,))
    h5py.h5d.create(file.id, piece.name.encode(), h5py.h5t.py_create(piece.dtype), space, properties)


def _fill(dataset: h5py.h5d.DatasetID, piece: Range, report: Report) -> None:
    """Write this rank's range, with independent calls."""
    calls = -(-piece.count // piece.call_elements)
    space = dataset.get_space()
    for call in range(calls):
        done = call * piece.call_elements
        values = piece.read(done, min(piece.call_elements, piece.count - done))
        space.select_hyperslab((piece.start + done,), (len(values),))
        dataset.write(h5py.h5s.create_simple((len(values),)), space, values)
        report(f"write {piece.name}", call + 1, calls)
