"""Readers of text in compressed files (gzip, Zstandard) and in columns of Parquet tables.

A truncated file is an error. The packages `zstandard` and `pyarrow` are imported when such a file is read.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import override

from hpctrain.errors import HpctrainError, require
from hpctrain.text import nearest

COMPRESSED = (".gz", ".zst")
TABLE = ".parquet"
_CHUNK = 4096
"""Compressed bytes that are read at a time. Decompressed they may be many more, up to 128 MiB."""
_ROWS = 256
"""Rows of a table that are read at a time."""


class DamagedError(Exception):
    """A file cannot be decompressed or decoded completely. The message says why."""


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
    """Decompressed content of a file of Zstandard frames.

    Reading raises a DamagedError if the file ends within a frame.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._frame, self._ready = file, _new_frame(), memoryview(b"")
        self._within_frame = False

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._within_frame = _new_frame(), False
            chunk = chunk or self._file.read(_CHUNK)
            if not chunk:
                if self._within_frame:
                    raise DamagedError("it ends within a frame")
                return 0
            self._within_frame = True
            try:
                self._ready = memoryview(self._frame.decompress(chunk))
            except zstandard.ZstdError as error:
                raise DamagedError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def _new_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def table_texts(path: str, column: str) -> Iterator[str]:
    """Yield the texts of a column of a Parquet table, without those that are null or empty.

    Raises:
        HpctrainError: The table has no such column of texts.
        DamagedError: The table cannot be read.
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
    """Yield the rows of a Parquet table, each as its values by column.

    Raises:
        DamagedError: The table cannot be read.
    """
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
