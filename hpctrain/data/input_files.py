"""Input files that a user's paths mean, and those that are left out, with the reason."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

from hpctrain.comm.error_messages import raise_together
from hpctrain.data.packed import COMPRESSED, TABLE, DamagedError, open_packed, plain_name
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import parse_json
from hpctrain.text import counted

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
"""Endings of files with one JSON value per line."""
JSON = ".json"
"""Ending of files with a JSON list, JSON lines or one JSON value: `json_form` tells which."""

_PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp")
TEXT_ENDINGS = (*_PLAIN_TEXT, *JSON_LINES, TABLE)
ROW_ENDINGS = (*JSON_LINES, JSON, TABLE)
"""Endings, in any case, of the files that are taken from folders: for text, and for rows of conversations."""
_HEAD_BYTES = 1 << 20
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
EXAMPLES = 2

NAME, HIDDEN, IRREGULAR, EMPTY, BINARY, NOT_UTF8 = range(6)
"""Why a file is left out."""

_WORDS = {
    NAME: ("by name", "--glob selects others"),
    HIDDEN: ("as hidden", ""),
    IRREGULAR: ("as not regular", ""),
    EMPTY: ("as empty", ""),
    BINARY: ("as binary", "--binary reads them"),
    NOT_UTF8: ("as not UTF-8", "--binary reads them"),
}


JsonForm = Literal["", "list", "lines"]


def json_form(path: str) -> JsonForm:
    """Return how a file holds JSON rows, by its ending and its beginning.

    Returns:
        "list" for a JSON list, "lines" for one JSON value per line, "" for any other file: text, or a
        single JSON value over several lines. A file that cannot be decompressed is "" too; reading it tells
        why.
    """
    name = plain_name(path)
    if not name.endswith((*JSON_LINES, JSON)):
        return ""
    try:
        with open_packed(path) if path.lower().endswith(COMPRESSED) else Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedError, HpctrainError):
        return ""
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").lstrip()
    first, _, rest = text.partition("\n")
    try:
        parse_json(first)
        complete = True
    except ValueError:
        complete = False
    if text.startswith("["):
        return "lines" if complete and rest.strip() else "list"
    return "lines" if name.endswith(JSON_LINES) or (complete and text.startswith("{")) else ""


@dataclass(frozen=True)
class TextSource:
    """One input file.

    Attributes:
        path: Path of the file.
        size: Length on the disk in bytes.
        named: True if the user named it; False if it was found in a folder.
        raw: True if all bytes are read, also those that are not text.
        lenient: True if bytes and escapes in JSON that are not UTF-8 are read as U+FFFD.
        json: Form of JSON rows in the file: see `json_form`.
    """

    path: str
    size: int
    named: bool = False
    raw: bool = False
    lenient: bool = False
    json: JsonForm = ""

    @property
    def compressed(self) -> bool:
        """True if it is compressed by gzip or Zstandard, judged by its name."""
        return self.path.lower().endswith(COMPRESSED)

    @property
    def table(self) -> bool:
        """True if it is a Parquet table, of which every row of a column is a document."""
        return self.path.lower().endswith(TABLE)

    @property
    def is_list(self) -> bool:
        """True if it is a JSON list, of which every entry is a document."""
        return self.json == "list"

    @property
    def lines(self) -> bool:
        """True if every line is a document, as JSON."""
        return not self.is_list and (self.json == "lines" or plain_name(self.path).endswith(JSON_LINES))

    @property
    def is_one_piece(self) -> bool:
        """True if the file cannot be cut at places that are known before it is read."""
        return self.compressed or self.table or self.is_list

    def open(self) -> BufferedIOBase:
        """Open the file for reading its bytes, decompressed."""
        return open_packed(self.path) if self.compressed else Path(self.path).open("rb")


@dataclass
class SkippedInput:
    """Files, patterns and paths that a user named and that have no effect.

    Attributes:
        files: Files that are left out, with the reason, in the order of the search.
        unmatched_globs: Patterns that no file matches.
        repeated_paths: Paths that were named more than once.
    """

    files: dict[str, int] = field(default_factory=dict)
    unmatched_globs: list[str] = field(default_factory=list)
    repeated_paths: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return messages for the user: a line for each reason with the first files."""
        lines = [f"{printable(path)}: is given more than once, but read once" for path in self.repeated_paths]
        for reason in sorted(set(self.files.values())):
            files = [printable(file) for file, why in self.files.items() if why == reason]
            words, hint = _WORDS[reason]
            count = counted(len(files), "file")
            examples = ", ".join(files[:EXAMPLES]) + (" ..." if len(files) > EXAMPLES else "")
            lines.append(f"left out {words}: {count} ({examples}){f'; {hint}' if hint else ''}")
        return [
            *lines,
            *(f"--glob {printable(pattern)}: no file matches" for pattern in self.unmatched_globs),
        ]


