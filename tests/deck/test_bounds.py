"""Tests of the bounds of decks: messages name the place in decks that exceed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.toml import MAX_DEPTH, MOST_KEYS, MOST_VALUES, is_within
from hpctrain.errors import HpctrainError, InputOutputError
from tests.deck.any_deck import RIGHT

SMALL = "\n".join(
    line
    for section, table in RIGHT.items()
    for line in (f"[{section}]", *(f"{key} = {value}" for key, value in table.items()))
)


def message(path: Path) -> str:
    """The one sentence that is said of a deck."""
    with pytest.raises(HpctrainError) as caught:
        read_deck(path)
    assert caught.value.exit_code == 2
    [sentence] = caught.value.problems
    return sentence.removeprefix(f"{path.parent}/")


@pytest.fixture
def deck(tmp_path: Path) -> Path:
    return tmp_path / "deck.toml"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("split = []", "layout.split = []: must give 1 layer or more to each of the 1 parts"),
        ("schedule = [1]", "layout.schedule = [1]: must be text in quotes that is not empty, not a list"),
        (f"split = {'[' * 5000}{']' * 5000}", f"layout.split: lists and tables more than {MAX_DEPTH} deep"),
        (f"split = {'{a=' * 5000}1{'}' * 5000}", f"layout.split: more than {MAX_DEPTH} names deep"),
        (f"zero = {'9' * 5000}", "layout.zero: must be below 2^63"),
        (f"zero = 0x{'f' * 5000}", "layout.zero: must be below 2^63"),
        (f"split = [1, {2**63}]", f"layout.split = [1, {2**63}]: must be below 2^63"),
        (f"split = [{'1, ' * 30_000}]", f"layout.split: more than {MOST_VALUES} values in one deck"),
        (f"schedule = '{'x' * 5000}'", "layout.schedule: text of 5000 characters, more than 4096"),
        (f"{'.'.join('a' * 3000)} = 1", f"a.a: more than {MAX_DEPTH} names deep"),
    ],
)
def test_a_bound_that_is_exceeded_is_an_error(deck: Path, line: str, sentence: str) -> None:
    text = SMALL.replace("[layout]\ntensor = 1", f"[layout]\n{line}")
    deck.write_text(text)
    number = text.splitlines().index("[layout]") + 2
    text = message(deck)
    assert text.startswith(f"deck.toml:{number}: {sentence}"), text


def test_too_many_keys_are_an_error(deck: Path) -> None:
    deck.write_text("[layout]\n" + "".join(f"k{number} = 1\n" for number in range(3000)))
    last = MOST_KEYS - 1
    assert message(deck) == f"deck.toml:{last + 2}: layout.k{last}: more than {MOST_KEYS} keys in one deck"


def test_integers_have_64_bits() -> None:
    assert all(
        map(
            is_within,
            ["0", str(2**63 - 1), str(-(2**63)), "0x7fff_ffff_ffff_ffff", "0b" + "0" * 90, "1e999"],
        )
    )
    assert not any(
        map(
            is_within,
            [str(2**63), str(-(2**63) - 1), "0x8000000000000000", "0o" + "7" * 22, "0b" + "1" * 64],
        )
    )


def test_names_that_cannot_be_included(deck: Path) -> None:
    os.mkfifo(deck.parent / "pipe")
    for name, reason in [
        ("\\u0000", "not a valid file name"),
        ("x" * 300, "file name too long"),
        ("/dev/zero", "not a regular file"),
        ("pipe", "not a regular file"),
    ]:
        deck.write_text(f'include = "{name}"\n' + SMALL)
        text = message(deck)
        assert text.startswith("deck.toml:1: include: ")
        assert text.endswith(f": cannot be read: {reason}")
        assert "\0" not in text


def test_decks_that_are_not_files(deck: Path) -> None:
    os.mkfifo(deck)
    assert message(deck) == "deck.toml: cannot be read: not a regular file"
    deck.unlink()
    deck.write_text("#" * 300_000)
    assert message(deck) == "deck.toml: cannot be read: too large: more than 262144 bytes"
    with pytest.raises(HpctrainError, match="must be UTF-8 text"):
        read_deck(deck.parent / "\udcff.toml")


def test_the_number_of_included_files_is_bounded(deck: Path) -> None:
    for number in range(19):
        name = f"{number}.toml" if number else "deck.toml"
        (deck.parent / name).write_text(f'include = ["{number + 1}.toml", "{number + 1}.toml"]\n')
    (deck.parent / "19.toml").write_text(SMALL)
    assert message(deck).endswith("include: with this the deck has more than 100 files")


@pytest.mark.parametrize("value", ["[" * 5000, "0x" + "f" * 4000, "9" * 4001, "\udcff", "x" * 5000])
def test_arguments_are_bounded_like_decks(value: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        parse_deck(SMALL, [f"data.tokens={value}"])
    [sentence] = caught.value.problems
    assert sentence.startswith("--set data.tokens=")
    assert len(sentence) < 400


def test_a_model_name_that_is_not_a_file_name(deck: Path) -> None:
    def look(path: str) -> dict[str, object]:
        Path(path).stat()
        return {}

    deck.write_text(SMALL.replace("heads = 8", f'heads = 8\nfrom = "{"x" * 300}"'))
    with pytest.raises(
        HpctrainError, match=r"deck\.toml:8: model\.from: x+\.\.\.: cannot be read: file name too"
    ):
        read_deck(deck, read_source=look)
    deck.write_text(SMALL.replace("heads = 8", 'heads = 8\nfrom = "none"'))
    with pytest.raises(InputOutputError):
        read_deck(deck, read_source=look)


def test_a_step_of_more_micro_batches_than_a_schedule_can_list() -> None:
    with pytest.raises(HpctrainError, match=r"batch\.global_size=\d+: divides into \d+ micro-batches"):
        parse_deck(SMALL, [f"batch.global_size={2**40}"], ranks=1)
