"""Which files are meant by the paths that a user gives, and which of them are left out, and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path, PurePosixPath

from hpctrain.data.packed import COMPRESSED, TABLE, open_packed, plain_name
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.words import counted

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".jsonl", TABLE)
EXAMPLES = 2

NAME, HIDDEN, IRREGULAR, EMPTY, BINARY, NOT_UTF8 = range(6)
"""Why a file is left out."""

_WORDS = {
    NAME: ("by name", "--glob takes others"),
    HIDDEN: ("as hidden", ""),
    IRREGULAR: ("as no regular file", ""),
    EMPTY: ("as empty", ""),
    BINARY: ("as binary", "--binary takes such"),
    NOT_UTF8: ("as not UTF-8", "--binary takes such"),
}


@dataclass(frozen=True)
class TextSource:
    """One input file; `size` is its length on the disk in bytes.

    `named` by the user, not found in a folder; `raw` where its bytes are taken as they are, text or not;
    `lenient` where a text in a line of JSON that is not UTF-8 is taken, with U+FFFD for what is not.
    """

    path: str
    size: int
    named: bool = False
    raw: bool = False
    lenient: bool = False

    @property
    def compressed(self) -> bool:
        """Whether it is gzip or Zstandard, by its name."""
        return self.path.endswith(COMPRESSED)

    @property
    def table(self) -> bool:
        """Whether every row of a column is a document of its own."""
        return self.path.endswith(TABLE)

    @property
    def lines(self) -> bool:
        """Whether every line is a document of its own."""
        return plain_name(self.path).endswith(".jsonl")

    def open(self) -> BufferedIOBase:
        """The file, decompressed."""
        return open_packed(self.path) if self.compressed else Path(self.path).open("rb")


@dataclass
class LeftOut:
    """Files that are not taken, with the reason, in the order found; patterns that no file matches; and paths
    that were named more than once.
    """

    files: dict[str, int] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """In words, a line for each reason: how many files, and the first ones."""
        lines = [f"{printable(path)}: is named more than once, and read once" for path in self.again]
        for reason in sorted(set(self.files.values())):
            files = [printable(file) for file, why in self.files.items() if why == reason]
            words, hint = _WORDS[reason]
            count = counted(len(files), "file")
            shown = ", ".join(files[:EXAMPLES]) + (" ..." if len(files) > EXAMPLES else "")
            lines.append(f"left out {words}: {count} ({shown}){f'; {hint}' if hint else ''}")
        return [*lines, *(f"--glob {printable(pattern)}: no file matches" for pattern in self.idle)]


def find_sources(
    paths: Sequence[str], globs: Sequence[str], without: Sequence[Path] = ()
) -> tuple[list[TextSource], LeftOut]:
    """The files meant by `paths`, in the order given, inside folders sorted by name, each once.

    A file that is named is taken; in folders (searched in depth, hidden ones and hidden files left out)
    those are taken whose name, or path where the pattern has a slash, matches one of `globs`, by
    default those with TEXT_ENDINGS, compressed or not. `without`, the output, is never taken. Empty files
    have no document and are left out, as is what is no file. HpctrainError names every path that gives
    nothing.
    """
    if any(not pattern.strip("/") for pattern in globs):
        raise HpctrainError("--glob: the pattern is empty; give one such as '*.txt'")
    problems: list[HpctrainError] = []
    sources: dict[str, TextSource] = {}
    left: dict[str, tuple[str, int]] = {}
    avoided = {os.path.realpath(path) for path in without}
    named = Counter(os.path.realpath(path) for path in paths)
    matched: set[str] = set()
    for given in paths:
        folder = Path(given)
        try:
            if folder.exists() and not folder.is_dir() and not folder.is_file():
                problems.append(HpctrainError(f"{given}: is no regular file"))
                continue
            if os.path.realpath(folder) in avoided and folder.exists():
                problems.append(
                    HpctrainError(f"{given}: is OUT itself, which is to be made (give it another name)")
                )
                continue
            walked = _walk(folder, globs, matched) if folder.is_dir() else _named(folder)
            for file, reason in walked:
                real = os.path.realpath(file)
                if real in avoided:
                    continue
                if reason is None:
                    sources.setdefault(real, TextSource(str(file), file.stat().st_size, named=real in named))
                else:
                    left.setdefault(real, (str(file), reason))
            if folder.is_dir() and all(reason in {NAME, HIDDEN, IRREGULAR} for _, reason in walked):
                wanted = ", ".join(globs) if globs else "*" + ", *".join(TEXT_ENDINGS)
                sentence = f"{given}: no file in this folder matches {wanted}; see --glob"
                problems.append(HpctrainError(sentence))
        except FileNotFoundError:
            problems.append(InputOutputError(f"{given}: no such file or folder"))
        except OSError as error:
            problems.append(InputOutputError(f"{error.filename}: cannot be read ({error.strerror})"))
    raise_all(problems)
    idle = [pattern for pattern in globs if pattern not in matched]
    others = {file: reason for real, (file, reason) in left.items() if real not in sources}
    names = {os.path.realpath(path): path for path in reversed(paths)}
    return list(sources.values()), LeftOut(
        others,
        idle if any(Path(path).is_dir() for path in paths) else [],
        [names[real] for real, times in named.items() if times > 1],
    )


def raise_all(problems: Sequence[HpctrainError]) -> None:
    """Raise all problems as one error, of the graver class; nothing where there is none."""
    if problems:
        grave = any(isinstance(problem, InputOutputError) for problem in problems)
        texts = [text for problem in problems for text in problem.problems]
        raise (InputOutputError if grave else HpctrainError)(texts)


def printable(text: str) -> str:
    """A name without what would act on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _named(file: Path) -> list[tuple[Path, int | None]]:
    return [(file, None if file.stat().st_size else EMPTY)]


def _walk(folder: Path, globs: Sequence[str], matched: set[str]) -> list[tuple[Path, int | None]]:
    """Every file of a folder, sorted by its path below it, with why it is left out, or None.

    Hidden folders are not entered, and count as one. Patterns that match any file become `matched`.
    """

    def stop(error: OSError) -> None:
        raise error

    files: list[tuple[Path, int | None]] = []
    for root, folders, names in os.walk(folder, onerror=stop):
        files += [(Path(root, name), HIDDEN) for name in (*folders, *names) if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(root, name) for name in names if not name.startswith(".")):
            patterns = _matching(file.relative_to(folder), globs)
            matched.update(patterns)
            files.append((file, _reason(file) if patterns else NAME))
    return sorted(files, key=lambda each: each[0].parts)


def _reason(file: Path) -> int | None:
    """Why a file that is meant cannot be taken, or None."""
    if not file.is_file():
        return IRREGULAR
    return None if file.stat().st_size else EMPTY


def _matching(below: Path, globs: Sequence[str]) -> list[str]:
    """The patterns that a file matches; of none given, the ending."""
    if not globs:
        return [end for end in TEXT_ENDINGS if plain_name(below.name).endswith(end)]
    return [pattern for pattern in globs if PurePosixPath(below.as_posix()).match(pattern)]
