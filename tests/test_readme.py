"""What the README shows is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def first_deck() -> str:
    """The deck under "A first deck"."""
    found = re.search(r"## A first deck\n\n```toml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_deck_is_one(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(first_deck())
    assert read_deck(tmp_path / "first.toml", ranks=8).run.steps == 200
    longer = read_deck(tmp_path / "first.toml", ["run.steps=800", "layout.tensor=4"], ranks=4)
    assert longer.learning_rate.decay_steps == 800


def test_the_sample_of_mistakes_is_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = re.sub(r"(preset = .*\n)", r"\1layer = 12\n", first_deck()).replace("tensor = 2", "tensor = 5")
    Path("first.toml").write_text(wrong)
    with pytest.raises(HpctrainError) as caught:
        read_deck("first.toml")
    shown = re.findall(r"^hpctrain: error: (first\.toml:.*)$", README, re.MULTILINE)
    assert tuple(shown) == caught.value.problems
