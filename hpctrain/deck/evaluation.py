"""The section [[evaluation]]: sets of text of their own, on which a run is evaluated.

In a deck each set is a table in a row of its own, `[[evaluation]]`; the deck has all of them in one key.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.deck.key import PathText, Section, key

VALIDATION = "validation"
"""What the held-out share of what is trained on is called among the sets."""


class EvaluationSet(Section):
    """One of the tables."""

    name: str = key(
        'What it is called in log, metrics and checkpoint.keep_best: letters, digits, ".", "_" and "-".',
        min_length=1,
    )
    tokens: PathText = key(
        "Token file made by `hpctrain prepare`, of the tokenizer of data.tokens.", min_length=1
    )
    sequences: int | None = key(
        "Sequences of one evaluation, at most: the first ones of the file.",
        None,
        unit="sequences",
        derived="run.evaluate_sequences",
        ge=1,
    )


class EvaluationSection(Section):
    """Text of its own that a run is evaluated on, in tables [[evaluation]]: name, tokens, sequences."""

    sets: Annotated[tuple[EvaluationSet, ...], Field(strict=False)] = key(
        "All of these tables, evaluated when the held-out share is (run.evaluate_every), and at the end.", ()
    )
