"""The page about models of `transformers` that are not built in has the results of their tests."""

from __future__ import annotations

from tests.causal_models import CHECKS, results
from tests.causal_table import COLUMNS, PAGE, page


def test_the_page_has_the_results() -> None:
    written, expected = PAGE.read_text(encoding="utf-8").splitlines(), page().splitlines()
    # Types that have become built in since then may still be there.
    kept = [line for line in written if line in expected or not line.startswith("| `")]
    assert kept == expected, "run python -m tests.causal_table"
    assert set(COLUMNS) == set(CHECKS)


def test_enough_types_of_models_work() -> None:
    complete = [
        kind
        for kind, works in results().items()
        if {works[column] for column in ("zero", "export", "generate")} == {"yes"}
    ]
    assert len(complete) >= 25
    assert sum(works["tensor"] == "yes" for works in results().values()) >= 25
