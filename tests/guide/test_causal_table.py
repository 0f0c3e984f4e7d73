"""The page about models of `transformers` that are not built in has the results of their tests."""

from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.causal_model import causal_model_keys
from tests.causal_models import CHECKS, REFUSED, TRIED_ONCE, is_built_in, results
from tests.causal_table import COLUMNS, PAGE, page


def test_the_page_has_the_results() -> None:
    written, expected = PAGE.read_text(encoding="utf-8").splitlines(), page().splitlines()
    # Types that have become built in since then may still be there.
    kept = [line for line in written if line in expected or not line.startswith("| `")]
    assert kept == expected, "run python -m tests.causal_table"
    assert set(COLUMNS) == set(CHECKS)


def test_every_type_of_causal_language_models_is_built_in_or_in_the_page() -> None:
    names = pytest.importorskip("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {*results(), *REFUSED, *TRIED_ONCE}
    missing = [kind for kind, name in names.items() if kind not in known and not is_built_in(str(name))]
    assert not missing, f"run mpirun -n 2 python -m tests.causal_models all {' '.join(missing)}"
    assert not results().keys() & {*REFUSED, *TRIED_ONCE}


@pytest.mark.parametrize("kind", REFUSED)
def test_types_are_refused_for_the_reason_in_the_page(kind: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(HpctrainError, match=REFUSED[kind]):
        causal_model_keys({"model_type": kind}, "config.json")


def test_enough_types_of_models_work() -> None:
    complete = [
        kind
        for kind, works in results().items()
        if {works[column] for column in ("zero", "export", "generate")} == {"yes"}
    ]
    assert len(complete) >= 25
    assert sum(works["tensor"] == "yes" for works in results().values()) >= 25
