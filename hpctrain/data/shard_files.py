"""A corpus as several token files, cut at ends of documents: OUT-00000.h5, OUT-00001.h5 and so on.

All of them get their names at the end, one after another; a note beside them says so meanwhile, by which a
process that goes on where one was killed knows that they are its own.
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
    """The names of the files that stand for `out`, and the files of these names that are there."""

    def __init__(self, out: Path) -> None:
        self.folder, self._stem, self._suffix = out.parent, out.stem, out.suffix
        self.pattern = out.with_name(f"{out.stem}-*{out.suffix}")
        self._note = out.with_name(f".{out.name}.naming")

    def paths(self, number: int) -> list[Path]:
        """The first ones; HpctrainError where there cannot be so many."""
        if number > _MOST:
            raise HpctrainError(
                f"{self.pattern}: requires {number} files, more than the limit of {_MOST}; make them larger"
            )
        return [self._path(each) for each in range(number)]

    def check(self, replace: bool) -> None:
        """HpctrainError where such files are there that may not be replaced, or their names are none."""
        check_output(self._path(0), replace=True)
        if not self._note.exists():
            for path in self.present():
                check_output(path, replace)

    def present(self) -> list[Path]:
        """Those that are there, sorted."""
        names = re.compile(rf"{re.escape(self._stem)}-[0-9]{{{_DIGITS}}}{re.escape(self._suffix)}")
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in paths if names.fullmatch(path.name))

    def remove_left(self) -> None:
        """Remove what killed processes have left that has no name yet."""
        ours = files_named(rf"\.{re.escape(self._stem)}-[0-9]{{{_DIGITS}}}{re.escape(self._suffix)}\.partial")
        with suppress(OSError):
            delete_files(self.folder, ours)

    def place(self, temporary: Sequence[Path], paths: Sequence[Path]) -> None:
        """Give files their names, and remove those of higher numbers that go on from there: a pattern would
        read them, too.
        """
        self._note.touch()
        flush_to_disk(self.folder)
        placed: list[Path] = []
        try:
            for old in reversed(self._following(len(paths))):
                old.unlink()
            for made, path in zip(temporary, paths, strict=True):
                made.replace(path)
                placed.append(path)
            flush_to_disk(self.folder)
        except OSError:
            for path in placed:
                path.unlink()
            self._note.unlink()
            raise
        self._note.unlink()

    def _following(self, first: int) -> list[Path]:
        """Those that are there of this number and the next ones, without a gap."""
        found: list[Path] = []
        for number in count(first):
            path = self._path(number)
            if not path.is_file():
                break
            found.append(path)
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"{self._stem}-{number:0{_DIGITS}d}{self._suffix}"


@dataclass(frozen=True)
class TokenSlice:
    """A rank's share of one of the files: `tokens` of its part from `begin` on, `ends` counted from there."""

    part: TokenPart
    begin: int
    tokens: int
    ends: array[int]

    @property
    def dtype(self) -> np.dtype[Any]:
        """How a token is stored."""
        return self.part.dtype

    def read(self, start: int, number: int) -> npt.NDArray[Any]:
        """Return `number` tokens of the slice from `start` on."""
        return self.part.read(self.begin + start, number)


def slices_of(world: World, part: TokenPart, most: int) -> list[TokenSlice]:
    """This rank's slices of all files, each of as many whole documents as have `most` bytes of tokens
    together, or of one that has more. Collective.
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
        found = world.everyone.all_gather_object([fitting, following])
        end = max(each for each, _ in found) or min(each for _, each in found)
        last = int(np.searchsorted(ends, end, "right"))
        begin, stop = (min(max(at - start, 0), part.tokens) for at in (cut, end))
        here = array("q", (ends[first:last] - start - begin).tobytes())
        slices.append(TokenSlice(part, begin, stop - begin, here))
        cut = end
    return slices