def find_sources(
    paths: Sequence[str],
    globs: Sequence[str],
    without: Sequence[Path] = (),
    endings: Sequence[str] = TEXT_ENDINGS,
) -> tuple[list[TextSource], SkippedInput]:
    """Return the files that `paths` mean, in the order given, those of a folder sorted by name, each once.

    Files that are empty or irregular are left out, and so are hidden ones of folders.

    Args:
        paths: Files, which are taken whatever their name, and folders, which are searched in depth.
        globs: Patterns of the files of folders (see `matches_glob`). If empty, `endings` choose.
        without: Output files, which are never taken.
        endings: Endings of the files of folders, in any case, with or without compression.

    Raises:
        HpctrainError: A path gives no file; the error names every such path.
    """
    if any(not pattern.strip("/") for pattern in globs):
        raise HpctrainError("--glob: the pattern is empty; give one such as '*.txt'")
    problems: list[HpctrainError] = []
    sources: dict[str, TextSource] = {}
    skipped: dict[str, tuple[str, int]] = {}
    avoided = {os.path.realpath(path) for path in without}
    named = Counter(os.path.realpath(path) for path in paths)
    matched: set[str] = set()
    for path in paths:
        folder = Path(path)
        try:
            if folder.exists() and not folder.is_dir() and not folder.is_file():
                problems.append(HpctrainError(f"{path}: is not a regular file"))
                continue
            if os.path.realpath(folder) in avoided and folder.exists():
                problems.append(
                    HpctrainError(f"{path}: is OUT, the file to write (give another name for OUT)")
                )
                continue
            walked = _walk(folder, globs, endings, matched) if folder.is_dir() else _named(folder)
            for file, reason in walked:
                real = os.path.realpath(file)
                if real in avoided:
                    continue
                if reason is None:
                    form = json_form(str(file))
                    source = TextSource(str(file), file.stat().st_size, named=real in named, json=form)
                    sources.setdefault(real, source)
                else:
                    skipped.setdefault(real, (str(file), reason))
            if folder.is_dir() and all(reason in {NAME, HIDDEN, IRREGULAR} for _, reason in walked):
                patterns = ", ".join(globs) if globs else "*" + ", *".join(endings)
                sentence = f"{path}: no file in this folder matches {patterns}; see --glob"
                problems.append(HpctrainError(sentence))
        except FileNotFoundError:
            problems.append(InputOutputError(f"{path}: no such file or folder"))
        except OSError as error:
            problems.append(InputOutputError(f"{error.filename}: cannot be read ({error.strerror})"))
    raise_together(problems)
    unmatched = [pattern for pattern in globs if pattern not in matched]
    skipped_files = {file: reason for real, (file, reason) in skipped.items() if real not in sources}
    names = {os.path.realpath(path): path for path in reversed(paths)}
    return list(sources.values()), SkippedInput(
        skipped_files,
        unmatched if any(Path(path).is_dir() for path in paths) else [],
        [names[real] for real, times in named.items() if times > 1],
    )


def printable(text: str) -> str:
    """Return a name in which unprintable characters are replaced by question marks."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _named(file: Path) -> list[tuple[Path, int | None]]:
    return [(file, None if file.stat().st_size else EMPTY)]


def _walk(
    folder: Path, globs: Sequence[str], endings: Sequence[str], matched: set[str]
) -> list[tuple[Path, int | None]]:
    """Return every file of a folder, sorted by its path, with the reason why it is left out, or None.

    Hidden folders are not entered, and count as one file. Patterns that match any file are added to
    `matched`.
    """

    def stop(error: OSError) -> None:
        raise error

    files: list[tuple[Path, int | None]] = []
    for root, folders, names in os.walk(folder, onerror=stop):
        files += [(Path(root, name), HIDDEN) for name in (*folders, *names) if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(root, name) for name in names if not name.startswith(".")):
            below = file.relative_to(folder).as_posix()
            if globs:
                patterns = [pattern for pattern in globs if matches_glob(below, pattern)]
            else:
                patterns = [ending for ending in endings if plain_name(below).endswith(ending)]
            matched.update(patterns)
            files.append((file, _reason(file) if patterns else NAME))
    return sorted(files, key=lambda each: each[0].parts)


def _reason(file: Path) -> int | None:
    """Return why a selected file is left out, or None."""
    if not file.is_file():
        return IRREGULAR
    return None if file.stat().st_size else EMPTY


def matches_glob(path: str, pattern: str) -> bool:
    """Return True if a path below a folder matches a pattern as in a shell with `globstar`.

    A pattern matches from the right, so "*.txt" means files of any subfolder; with a slash at its beginning
    it matches the whole path. "**" stands for any number of folders, "{a,b}" for either text.
    """
    braces = _BRACES.search(pattern)
    if braces:
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        return any(matches_glob(path, f"{before}{each}{after}") for each in braces[1].split(","))
    parts = [part for part in pattern.split("/") if part not in {"", "."}]
    return _match_parts(path.split("/"), parts if pattern.startswith("/") else ["**", *parts])


def _match_parts(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the folders and the name of a path match those of a pattern."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match_parts(path[skipped:], pattern[1:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match_parts(path[1:], pattern[1:])
