"""Corpus in several token files, which are split between documents: OUT-00000.h5, OUT-00001.h5 and so on.

All files are renamed to these names at the end, one after the other. A marker file exists meanwhile. After a
process was killed, the next one sees by the marker that the files are its own.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.token_part import TokenPart
from hpctrain.errors import HpctrainError
from hpctrain.files import check_output, delete_files, files_named, flush_to_disk

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_DIGITS = 5
_MOST = 10**_DIGITS


class ShardFiles:
    """Names of the files that replace `out`, and the existing files with such names."""

    def __init__(self, out: Path) -> None:
        self.folder, self._stem, self._suffix = out.parent, out.stem, out.suffix
        self.pattern = out.with_name(f"{out.stem}-*{out.suffix}")
        self._marker = out.with_name(f".{out.name}.naming")

    def paths(self, number: int) -> list[Path]:
        """Return the paths of the first `number` files.

        Raises:
            HpctrainError: There cannot be so many files.
        """
        if number > _MOST:
            raise HpctrainError(
                f"{self.pattern}: requires {number} files, more than the limit of {_MOST}; make them larger"
            )
        return [self._path(each) for each in range(number)]

    def check(self, replace: bool) -> None:
        """Check that the files can be written.

        Raises:
            HpctrainError: Such files exist and `replace` is False, or the names are not valid.
        """
        check_output(self._path(0), replace=True)
        if not self._marker.exists():
            for path in self.present():
                check_output(path, replace)

    def present(self) -> list[Path]:
        """Return the existing files, sorted."""
        names = re.compile(rf"{re.escape(self._stem)}-[0-9]{{{_DIGITS}}}{re.escape(self._suffix)}")
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in paths if names.fullmatch(path.name))

    def remove_temporary_files(self) -> None:
        """Remove the temporary files that killed processes have left."""
        ours = files_named(rf"\.{re.escape(self._stem)}-[0-9]{{{_DIGITS}}}{re.escape(self._suffix)}\.partial")
        with suppress(OSError):
            delete_files(self.folder, ours)

    def place(self, temporary: Sequence[Path], paths: Sequence[Path]) -> None:
        """Rename finished files, and remove old files with the numbers that follow.

        A pattern that means the new files would match the old ones, too.
        """
        self._marker.touch()
        flush_to_disk(self.folder)
        placed: list[Path] = []
        try:
            for old in reversed(self._following(len(paths))):
                old.unlink()
            for file, path in zip(temporary, paths, strict=True):
                file.replace(path)
                placed.append(path)
            flush_to_disk(self.folder)
        except OSError:
            for path in placed:
                path.unlink()
            self._marker.unlink()
            raise
        self._marker.unlink()

    def _following(self, first: int) -> list[Path]:
        """Return the existing files with the numbers from `first` on, without a gap."""
        paths: list[Path] = []
        for number in count(first):
            path = self._path(number)
            if not path.is_file():
                break
            paths.append(path)
        return paths

    def _path(self, number: int) -> Path:
        return self.folder / f"{self._stem}-{number:0{_DIGITS}d}{self._suffix}"


@dataclass(frozen=True)
class TokenSlice:
    """Tokens of one rank in one of the files.

    Attributes:
        part: The rank's temporary file.
        begin: First token of the slice in `part`.
        tokens: Number of tokens.
        ends: Position after the last token of each document, counted from `begin`.
    """

    part: TokenPart
    begin: int
    tokens: int
    ends: array[int]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a stored token."""
        return self.part.dtype

    def read(self, start: int, number: int) -> npt.NDArray[Any]:
        """Return `number` tokens of the slice from `start` on."""
        return self.part.read(self.begin + start, number)


def slices_of(world: World, part: TokenPart, most: int) -> list[TokenSlice]:
    """Return this rank's slices of all files. Collective.

    A file has as many complete documents as fit into `most` bytes of tokens, or one document that is larger.
    """
    counts: list[int] = world.everyone.all_gather_object(part.tokens)
    start, total = sum(counts[: world.rank]), sum(counts)
    ends = np.array(part.ends, np.int64) + start
    tokens = max(1, most // part.dtype.itemsize)
    cut, slices = 0, list[TokenSlice]()
    while cut < total or not slices:
        first, last = np.searchsorted(ends, [cut, cut + tokens], "right").tolist()
        fitting = int(ends[last - 1]) if last > first else 0
        following = int(ends[first]) if first < len(ends) else total
        cuts = world.everyone.all_gather_object([fitting, following])
        end = max(each for each, _ in cuts) or min(each for _, each in cuts)
        last = int(np.searchsorted(ends, end, "right"))
        begin, stop = (min(max(at - start, 0), part.tokens) for at in (cut, end))
        here = array("q", (ends[first:last] - start - begin).tobytes())
        slices.append(TokenSlice(part, begin, stop - begin, here))
        cut = end
    return slices
