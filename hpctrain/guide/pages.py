"""Pages of the user guide: their order, their text, search, and the folder from which a site is built.

A page is a Markdown file in the folder of its section, such as `tasks/prepare-data.md`; some pages of the
reference are generated, wholly or in part (`hpctrain.guide.generated`). HTML comments in a page tell the
tests how its commands run (`tests/guide/commands.py`) and are not shown.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.text import either, nearest

FOLDER = Path(__file__).parent

SECTIONS: Mapping[str, tuple[str, Sequence[str]]] = {
    "start": ("Start", ("laptop", "cluster", "gpus")),
    "tasks": (
        "Tasks",
        (
            "prepare-data",
            "write-a-deck",
            "optimizer",
            "choose-a-layout",
            "submit-and-resume",
            "slow-runs",
            "loss-spikes",
            "hugging-face",
            "generate",
            "fine-tune",
            "own-module",
            "mixtures-of-experts",
            "long-context",
            "eight-bits",
            "slow-networks",
            "compare",
            "from-other-tools",
        ),
    ),
    "reference": (
        "Reference",
        ("deck-keys", "verbs", "exit-codes", "run-folder", "other-models", "file-formats", "python-api"),
    ),
    "explanations": ("Explanations", ("layouts", "memory", "checkpoints", "determinism", "limits")),
    "contribute": ("Contribute", ("architecture", "glossary", "extend", "tests")),
}
"""Title and names of pages of each section, by the name of its folder, in reading order."""

_ELSEWHERE = {
    "architecture": "../README.md",
    "glossary": "../GLOSSARY.md",
    "file-formats": "../checkpoint/FORMAT.md",
}
"""Files of pages that are kept beside the code that they describe, relative to `FOLDER`."""

_COMMENT = re.compile(r"^<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class GuidePage:
    """One page of the guide.

    Attributes:
        section: Key of `SECTIONS`.
        name: Name by which `hpctrain guide NAME` shows the page.
        title: Title of the page.
        path: Path of the file relative to `FOLDER`, to which links in the text are relative.
        body: Function that returns the text below the title.
    """

    section: str
    name: str
    title: str
    path: str
    body: Callable[[], str]

    @cached_property
    def text(self) -> str:
        """Markdown text with the title as its first line, without comments."""
        return f"# {self.title}\n\n{self.body()}"

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        """Headings of the page, each with the text up to the next heading."""
        heading, lines, in_code = self.title, list[str](), False
        for line in self.text.splitlines()[1:]:
            in_code ^= line.startswith("```")
            if line.startswith("#") and not in_code:
                yield heading, "\n".join(lines).strip()
                heading, lines = line.lstrip("# "), []
            else:
                lines.append(line)
        yield heading, "\n".join(lines).strip()


@dataclass(frozen=True)
class SearchHit:
    """A part of a page that contains all words of a search, with its first line that contains one of them."""

    page: GuidePage
    heading: str
    line: str


class Guide:
    """The user guide: its pages in the order of `SECTIONS`.

    Args:
        generated: Titles of the pages that have no file, and functions that return the text below the title,
            by name of the page.
    """

    def __init__(self, generated: Mapping[str, tuple[str, Callable[[], str]]]) -> None:
        self._generated = generated

    def __iter__(self) -> Iterator[GuidePage]:
        """Yield all pages. The text of a generated page is made when it is first used."""
        for section, (_, names) in SECTIONS.items():
            for name in names:
                yield self._read(section, name)

    def page(self, name: str) -> GuidePage:
        """Return the page of a name.

        Raises:
            HpctrainError: There is no such page. The message has the nearest name, or pages that mention it.
        """
        sections = {each: section for section, (_, names) in SECTIONS.items() for each in names}
        if name in sections:
            return self._read(sections[name], name)
        if near := nearest(name, sections):
            hint = f'did you mean "{near}"?'
        elif mentions := list(dict.fromkeys(hit.page.name for hit in self.search([name]))):
            hint = f"pages that mention it: {either(mentions[:4])}"
        else:
            hint = "`hpctrain guide` lists all pages"
        raise HpctrainError(f"guide {name}: no such page ({hint})")

    def search(self, words: Sequence[str]) -> Iterator[SearchHit]:
        """Yield each part of a page, below one heading, that contains all the words, in the order of pages.

        Case is ignored. A word also matches as part of a longer one.
        """
        lowered = [word.lower() for word in words]
        for page in self:
            for heading, text in page.parts:
                if all(word in f"{heading}\n{text}".lower() for word in lowered):
                    lines = [
                        line for line in text.splitlines() if any(word in line.lower() for word in lowered)
                    ]
                    first = (lines or text.splitlines() or [heading])[0]
                    yield SearchHit(page, heading, plain_text(first).strip())

    def write(self, folder: Path) -> list[Path]:
        """Write all pages and an `index.md` into a folder, with links that lead to each other.

        Links to files that are not pages become plain text.

        Returns:
            The written files.
        """
        pages = list(self)
        places = {os.path.normpath(page.path): f"{page.section}/{page.name}.md" for page in pages}
        written = []
        for page in pages:
            file = folder / page.section / f"{page.name}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_with_links(page, places), encoding="utf-8")
            written.append(file)
        index = folder / "index.md"
        lines = ["# hpctrain"]
        for section, (title, _) in SECTIONS.items():
            lines += ["", f"## {title}", ""]
            lines += [
                f"- [{page.title}]({section}/{page.name}.md)" for page in pages if page.section == section
            ]
        index.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return [index, *written]

    def _read(self, section: str, name: str) -> GuidePage:
        path = _ELSEWHERE.get(name, f"{section}/{name}.md")
        if name in self._generated:
            title, body = self._generated[name]
            return GuidePage(section, name, title, path, body)
        text = _COMMENT.sub("", (FOLDER / path).read_text(encoding="utf-8"))
        title, _, rest = text.partition("\n")
        return GuidePage(section, name, title.lstrip("# "), path, rest.lstrip("\n").__str__)


def plain_text(text: str) -> str:
    """Return Markdown without the targets of links: "[Memory](../memory.md)" becomes "Memory"."""
    return _LINK.sub(r"\1", text)


def terminal_text(page: GuidePage) -> str:
    """Return the text of a page for a terminal, in which links to pages become the names of these."""
    names = {each for _, pages in SECTIONS.values() for each in pages}

    def named(match: re.Match[str]) -> str:
        name = Path(match[2]).stem
        if "://" in match[2]:
            return match[0]
        return f"{match[1]} (`hpctrain guide {name}`)" if name in names else match[1]

    return _LINK.sub(named, page.text)


def _with_links(page: GuidePage, places: Mapping[str, str]) -> str:
    """Return the text of a page with links to other pages that are valid in the folder of `Guide.write`."""

    def relinked(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        place = places.get(os.path.normpath(Path(page.path).parent / target))
        return text if place is None else f"[{text}]({os.path.relpath(place, page.section)}{anchor})"

    return _LINK.sub(relinked, page.text)
