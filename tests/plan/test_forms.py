"""What a deck's communication is worth, as the verb tells it.

Tests of plan/deck_plan.py, plan/form_cost.py and plan/form_text.py too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from hpctrain.cli.plan import command
from hpctrain.comm.planned import PlannedCalls, PlannedMesh
from hpctrain.plan.form_cost import form_seconds
from hpctrain.plan.forms import exact_form
from hpctrain.plan.slow_link import linked_step
from hpctrain.plan.traffic_plan import plan_traffic
from hpctrain.units import Link
from tests.engines import DECK, small_deck

VOCABULARY = 61


@pytest.fixture
def deck(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(DECK)
    return path


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_words_tell_payload_by_axis(deck: Path) -> None:
    told = plan(deck, "--ranks", 2).stdout.splitlines()
    start = told.index(next(line for line in told if line.startswith("axis ")))
    assert told[start].split() == ["axis", "payload", "per", "rank", "and", "step"]
    assert [line.split("  ")[0] for line in told[start + 1 : start + 5]] == [
        *("data", "data x context", "world", "all axes")
    ]
    assert "payload" not in plan(deck, "--ranks", 1).stdout


def test_a_link_adds_seconds_to_a_measured_step(deck: Path) -> None:
    told = plan(deck, "--ranks", 2, "--json", "--link", "1 Mbit/s, 5 ms", "--step-seconds", "300 ms")
    over = json.loads(told.stdout)["communication"]["link"]
    link = Link(125e3, 0.005)
    expected = linked_step(plan_traffic(small_deck(), 2, VOCABULARY), link, 0.3)
    assert over["seconds"] == expected.seconds > 0.3
    assert (over["bytes_per_second"], over["latency"], over["computing_seconds"]) == (125e3, 0.005, 0.3)
    assert "exact_seconds" not in over
    words = plan(deck, "--ranks", 2, "--link", "1 Mbit/s, 5 ms", "--step-seconds", "300 ms").stdout
    assert "Over a link of 1 Mbit/s, 5 ms, a step takes " in words
    assert ", compared with 300 ms without it." in words
    emulated = plan(deck, "--ranks", 2, "--set", "communication.emulate=1 Mbit/s, 5 ms").stdout
    assert " per step (add the rest with --step-seconds or --like)." in emulated


def test_other_forms_are_planned_beside(deck: Path) -> None:
    """Exact sums take the time of this deck's step without what its form computes; others that and theirs."""
    given = (deck, "--ranks", 2, "--link", "1 Mbit/s", "--step-seconds", "2 s", "--forms")
    told = json.loads(plan(*given, "--set", "communication.compress=int8", "--json").stdout)
    forms = {each["form"]: each for each in told["forms"]}
    own, exact = told["communication"], forms["exact"]
    assert own["step"] == forms["int8"]["step"] != own["exact"] == exact["step"]
    assert "communication.compress=topk" in forms["topk"]["changes"]
    link = own["link"]
    assert link["exact_seconds"] > link["seconds"] > link["computing_seconds"] == 2.0
    assert exact["link"]["computing_seconds"] == pytest.approx(2.0 - link["cost_seconds"])
    assert (link["pays"], link["break_even_bytes_per_second"] > 125e3) == ("below", True)
    lines = plan(*given).stdout.splitlines()
    head = next(line for line in lines if line.startswith("form "))
    assert head.split("  ")[-1].strip() == "faster below"
    assert [line.split()[0] for line in lines[lines.index(head) + 1 :]][:2] == ["exact", "bf16"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--step-seconds", "1 s"), "--step-seconds and --like require --link"),
        (
            ("--link", "1 Mbit/s", "--step-seconds", "1 s", "--like", "x"),
            "--step-seconds conflicts with --like",
        ),
        (("--link", "fast"), '--link: "fast" is not a link'),
        (("--link", "1 Mbit/s", "--step-seconds", "soon"), '--step-seconds: "soon" is not a time'),
    ],
)
def test_mistakes_are_told(deck: Path, options: tuple[str, ...], sentence: str) -> None:
    result = plan(deck, "--ranks", 2, *options)
    assert sentence in str(result.exception)


def test_an_echo_gives_back_what_it_is_given() -> None:
    group = PlannedMesh(
        {"pipeline": 1, "data": 3, "context": 1, "tensor": 1}, 0, 1, calls=PlannedCalls(echo=True)
    ).group("data")
    own = torch.arange(6.0)
    assert torch.equal(group.all_gather(own), own.repeat(3))
    assert torch.equal(group.all_reduce(own.clone()), own)
    assert torch.equal(group.reduce_scatter(own), own[:2])
    assert torch.equal(group.all_to_all(own), own)


def test_exact_sums_cost_nothing_more() -> None:
    deck = small_deck()
    assert exact_form(deck) == deck
    seconds = form_seconds(deck, deck, 2, VOCABULARY, 1)
    assert seconds is not None
    assert seconds >= 0
    assert form_seconds(deck.with_keys(run={"device": "cuda"}), deck, 2, VOCABULARY, 1) is None
