"""The section [[evaluation]]: evaluation sets apart from the training data.

A deck file has a table `[[evaluation]]` for each set; `Deck` holds all of them in the key `evaluation.sets`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpctrain.deck.key import PathText, Section, key

VALIDATION = "validation"
"""Name of the set that is the held-out part of the training data."""


class EvaluationSet(Section):
    """One evaluation set: a table [[evaluation]]."""

    name: str = key(
        'Name in log, metrics and checkpoint.keep_best, of letters, digits, ".", "_" and "-".',
        min_length=1,
    )
    tokens: PathText = key(
        "Token file of `hpctrain prepare`, with the same tokenizer as data.tokens.", min_length=1
    )
    sequences: int | None = key(
        "Highest number of sequences of one evaluation, which are the first ones of the file.",
        None,
        unit="sequences",
        derived="run.evaluate_sequences",
        ge=1,
    )


class EvaluationSection(Section):
    """Evaluation sets apart from the training data, each a table [[evaluation]]: name, tokens, sequences."""

    sets: Annotated[tuple[EvaluationSet, ...], Field(strict=False)] = key(
        "All evaluation sets, evaluated together with the held-out part (run.evaluate_every) and at the end.",
        (),
    )
