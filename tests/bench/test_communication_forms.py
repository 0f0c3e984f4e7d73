"""The benchmark of forms of communication, on what they train, its table.

Tests of plan/form_alternatives.py too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.communication_forms import FormResult, bench_communication, rows
from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.form_alternatives import other_forms
from hpctrain.plan.traffic_plan import plan_traffic
from tests.bench.prepared import prepared
from tests.engines import DECK, small_deck

STEPS = 3


@pytest.mark.mpi(min_size=2, max_size=2)
def test_forms_train_on_the_same_tokens(world: World, mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path
    path, tokens = prepared(world, folder)
    keys = [
        tokens,
        "data.validation=0.1",
        f"run.steps={STEPS}",
        "model.vocabulary=257",
    ]
    figures = folder / "figures.json"
    only, again = ["exact", "sign"], "communication.compress=none"
    bench_communication(world, path, keys, only, [again], figures)
    world.everyone.barrier()
    told = {row["name"]: row for row in json.loads(figures.read_text())}
    assert list(told) == ["exact", "sign", again]
    assert told["exact"]["validation"] == told[again]["validation"] != told["sign"]["validation"]
    planned = plan_traffic(parse_deck(DECK, keys), 2, 257).largest.payload()
    assert told["exact"]["payload"] == sum(planned.values())
    with pytest.raises(HpctrainError, match="--only signs: must be exact, "):
        bench_communication(world, path, keys, ["signs"], [], None)
    with pytest.raises(HpctrainError, match=r"data.validation=0: must be above 0"):
        bench_communication(world, path, [*keys, "data.validation=0"], [], [], None)


def test_every_form_is_a_deck() -> None:
    deck = small_deck("communication.compress=sign", "communication.sign.error_feedback=false")
    forms = dict(other_forms(deck, 2))
    assert list(forms)[:2] == ["exact", "bf16"]
    made = {name: small_deck(*changes) for name, changes in forms.items()}
    assert made["exact"] == small_deck()
    assert made["sign"] == deck
    assert made["int8"].value("communication.int8.error_feedback")
    assert all(made[name].communication.compress == name for name in ("bf16", "int8", "onebit", "topk"))


def test_differences_are_to_the_first_form() -> None:
    figures = [
        FormResult("exact", (), 2e6, 2.0, 1000.0),
        FormResult("sign", ("communication.compress=sign",), 5e4, 2.03, 900.0),
    ]
    assert rows(figures)[1:] == [
        ["exact", "2 MB", "100%", "2.0000", "", "1K"],
        ["sign", "50 kB", "2.5%", "2.0300", "+1.50%", "900"],
    ]
