"""Temporary file with one rank's tokens, from which `hpctrain prepare` continues after it was killed.

A journal next to it has a line for every piece of text whose tokens are complete: the number of tokens so
far, their checksum, and the ends of documents in the piece. The first line identifies the text and the way in
which it is read. A process that continues removes all tokens after the last complete line, and makes them
again.
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
    """One rank's tokens, in order, in a temporary file that is removed at the end of the `with` block.

    The file stays if the process is killed or interrupted.

    Attributes:
        tokens: Number of tokens.
        ends: Position after the last token of each document.
    """

    def __init__(self, path: Path, values: Tokenizer | int, key: str = "") -> None:
        """Prepare a file, which is created with the first token.

        Args:
            path: Path of the file.
            values: Tokenizer of the tokens, or number of their values.
            key: Identifies the text and the way in which it is read. If it is empty, no process can continue
                from the file.
        """
        self.path, self.journal = path, path.with_name(f"{path.name}.done")
        self.vocabulary = values if isinstance(values, int) else values.vocabulary
        self.dtype = token_type(self.vocabulary)
        self.tokens = 0
        self.ends = array("q")
        self._key = key
        self._checksum = self._journal_ends = 0
        self._file: BinaryIO | None = None
        self._lines: BinaryIO | None = None

    def __enter__(self) -> TokenPart:
        """Return the file, which is not created yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in (self._file, self._lines):
            if file is not None:
                with suppress(OSError):  # a failed write was reported before
                    file.close()
        if kind is None or issubclass(kind, Exception):
            self._remove()

    def resume(self) -> int:
        """Continue from the file of a killed process with the same key, and return its number of pieces."""
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
        if not pieces or not self._begins_with(tokens, checksum):
            self._remove()
            return 0
        with self._naming_the_file():
            self._file, self._lines = self.path.open("r+b"), self.journal.open("r+b")
            for file, size in ((self._file, tokens * self.dtype.itemsize), (self._lines, length)):
                file.truncate(size)
                file.seek(size)
        self.tokens, self.ends, self._checksum, self._journal_ends = tokens, ends, checksum, len(ends)
        return pieces

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append tokens [n].

        Raises:
            HpctrainError: A token is not in the vocabulary.
            InputOutputError: The file cannot be written.
        """
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
        """Append the token that ends a document."""
        self.add(np.array([token]))
        self.end_here()

    def end_here(self) -> None:
        """End a document without a token."""
        self.ends.append(self.tokens)

    def end_piece(self) -> None:
        """Record in the journal that all tokens of a piece of text are in the file."""
        if not self._key:
            return
        with self._naming_the_file():
            if self._file is None:
                self._file = self.path.open("wb", buffering=1 << 20)
            self._file.flush()
            if self._lines is None:
                self._lines = self.journal.open("wb")
                self._lines.write(self._first_line())
            line = [self.tokens, self._checksum, self.ends[self._journal_ends :].tolist()]
            self._lines.write(json.dumps(line).encode() + b"\n")
            self._lines.flush()
        self._journal_ends = len(self.ends)

    def finish(self) -> None:
        """Flush the file, so that all tokens can be read."""
        if self._file is not None:
            with self._naming_the_file():
                self._file.flush()

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return the tokens `start` to `start + count - 1`, [count].

        Raises:
            OSError: They are not in the file.
        """
        if not count:
            return np.empty(0, self.dtype)
        values = np.fromfile(self.path, self.dtype, count, offset=start * self.dtype.itemsize)
        if len(values) != count:
            raise OSError(f"{self.path} was truncated while it was in use")
        return values

    def _first_line(self) -> bytes:
        return json.dumps({"key": self._key}).encode() + b"\n"

    def _begins_with(self, tokens: int, checksum: int) -> bool:
        """Return True if the first `tokens` tokens of the file have this checksum."""
        left, crc = tokens * self.dtype.itemsize, 0
        try:
            with self.path.open("rb") as file:
                while left and (block := file.read(min(left, _BLOCK))):
                    crc, left = zlib.crc32(block, crc), left - len(block)
        except OSError:
            return False
        return not left and crc == checksum

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
    """Return the path of a rank's temporary file: of its tokens, or of `what`, "learned" or "others"."""
    return out.with_name(f".{out.name}.{what}-{rank}")


def remove_stale_files(out: Path, ranks: int) -> None:
    """Remove files that killed processes have left, except the tokens of `ranks` ranks."""
    ours = files_named(
        rf"\.{re.escape(out.name)}\.(partial|learned-[0-9]+|others-[0-9]+|part-(?P<rank>[0-9]+)(\.done)?)"
    )
    usable = {part_path(out, rank).name for rank in range(ranks)}
    usable |= {f"{name}.done" for name in usable}
    with suppress(OSError):
        delete_files(out.parent, lambda entry: ours(entry) and entry.name not in usable)
