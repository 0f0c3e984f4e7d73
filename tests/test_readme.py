"""What the README shows is what is printed, and what the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = (".", "hpctrain", "jobs", "inputs", "containers", "tests")
DOCUMENTS = sorted(
    {path for folder in FOLDERS for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")}
)


GENERATED_PAGES = [ROOT / f"hpctrain/guide/reference/{name}.md" for name in ("deck-keys", "verbs")]
"""Pages of the guide that have no file, but to which others link."""


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 12_000


def test_the_architecture_page_is_short_and_has_short_sentences() -> None:
    text = (ROOT / "hpctrain/README.md").read_text(encoding="utf-8")
    assert len(text.encode()) < 10_000
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?:[-*|]|\d+\.) ?|\|", prose)
    sentences = [each for paragraph in paragraphs for each in re.split(r"(?<=[.!?])\s+", paragraph)]
    assert [each for each in sentences if "](" not in each and len(each.split()) > 30] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8"))
    targets = [(path.parent / link).resolve() for link in links if "://" not in link]
    assert [target for target in targets if target not in GENERATED_PAGES and not target.exists()] == []


def test_every_path_on_the_map_is_there() -> None:
    """Paths are written as `room/file.py`, from the folder of the map or from the project's."""
    text = (ROOT / "hpctrain/README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|toml|md))`", text))
    assert len(paths) > 60
    assert (
        sorted(path for path in paths if not any((ROOT / at / path).exists() for at in ("hpctrain", ".")))
        == []
    )
    rooms = {path.parent.name for path in (ROOT / "hpctrain").glob("*/__init__.py")}
    assert sorted(room for room in rooms if f"`{room}/`" not in text) == []


def test_errors_of_the_first_deck_are_those_that_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r'```toml title="small.toml"\n(.*?)```', README, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(found[1])
    assert read_deck("small.toml", ranks=8).run.steps == 40
    wrong = re.sub(r"(vocabulary = .*\n)", r"\1layer = 12\n", found[1]).replace("tensor = 2", "tensor = 5")
    Path("small.toml").write_text(wrong)
    with pytest.raises(HpctrainError) as caught:
        read_deck("small.toml", ranks=4)
    shown = re.findall(r"^hpctrain: error: (small\.toml:.*)$", README, re.MULTILINE)
    assert tuple(shown) == caught.value.problems
