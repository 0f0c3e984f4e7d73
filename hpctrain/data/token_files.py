"""Several token files that are read as one, in the order in which a deck names them.

A name may be a pattern such as "shards/*.h5", which means the matching files, sorted by name. All files must
have the same tokenizer. Every file ends with the end of a document, so no document spans two files.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.comm.error_messages import raise_together
from hpctrain.data.stored import require_range
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import file_identity

if TYPE_CHECKING:
    from torch import Tensor

MOST_FILES = 512
"""Largest number of token files of a run, which are all open. Systems allow a process 1024 open files."""


class TokenFiles:
    """Several token files with the interface of one TokenFile."""

    def __init__(self, files: Sequence[TokenFile], where: str) -> None:
        """Join files.

        Args:
            files: The files, in order.
            where: Beginning of error messages.

        Raises:
            HpctrainError: A file has another kind of contents or another tokenizer than the first one.
        """
        self.files, self.where = tuple(files), where
        require_one_tokenizer(self.files)
        self.kind = files[0].kind
        for file in files:
            if file.kind != self.kind:
                kinds = f"{file.where} holds {file.kind}, but {files[0].where} holds {self.kind}"
                raise HpctrainError(f"{where}: {kinds}; all files of a corpus must hold the same")
        self.vocabulary, self.end_of_document = files[0].vocabulary, files[0].end_of_document
        self.tokenizer_text = files[0].tokenizer_text
        self._begins = list(accumulate((file.tokens for file in files), initial=0))
        self._documents = list(accumulate((file.documents for file in files), initial=0))
        self.tokens, self.documents = self._begins[-1], self._documents[-1]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the tokens, and makes text of them."""
        return self.files[0].tokenizer

    @property
    def tokenizer_settings(self) -> TokenizerSettings:
        """Settings of the tokenizer, with the chat template of conversations, preferences and prompts."""
        return self.files[0].tokenizer_settings

    @cached_property
    def fingerprint(self) -> int:
        """Checksum that depends on the tokens and their order."""
        return common_fingerprint(self.files)

    def read(self, start: int, count: int) -> Tensor:
        """Return tokens `start` to `start + count - 1`, int64 [count]; errors as of `TokenFile.read`."""
        import torch  # late: it takes long to import, and callers that read only headers do not need it

        require_range(start, count, self.tokens)
        pieces = [file.read(begin, number) for file, begin, number in self._parts(start, count)]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def file_at(self, token: int) -> TokenFile:
        """Return the file that contains the token at a position."""
        require_range(token, 1, self.tokens)
        return self.files[bisect_right(self._begins, token, hi=len(self.files)) - 1]

    def _parts(self, start: int, count: int) -> Iterator[tuple[TokenFile, int, int]]:
        """Yield the files that contain a range of tokens, each with the start and length of its part."""
        end, number = start + count, bisect_right(self._begins, start, hi=len(self.files)) - 1
        while start < end:
            begin, stop = self._begins[number], min(end, self._begins[number + 1])
            yield self.files[number], start - begin, stop - start
            start, number = stop, number + 1

    def learned(self, start: int, count: int) -> Tensor:
        """Return which of these tokens are learned, bool [count], with the errors of `read`."""
        import torch

        if not count:
            return torch.empty(0, dtype=torch.bool)
        parts = [file.learned(begin, number) for file, begin, number in self._parts(start, count)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def other_keys(self, row: int) -> dict[str, Any]:
        """Return the other keys of a row of preferences or prompts."""
        rows = list(accumulate((file.contents.rows for file in self.files), initial=0))
        number = bisect_right(rows, row, hi=len(self.files)) - 1
        return self.files[number].other_keys(row - rows[number])

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Return the position after the last token of every document, int64 [documents]."""
        parts = zip(self.files, self._begins, strict=False)
        return np.concatenate([file.document_ends() + begin for file, begin in parts])

    def document_end(self, document: int) -> int:
        """Return the position after the last token of a document."""
        number = bisect_right(self._documents, document, hi=len(self.files)) - 1
        return self._begins[number] + self.files[number].document_end(document - self._documents[number])


Tokens = TokenFile | TokenFiles
"""One token file, or several that are read as one."""


def token_paths(names: Sequence[str], key: str) -> list[str]:
    """Return the files that names and patterns mean, in order.

    Args:
        names: Paths and patterns.
        key: Key of the deck with the names, for messages.

    Raises:
        HpctrainError: A pattern matches nothing, a file is named twice, or there are too many files.
    """
    paths: list[str] = []
    problems: list[HpctrainError] = []
    path_of: dict[object, str] = {}
    for name in names:
        matches = [name]
        if has_magic(name) and not os.path.lexists(name):
            matches = sorted(glob(name))  # noqa: PTH207 - relative names stay as they are written
            if not matches:
                problems.append(InputOutputError(f"{key} = {name}: no file matches this pattern"))
        for path in matches:
            real = file_identity(path)
            if real in path_of:
                same = "" if path_of[real] == path else f" (also as {path_of[real]})"
                problems.append(HpctrainError(f"{key}: {path} is given twice{same}; give each file once"))
            path_of.setdefault(real, path)
        paths += matches
    if len(paths) > MOST_FILES and not problems:
        sentence = (
            f"{len(paths)} files exceed the limit of {MOST_FILES} open files; prepare fewer, larger ones"
        )
        problems.append(HpctrainError(f"{key}: {sentence}"))
    raise_together(problems)
    return paths


def open_tokens(names: Sequence[str], key: str) -> Tokens:
    """Open the token files that names and patterns mean.

    Args:
        names: Paths and patterns.
        key: Key of the deck with the names, for messages.

    Raises:
        HpctrainError: With all problems of all files.
    """
    paths = token_paths(names, key)
    if len(paths) == 1:
        return TokenFile(paths[0], key)
    files: list[TokenFile] = []
    problems: list[HpctrainError] = []
    for path in paths:
        try:
            files.append(TokenFile(path, key))
        except HpctrainError as error:
            problems.append(error)
    raise_together(problems)
    value = toml_value(names[0] if len(names) == 1 else list(names))
    return TokenFiles(files, f"{key} = {value}")


def require_one_tokenizer(files: Sequence[Tokens]) -> None:
    """Check that all files have the tokenizer of the first one, or one that returns the same ids.

    Raises:
        HpctrainError: With each file that has another tokenizer.
    """
    first, problems = files[0], []
    for file in files[1:]:
        difference = tokenizer_difference(file.tokenizer_text, first.tokenizer_text, file.where, first.where)
        if not difference and file.end_of_document != first.end_of_document:
            ends = f"{file.end_of_document} instead of {first.end_of_document}"
            difference = f"its documents end with token {ends}"
        if difference:
            sentence = f"its tokenizer is not that of {first.where}: {difference}"
            problems.append(f"{file.where}: {sentence} (files of one corpus require the same tokenizer)")
    if problems:
        raise HpctrainError(problems)


def common_fingerprint(parts: Iterable[Tokens]) -> int:
    """Return the fingerprint of several token files in this order."""
    return zlib.crc32(" ".join(f"{part.tokens} {part.fingerprint}" for part in parts).encode())


def paths_of(tokens: Tokens) -> list[Path]:
    """Return the paths of the files, in order."""
    return [tokens.path] if isinstance(tokens, TokenFile) else [file.path for file in tokens.files]


def title_of(names: Sequence[str]) -> str:
    """Return the first name, with the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
