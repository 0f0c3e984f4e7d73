"""One token file out of every rank's tokens, written by all ranks together.

Each rank first keeps its tokens in a TokenPart, a plain file beside the output: a corpus is tokenized once
and never held in memory. When all counts are known, rank 0 lays the file out in its full size, and every
rank writes its own range, each call by itself: collective calls would wait forever for a rank whose disk
fails. Checksums cover pieces of fixed size, whoever wrote them, so that the file does not depend
on the number of ranks; the CRCs of the parts of a piece are combined.
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
from hpctrain.data.stored import CHECKSUM, TEXT
from hpctrain.data.token_part import TokenPart
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import SETTINGS
from hpctrain.data.tokens import ENDS, PIECE_TOKENS, Header, TokenFile
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

# What is going on, how much of it is done, how much there is (bytes or tokens).
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Range:
    """Range of a dataset of `size` elements that this rank writes: `count` elements from `start` on."""

    name: str
    dtype: np.dtype[Any]
    size: int
    start: int
    count: int
    read: Callable[[int, int], npt.NDArray[Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(name: str, size: int, start: int, values: npt.NDArray[Any]) -> Range:
        """A range that lies in memory."""
        return Range(name, values.dtype, size, start, values.size, lambda at, n: values[at : at + n])

    @property
    def call_elements(self) -> int:
        """Elements that one call writes."""
        return CALL_BYTES // self.dtype.itemsize


@dataclass(frozen=True)
class RowsPart:
    """What a rank has, beside tokens, of a file that is not of text: whether each is learned, and of
    preferences and prompts what else their rows have, whose ends are those of documents.
    """

    kind: str
    template: str
    rows: int
    learned: TokenPart
    learned_tokens: int
    other_keys: TokenPart | None


def write_tokens(
    world: World,
    out: Path,
    part: TokenPart,
    tokenizer: Tokenizer,
    source: str,
    report: Report,
    rows: RowsPart | None = None,
) -> Header:
    """Make the token file `out` of all ranks' parts, in the order of the ranks; as `write_files`."""

    def place(temporary: Sequence[Path], paths: Sequence[Path]) -> None:
        temporary[0].replace(paths[0])
        flush_to_disk(out.parent)

    [header] = write_files(world, [out], [part], tokenizer, source, report, place, rows)
    return header


def write_files(
    world: World,
    outs: Sequence[Path],
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    source: str,
    report: Report,
    place: Callable[[Sequence[Path], Sequence[Path]], None],
    rows: RowsPart | None = None,
) -> list[Header]:
    """Make the token files `outs`, each of one of `parts` of every rank, in the order of the ranks.

    They are written under temporary names, synced, read back against their checksums, and get their names by
    `place` on rank 0. Collective. HpctrainError where no rank has a token, InputOutputError where one cannot
    be written; both the same on all ranks.
    """
    world.ledger.activity = "writing the token file"
    made = [out.with_name(f".{out.name}.partial") for out in outs]
    headers: list[Header] = []
    try:
        for temporary, out, part in zip(made, outs, parts, strict=True):
            with with_final_name(temporary, out):
                headers.append(_write(world, temporary, part, tokenizer, source, report, rows))
                with world.agreement():
                    if world.local_rank == 0:
                        flush_to_disk(temporary)
                with world.agreement():
                    TokenFile(temporary, "written file").verify(world.rank, world.size)
        with with_final_name(made[0], outs[0]), world.agreement():
            if world.rank == 0:
                place(made, outs)
    finally:
        for temporary in made if world.rank == 0 else ():
            with suppress(OSError):
                temporary.unlink()
    return headers


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings end to end from theirs; `length` is the second one's.

    CRC-32 is affine: what the first string adds to the result is what it adds before `length` zeros.
    """
    with_first, without = first, 0
    while length:
        zeros = ZEROS[:length]
        with_first, without = zlib.crc32(zeros, with_first), zlib.crc32(zeros, without)
        length -= len(zeros)
    return with_first ^ without ^ second


def _write(
    world: World,
    path: Path,
    part: Part,
    tokenizer: Tokenizer,
    source: str,
    report: Report,
    rows: RowsPart | None,
) -> Header:
    """Write everything, but do not sync or rename the file."""
    counts = world.everyone.all_gather_object([part.tokens, len(part.ends)])
    tokens, documents = (sum(count[i] for count in counts) for i in (0, 1))
    with world.agreement():
        if not tokens:
            raise HpctrainError(f"{source}: no text found")
        needed = tokens * (part.dtype.itemsize + (rows is not None)) + documents * ENDS.itemsize
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
        source=source.encode("utf-8", "replace").decode()[:SOURCE_LENGTH],
        package=hpctrain.__version__,
    )
    contents, more = Contents(), list[Range]()
    if rows is not None:
        contents, more = _rows(world, rows)
    ranges = [text, settings, pieces[0], ends, pieces[1], *more]
    _write_file(world, path, header.attributes(contents), ranges, report)
    return header


def _rows(world: World, rows: RowsPart) -> tuple[Contents, list[Range]]:
    """Return what is written besides text. Collective."""
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
    """A text, which rank 0 writes, and its checksum."""
    values = np.frombuffer(text.encode("utf-8"), TEXT)
    return Range.of(name, values.size, 0, values if world.rank == 0 else values[:0]), zlib.crc32(values.data)


def _ends(world: World, name: str, part: Part) -> tuple[Range, int]:
    """Return this rank's range of the ends of documents, and the checksum of all ends. Collective."""
    counts = world.everyone.all_gather_object([part.tokens, len(part.ends)])
    start, first = (sum(count[i] for count in counts[: world.rank]) for i in (0, 1))
    ends, checksum = np.array(part.ends, dtype=ENDS) + start, 0
    for crc, length in world.everyone.all_gather_object([zlib.crc32(ends.data), ends.nbytes]):
        checksum = combine(checksum, crc, length)
    return Range.of(name, sum(count[1] for count in counts), first, ends), checksum


