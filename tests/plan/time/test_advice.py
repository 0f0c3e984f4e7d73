"""Advice: what limits a step and what would help, against plans of the changed decks and machines.

Tests of plan/time/advice.py and plan/time/advice_text.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.plan import command
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.time.advice import PARTS, Advice, Gain, Planners, advise, changes, estimate, faster
from hpctrain.plan.time.advice_text import LIMITS, advice_lines
from hpctrain.plan.time.machine_rates import MachineRates, parse_machine
from hpctrain.plan.time.step_plan import StepPlan, plan_step
from tests.engines import DECK, small_deck
from tests.plan.time.test_machine_rates import FILE

MACHINE = parse_machine(FILE, "")
RANKS = 4
WIDE = ("model.hidden=256", "model.layers=4", "batch.global_size=64", "batch.sequence=256")


def timed(deck: Deck, machine: MachineRates) -> StepPlan:
    return plan_step(deck, RANKS, 61, machine)


def advised(*keys: str, least: int = 0, limit: float = 1e18) -> Advice:
    """Return the advice if ZeRO level z needs `least` + 100 z bytes, and `limit` bytes are there."""

    def held(deck: Deck) -> tuple[int, bool]:
        size = least + 100 * deck.layout.zero
        return size, size <= limit

    deck = small_deck(*keys)
    planners = Planners(lambda change: small_deck(*keys, change), timed, held)
    return advise(deck, RANKS, timed(deck, MACHINE), MACHINE, planners, 7)


def fastest(*keys: str) -> list[tuple[float, str]]:
    """Steps of all changes that the deck can have, by brute force."""
    found = []
    for change in changes(small_deck(*keys)):
        try:
            found.append((timed(small_deck(*keys, change), MACHINE).seconds, change))
        except HpctrainError:
            continue
    return sorted(found)


@pytest.mark.parametrize(
    "keys",
    [
        WIDE,
        (*WIDE, "memory.recompute=full"),
        (*WIDE, "layout.pipeline=4", "layout.schedule=gpipe"),
        (*WIDE, "layout.tensor=2", "layout.zero=3"),
    ],
)
def test_the_gain_is_the_difference_of_two_plans(keys: tuple[str, ...]) -> None:
    step, advice = timed(small_deck(*keys), MACHINE), advised(*keys)
    seconds, _ = fastest(*keys)[0]
    assert advice.gain is not None
    assert advice.gain.seconds == timed(small_deck(*keys, advice.gain.change), MACHINE).seconds
    assert advice.gain.seconds == pytest.approx(seconds, rel=1e-9)
    assert advice.gain.share == pytest.approx(1 - seconds / step.seconds, rel=1e-9)
    assert advice.gain.more_bytes == 100 * small_deck(*keys, advice.gain.change).layout.zero - 7


def test_what_does_not_fit_is_no_advice() -> None:
    keys = (*WIDE, "layout.zero=3", "batch.sequence=16")
    gain = advised(*keys, limit=250).gain
    assert gain is not None and gain.fits
    others = [(seconds, change) for seconds, change in fastest(*keys) if "zero" in change]
    assert others and gain.change == others[0][1]
    assert advised(*keys, least=300, limit=250).gain is None


def test_no_change_helps_where_all_takes_the_same() -> None:
    slow = MACHINE.model_copy(update={"fixed": 1e9})
    deck = small_deck(*WIDE)
    step = timed(deck, slow)
    advice = advise(deck, RANKS, step, slow, Planners(small_deck, timed, lambda deck: (0, True)), 0)
    assert advice.gain is None
    assert advice.limits["fixed"] == pytest.approx(0.5)
    assert "No single change" in advice_lines(step, advice)[-1]


@pytest.mark.parametrize("keys", [WIDE, (*WIDE, "layout.pipeline=4"), (*WIDE, "layout.tensor=4")])
def test_limits_are_differences_of_two_plans(keys: tuple[str, ...]) -> None:
    deck = small_deck(*keys)
    step, advice = timed(deck, MACHINE), advised(*keys)
    assert set(advice.limits) == {*PARTS, "waiting"} == set(LIMITS)
    for part in PARTS:
        shorter = 1 - timed(deck, faster(MACHINE, part)).seconds / step.seconds
        assert advice.limits[part] == pytest.approx(shorter, abs=1e-9)
    assert advice.limits["waiting"] == step.seconds_by_cause["bubble"] / 2 / step.seconds
    assert list(advice.limits.values()) == sorted(advice.limits.values(), reverse=True)


def test_a_machine_with_every_part_twice_as_fast_takes_half_as_long() -> None:
    machine = MACHINE.model_copy(update={"launch": 1e-5, "fixed": 1e-3})
    deck = small_deck(*WIDE, "layout.tensor=2", "layout.zero=1")
    twice = machine
    for part in PARTS:
        twice = faster(twice, part)
    assert timed(deck, twice).seconds == pytest.approx(timed(deck, machine).seconds / 2)


@pytest.mark.parametrize(
    "keys",
    [
        ("layout.pipeline=2",),
        ("layout.pipeline=4", "layout.schedule=interleaved", "model.layers=8"),
        ("layout.pipeline=4", "layout.schedule=zb-h1"),
        ("layout.pipeline=2", "layout.zero=3"),
    ],
)
def test_an_estimate_is_the_plan_of_all_micro_batches(keys: tuple[str, ...]) -> None:
    deck = small_deck(*WIDE, *keys, "batch.micro_size=1")
    assert estimate(deck, RANKS, MACHINE, timed) == pytest.approx(timed(deck, MACHINE).seconds, rel=1e-9)


def test_an_estimate_simulates_few_micro_batches() -> None:
    seen = []

    def counted(deck: Deck, machine: MachineRates) -> StepPlan:
        seen.append(deck.batch.global_size)
        return timed(deck, machine)

    estimate(small_deck(*WIDE, "layout.pipeline=2", "batch.micro_size=1"), RANKS, MACHINE, counted)
    assert seen == [2 * 2 * 2]


def test_changes_are_those_of_layout_and_memory() -> None:
    told = set(changes(small_deck("layout.tensor=2", "layout.pipeline=2", "batch.micro_size=2")))
    assert {"layout.tensor=4", "layout.tensor=1", "layout.pipeline=1", "layout.context=2"} <= told
    assert {"batch.micro_size=1", "batch.micro_size=4", "layout.zero=3", "memory.recompute=full"} <= told
    assert {"layout.schedule=zb-h1", "layout.sequence_parallel=true"} <= told
    assert not {"layout.zero=0", "memory.recompute=none", "layout.context=0", "layout.schedule=1f1b"} & told
    chunked = set(changes(small_deck("layout.pipeline=2", "layout.schedule=interleaved", "model.layers=8")))
    assert "layout.chunks=4" in chunked and "layout.chunks=1" not in chunked


def test_the_plan_says_what_limits_and_what_would_help(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(FILE)
    (tmp_path / "deck.toml").write_text(DECK)
    arguments = [str(tmp_path / "deck.toml"), "--ranks", "4", "--machine", str(tmp_path / "machine.toml")]
    for change in WIDE:
        arguments += ["--set", change]
    text = CliRunner().invoke(command, arguments).stdout
    told = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert "the main limit is " in text
    best = told["advice"]["best"]
    assert f"Best single change: --set {best['set']} ({100 * best['faster']:.1f}% shorter" in text
    plan = plan_deck(
        tmp_path / "deck.toml",
        4,
        [*WIDE, best["set"]],
        options=PlanOptions(with_savings=False, rates=MACHINE),
    )
    assert plan.step is not None
    assert best["seconds"] == plan.step.seconds
    more = plan.memory.largest.memory.total - told["total_bytes"]
    assert best["more_bytes"] == pytest.approx(more, abs=2e7)  # libraries are measured
    assert best["fits"] is (plan.demand is not None and plan.demand.fits)


def test_words_say_what_is_known() -> None:
    step = timed(small_deck(*WIDE), MACHINE)
    for gain, words in [
        (
            Gain("layout.zero=1", 0.12, 1.0, 1_200_000_000, True),
            "(12.0% shorter, 1.2 GB more per rank, fits)",
        ),
        (Gain("layout.zero=1", 0.12, 1.0, -5_000_000, None), "(12.0% shorter, 5 MB less per rank)"),
        (Gain("layout.zero=1", 0.12, 1.0, 0, None), "(12.0% shorter)"),
    ]:
        assert advice_lines(step, Advice({"computing": 0.4}, gain))[-1].endswith(f"{words}.")
