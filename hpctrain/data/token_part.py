"""One rank's tokens while they are made, in a plain file, which a killed process leaves behind to go on from.

Beside it lies a journal with a line for every piece of text that is in the file to its end: how many tokens
these are, their checksum, and the ends of documents. What goes on reads the same text in the same way, which
the first line tells; what is behind the last whole line is made again.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hpctrain.comm.error_messages import error_reason
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import token_type
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import delete_files, files_named

_BLOCK = 1 << 24


class TokenPart:
    """One rank's tokens, in order, in a temporary file that `close` removes, but where the process is ended.

    They are of a tokenizer, or any of so many values. `key` is what the file is known by as one of the same
    text, cut alike; without one, an ended process leaves nothing to go on from.
    """

    def __init__(self, path: Path, values: Tokenizer | int, key: str = "") -> None:
        self.path, self.journal = path, path.with_name(f"{path.name}.done")
        self.vocabulary = values if isinstance(values, int) else values.vocabulary
        self.dtype = token_type(self.vocabulary)
        self.tokens = 0
        self.ends = array("q")
        self._key = key
        self._checksum = self._told = 0
        self._file: BinaryIO | None = None
        self._lines: BinaryIO | None = None

    def __enter__(self) -> TokenPart:
        """Nothing is made before the first token."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in (self._file, self._lines):
            if file is not None:
                with suppress(OSError):  # what it could not write was said when it was tried
                    file.close()
        if kind is None or issubclass(kind, Exception):
            self._remove()

    def go_on(self) -> int:
        """Take up what an ended process has left of the same; how many pieces it had finished."""
        tokens, checksum, ends, pieces, length = 0, 0, array("q"), 0, 0
        with suppress(OSError, ValueError, TypeError):
            lines = self.journal.read_bytes().splitlines(keepends=True)
            if lines and lines[0] == self._first_line():
                length = len(lines[0])
                for line in lines[1:]:
                    if not line.endswith(b"\n"):
                        break
                    tokens, checksum, more = json.loads(line)
                    ends.extend(more)
                    pieces, length = pieces + 1, length + len(line)
        if not pieces or not self._holds(tokens, checksum):
            self._remove()
            return 0
        with self._naming_the_file():
            self._file, self._lines = self.path.open("r+b"), self.journal.open("r+b")
            for file, size in ((self._file, tokens * self.dtype.itemsize), (self._lines, length)):
                file.truncate(size)
                file.seek(size)
        self.tokens, self.ends, self._checksum, self._told = tokens, ends, checksum, len(ends)
        return pieces

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append tokens [n]; HpctrainError if one is not in the vocabulary."""
        if len(ids) and int(ids.max()) >= self.vocabulary:
            raise HpctrainError(
                f"the tokenizer returned token id {ids.max()}, out of range [0, {self.vocabulary})"
            )
        values = ids.astype(self.dtype).data
        with self._naming_the_file():
            if self._file is None:
                self._file = self.path.open("wb", buffering=1 << 20)
            self._file.write(values)
        self._checksum = zlib.crc32(values, self._checksum)
        self.tokens += len(ids)

    def end_document(self, token: int) -> None:
        """Append the end of a document."""
        self.add(np.array([token]))
        self.end_here()

    def end_here(self) -> None:
        """A document ends, and no token says so."""
        self.ends.append(self.tokens)

    def end_piece(self) -> None:
        """Remember that all of a piece of text is there."""
        if not self._key:
            return
        with self._naming_the_file():
            if self._file is None:
                self._file = self.path.open("wb", buffering=1 << 20)
            self._file.flush()
            if self._lines is None:
                self._lines = self.journal.open("wb")
                self._lines.write(self._first_line())
            line = [self.tokens, self._checksum, self.ends[self._told :].tolist()]
            self._lines.write(json.dumps(line).encode() + b"\n")
            self._lines.flush()
        self._told = len(self.ends)

    def finish(self) -> None:
        """Nothing more is added; everything can be read."""
        if self._file is not None:
            with self._naming_the_file():
                self._file.flush()

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [count]; OSError if they are not there."""
        if not count:
            return np.empty(0, self.dtype)
        values = np.fromfile(self.path, self.dtype, count, offset=start * self.dtype.itemsize)
        if len(values) != count:
            raise OSError(f"{self.path} was truncated while it was in use")
        return values

    def _first_line(self) -> bytes:
        return json.dumps({"key": self._key}).encode() + b"\n"

    def _holds(self, tokens: int, checksum: int) -> bool:
        """Whether the file begins with so many tokens of that checksum."""
        left, found = tokens * self.dtype.itemsize, 0
        try:
            with self.path.open("rb") as file:
                while left and (block := file.read(min(left, _BLOCK))):
                    found, left = zlib.crc32(block, found), left - len(block)
        except OSError:
            return False
        return not left and found == checksum

    def _remove(self) -> None:
        for path in (self.path, self.journal):
            with suppress(OSError):
                path.unlink()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Raise errors of the system inside as an InputOutputError that names the file."""
        try:
            yield
        except OSError as error:
            raise InputOutputError(f"{self.path}: cannot be written ({error_reason(error)})") from None


def part_path(out: Path, rank: int, what: str = "part") -> Path:
    """Where a rank's tokens are while they are made, or what else of them: "learned" or "others"."""
    return out.with_name(f".{out.name}.{what}-{rank}")


def remove_others(out: Path, ranks: int) -> None:
    """Remove what ended processes have left of ranks that are not among these, and of the file itself."""
    ours = files_named(
        rf"\.{re.escape(out.name)}\.(partial|learned-[0-9]+|others-[0-9]+|part-(?P<rank>[0-9]+)(\.done)?)"
    )
    kept = {part_path(out, rank).name for rank in range(ranks)}
    kept |= {f"{name}.done" for name in kept}
    with suppress(OSError):
        delete_files(out.parent, lambda entry: ours(entry) and entry.name not in kept)
