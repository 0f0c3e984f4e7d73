"""Tests of the guide's list of pages, its search, and the folder that it writes; and of the verb `guide`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.guide import command as guide_command
from hpctrain.cli.main import command as hpctrain_command
from hpctrain.errors import HpctrainError
from hpctrain.guide.pages import FOLDER, SECTIONS, Guide, GuidePage, terminal_text
from tests.selection import ROOT

GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    name: (name, lambda: "text of it") for name in ("deck-keys", "verbs", "python-api")
}
MOST_WORDS = 30
"""Words of the longest sentence that the guide and the README may have."""


@pytest.fixture
def guide() -> Guide:
    return Guide(GENERATED)


def call(*words: str) -> Result:
    return CliRunner().invoke(hpctrain_command, ["guide", *words], standalone_mode=False)


def test_every_file_is_in_the_list(guide: Guide) -> None:
    listed = {f"{page.section}/{page.name}" for page in guide}
    assert {str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.md")} <= listed
    assert all(page.text.startswith(f"# {page.title}\n") for page in guide)


def test_names_and_titles_differ(guide: Guide) -> None:
    pages = list(guide)
    assert len({page.name for page in pages}) == len({page.title for page in pages}) == len(pages)


def sentences(text: str) -> list[str]:
    """Return the sentences of a Markdown text that are not in code, tables or lists of links."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?:[-*]|\d+\.) |\|", prose)
    return [each for paragraph in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", paragraph)]


@pytest.mark.parametrize(
    "path", [*sorted(FOLDER.glob("*/*.md")), ROOT / "README.md"], ids=lambda path: path.stem
)
def test_sentences_are_short(path: Path) -> None:
    long = [each for each in sentences(path.read_text(encoding="utf-8")) if len(each.split()) > MOST_WORDS]
    assert long == []


def test_unknown_page_is_an_error_with_a_hint(guide: Guide) -> None:
    assert guide.page("laptop").section == "start"
    with pytest.raises(
        HpctrainError, match=r'guide prepare-dta: no such page \(did you mean "prepare-data"\?'
    ):
        guide.page("prepare-dta")
    with pytest.raises(HpctrainError, match=r"guide zero: no such page \(pages that mention it: "):
        guide.page("zero")
    with pytest.raises(HpctrainError, match=r"no such page \(`hpctrain guide` lists all pages\)"):
        guide.page("xylophone")


def test_parts_are_below_headings_outside_of_code() -> None:
    text = "# Title\n\nFirst.\n\n## Second\n\n```sh\n# a comment\n```\n\nLast."
    page = GuidePage("start", "x", "Title", "start/x.md", text.partition("\n\n")[2].__str__)
    assert list(page.parts) == [("Title", "First."), ("Second", "```sh\n# a comment\n```\n\nLast.")]


def test_terminal_shows_names_of_linked_pages() -> None:
    body = "See [Memory](../explanations/memory.md), [code](../../x.py) and [torch](https://pytorch.org)."
    page = GuidePage("start", "x", "Title", "start/x.md", body.__str__)
    expected = "See Memory (`hpctrain guide memory`), code and [torch](https://pytorch.org)."
    assert terminal_text(page) == f"# Title\n\n{expected}"


def test_search_finds_parts_with_all_words(guide: Guide) -> None:
    hits = list(guide.search(["zero", "BUCKET"]))
    assert hits
    assert all("zero" in hit.line.lower() or "bucket" in hit.line.lower() for hit in hits)
    assert list(guide.search(["xylophone"])) == []


def test_written_links_lead_to_pages(guide: Guide, tmp_path: Path) -> None:
    for path in guide.write(tmp_path):
        text = path.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)\s#]+)", text)
        assert [each for each in targets if "://" not in each and not (path.parent / each).exists()] == []
        assert "<!--" not in text


def test_verb_lists_shows_and_searches() -> None:
    listed = call()
    assert listed.return_value == 0
    for title, names in SECTIONS.values():
        assert f"{title}\n" in listed.output
        assert all(f"  {name} " in listed.output for name in names)
    assert call("deck-keys").output.startswith("# Deck keys\n")
    assert (
        "optimizer.betas" in call("--search", "Adam averages").output
        or call("--search", "betas").return_value == 0
    )
    missing = call("--search", "xylophone")
    assert (missing.return_value, missing.output) == (1, 'no page of the guide contains "xylophone"\n')


def test_generated_pages_have_every_verb_and_name() -> None:
    assert re.findall(r"^## hpctrain (\w+)$", call("verbs").output, re.MULTILINE) == list(
        hpctrain_command.list_commands(None)  # type: ignore[attr-defined]
    )
    assert "## metrics\n" in call("python-api").output


def test_topic_and_search_conflict() -> None:
    assert "conflict" in str(call("laptop", "--search", "x").exception)
    assert guide_command.name == "guide"


def test_site_has_the_same_order() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (FOLDER / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [
        "index.md",
        *(f"{name}/{page}.md" for name, (_, pages) in SECTIONS.items() for page in pages),
    ]
