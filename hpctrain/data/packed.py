"""Text that lies in files of other forms: compressed by gzip or Zstandard, or a column of a Parquet table.

What is cut short is damaged, never taken for a whole. Packages that few need are loaded where such a file is.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import HpctrainError, require
from hpctrain.text import nearest

COMPRESSED = (".gz", ".zst")
TABLE = ".parquet"
_CHUNK = 4096
"""Bytes that are decompressed at a time: what they hold may be much more, up to 128 MiB."""
_ROWS = 256


class DamagedError(Exception):
    """What a file holds cannot be unpacked, or not to its end; in words, why."""


def plain_name(name: str) -> str:
    """Return the name that a file has before it is compressed, in lower case."""
    name = name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


def open_packed(path: str) -> BufferedIOBase:
    """Open a compressed file for reading its decompressed bytes."""
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    require("zstandard", f"{path}: reading .zst")
    return BufferedReader(_Zstandard(Path(path).open("rb")))


class _Zstandard(RawIOBase):
    """A file of Zstandard frames, decompressed. DamagedError where it ends within one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._frame, self._ready = file, _new_frame(), memoryview(b"")
        self._within = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As much as is at hand."""
        import zstandard

        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._within = _new_frame(), False
            chunk = chunk or self._file.read(_CHUNK)
            if not chunk:
                if self._within:
                    raise DamagedError("it ends within a frame")
                return 0
            self._within = True
            try:
                self._ready = memoryview(self._frame.decompress(chunk))
            except zstandard.ZstdError as error:
                raise DamagedError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """The file, too."""
        self._file.close()
        super().close()


def _new_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def table_texts(path: str, column: str) -> Iterator[str]:
    """The texts of a column of a Parquet table, row by row, without those that are null or empty.

    HpctrainError where there is no such column of texts, DamagedError where the table cannot be read.
    """
    with _table(path) as table:
        import pyarrow as pa

        names = table.schema_arrow.names
        if column not in names:
            near = nearest(column, names)
            has = f"did you mean {near}?" if near else f"it has {', '.join(names[:10])}"
            raise HpctrainError(f"{path}: has no column {column!r} ({has}); see --field")
        kind = table.schema_arrow.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise HpctrainError(f"{path}: column {column!r} has type {kind}, expected text; see --field")
        for batch in table.iter_batches(_ROWS, columns=[column]):
            yield from filter(None, batch.column(0).to_pylist())


def table_rows(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet table, by column. DamagedError where it cannot be read."""
    with _table(path) as table:
        for batch in table.iter_batches(_ROWS):
            yield from batch.to_pylist()


@contextmanager
def _table(path: str) -> Iterator[Any]:
    require("pyarrow", f"{path}: reading {TABLE}")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise DamagedError(" ".join(str(error).split())) from None
