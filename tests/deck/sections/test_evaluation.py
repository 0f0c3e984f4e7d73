"""[[evaluation]] in decks and arguments, and what is wrong with it: where, and in one sentence each.

Tests of deck/rows.py and deck/sections/evaluation.py.
"""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.reference import reference_text
from hpctrain.deck.rows import row_message
from hpctrain.deck.sections.evaluation import EvaluationSet
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from tests.deck.small_text import SMALL

BOOKS = '[[evaluation]]\nname = "books"\ntokens = "b.h5"\n'
CODE = '[[evaluation]]\nname = "code"\ntokens = "c.h5"\nsequences = 3\n'
LINE = SMALL.count("\n") + 1
STEADY = ("run.evaluate_every=5",)


def problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(HpctrainError) as caught:
        parse_deck(text, overrides)
    return caught.value.problems


def test_tables_in_a_row_are_the_sets_of_a_deck() -> None:
    deck = parse_deck(SMALL + BOOKS + CODE)
    books, code = (
        EvaluationSet(name="books", tokens="b.h5"),
        EvaluationSet(name="code", tokens="c.h5", sequences=3),
    )
    assert deck.evaluation.sets == (books, code)
    assert parse_deck(deck_text(deck)) == deck
    assert hash(parse_deck(deck_text(deck))) == hash(deck)
    argument = 'evaluation=[{name = "code", tokens = "c.h5", sequences = 3}]'
    assert parse_deck(SMALL + BOOKS, [argument]).evaluation.sets == (code,)
    assert parse_deck(SMALL + BOOKS + CODE, ["evaluation="]).evaluation.sets == ()
    assert row_message(deck, "evaluation.sets", 1, "tokens", "is short") == (
        f'deck.toml:{LINE + 5}: evaluation.tokens = "c.h5": is short'
    )


def test_what_is_wrong_with_a_table_is_told_at_its_line() -> None:
    wrong = '[[evaluation]]\nname = "books"\n[[evaluation]]\nnam = "y"\ntokens = 3\nsequences = 0\n'
    assert problems(SMALL + wrong) == (
        f"deck.toml:{LINE}: evaluation.tokens is missing in table 1: text in quotes that is not empty",
        f"deck.toml:{LINE + 2}: evaluation.name is missing in table 2: text in quotes that is not empty",
        f'deck.toml:{LINE + 3}: evaluation.nam = "y": unknown key (did you mean name?)',
        f"deck.toml:{LINE + 4}: evaluation.tokens = 3: must be text in quotes that is not empty, not "
        "a number",
        f"deck.toml:{LINE + 5}: evaluation.sequences = 0: must be a whole number of at least 1",
    )
    [told] = problems(SMALL + "[evaluation]\nsets = [1]\n")
    assert (
        told
        == f"deck.toml:{LINE + 1}: evaluation.sets = [1]: must be a list of tables, such as [[evaluation]]"
    )


@pytest.mark.parametrize(
    ("text", "overrides", "told"),
    [
        (
            BOOKS + BOOKS,
            (),
            f'deck.toml:{LINE + 4}: evaluation.name = "books": is the name of 2 sets',
        ),
        (BOOKS.replace("books", "validation"), (), "is the name of the part that data.validation holds out"),
        (
            BOOKS.replace("books", "a/b"),
            (),
            f'deck.toml:{LINE + 1}: evaluation.name = "a/b": must have 1 to 64 characters',
        ),
        (
            BOOKS.replace("b.h5", "b\\u0007"),
            (),
            f'deck.toml:{LINE + 2}: evaluation.tokens = "b\\u0007": has a control character',
        ),
        (
            "",
            ("checkpoint.keep_best=validation", "data.validation=0"),
            "requires an evaluation set (add data.validation",
        ),
        (
            "",
            ("run.patience=2", "data.validation=0"),
            "requires an evaluation set (add data.validation = 0.01 or tables [[evaluation]]",
        ),
        (
            "",
            ("checkpoint.keep_best=validation",),
            "compares evaluations, but the only one is at the end",
        ),
        ("", ("run.patience=2",), "compares evaluations, but the only one is at the end"),
        (BOOKS, ("checkpoint.keep_best=bokks", *STEADY), '(did you mean "books"?)'),
        (BOOKS, ("checkpoint.keep_best=xyz", *STEADY), 'an evaluation set (use "validation" or "books")'),
        (
            "",
            ("run.evaluate_every=5", "data.validation=0"),
            "data.validation = 0.01, add tables [[evaluation]], or leave this key out",
        ),
    ],
)
def test_what_does_not_fit_together(text: str, overrides: tuple[str, ...], told: str) -> None:
    [problem] = problems(SMALL + text, *overrides)
    assert told in problem


def test_what_fits() -> None:
    parse_deck(SMALL + BOOKS, ["data.validation=0", "run.patience=2", *STEADY])
    parse_deck(SMALL + BOOKS, ["checkpoint.keep_best=books", *STEADY])
    parse_deck(SMALL, ["checkpoint.keep_best=validation", "run.patience=1", *STEADY])


def test_the_reference_has_the_keys_of_each_table() -> None:
    text = reference_text("evaluation")
    assert "Keys of each [[evaluation]], a table of evaluation.sets:" in text
    for name, field in EvaluationSet.model_fields.items():
        assert f"\n  {name} " in text
        assert len(field.description or "") <= 110