def _pieces(world: World, name: str, checksums_name: str, part: Part) -> tuple[Range, Range]:
    """The checksums of all ranks' parts, and the parts. Collective."""
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
    """[piece, CRC-32, bytes] of this rank's part of each piece that it has tokens of."""
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
    """The checksums of the pieces that begin on this rank; `firsts` has every rank's first segment."""
    mine = segments[1:] if segments and start % PIECE_TOKENS else segments
    for other in firsts[rank + 1 :]:
        for piece, crc, length in other:
            if mine and piece == mine[-1][0]:
                mine = [*mine[:-1], [piece, combine(mine[-1][1], crc, length), 0]]
    return np.array([crc for _, crc, _ in mine], dtype=CHECKSUM)


def _write_file(
    world: World, path: Path, attributes: dict[str, Any], ranges: Sequence[Range], report: Report
) -> None:
    """Lay the file out on rank 0, and fill its datasets on all ranks; collective."""
    failures: list[Exception] = []
    with world.agreement(), _failing(path):
        if world.rank == 0:
            _lay_out(path, attributes, ranges)
    # Seen by all ranks, or else it is not one shared folder; and then opening it would hang.
    with world.agreement(), _failing(path), descriptor_of(path, os.O_RDWR):
        pass
    with world.agreement(), _failing(path):
        with open_on_all_ranks(path, world.everyone) as file:
            try:
                for piece in ranges:
                    _fill(h5py.h5d.open(file, piece.name.encode()), piece, report)
            except (OSError, RuntimeError, ValueError) as error:
                failures.append(error)
        if failures:
            raise failures[0]


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    """Raise errors of the system and of HDF5 inside as an InputOutputError that names the file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise InputOutputError(f"{path}: the token file cannot be written ({error_reason(error)})") from None


def _lay_out(path: Path, attributes: dict[str, Any], ranges: Sequence[Range]) -> None:
    """Make the file with all its datasets, without their elements; on one rank."""
    # The newer format has checksums on HDF5's own structures too.
    with open_for_writing(path, "w", libver=("v108", "v110")) as file:
        for name, value in attributes.items():
            file.attrs[name] = value
        for piece in ranges:
            _create(file, piece)
            file[piece.name].attrs.update(piece.attributes)


def _create(file: h5py.File, piece: Range) -> None:
    """Make a contiguous dataset with all its space, never filled."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((piece.size,))
    h5py.h5d.create(file.id, piece.name.encode(), h5py.h5t.py_create(piece.dtype), space, properties)


def _fill(dataset: h5py.h5d.DatasetID, piece: Range, report: Report) -> None:
    """Write this rank's range, each call by itself."""
    calls = -(-piece.count // piece.call_elements)
    space = dataset.get_space()
    for call in range(calls):
        done = call * piece.call_elements
        values = piece.read(done, min(piece.call_elements, piece.count - done))
        space.select_hyperslab((piece.start + done,), (len(values),))
        dataset.write(h5py.h5s.create_simple((len(values),)), space, values)
        report(f"write {piece.name}", call + 1, calls)
