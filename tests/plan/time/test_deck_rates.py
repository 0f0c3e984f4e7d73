"""The machine that a deck names: planned by as one that is given, and refused in terms of the deck.

Tests of plan/time/deck_rates.py and of what plan/deck_references.py and plan/deck_plan.py make of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.errors import EXIT_USER, HpctrainError
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.machine_rates import read_machine
from tests.plan.time.test_machine_rates import FILE

DECK = (
    '[run]\ntitle = "t"\nsteps = 10\n[model]\nfamily = "gpt2"\nlayers = 4\nhidden = 64\nheads = 4\n'
    'vocabulary = 100\n[data]\ntokens = "none.h5"\n[layout]\ntensor = 2\n[batch]\nglobal_size = 16\n'
    'sequence = 32\n[precision]\ncompute = "{compute}"\n[machine]\nrates = "{rates}"\n'
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text(FILE)
    return tmp_path


def write(folder: Path, rates: str, compute: str = "fp32") -> Path:
    path = folder / "deck.toml"
    path.write_text(DECK.format(rates=rates, compute=compute))
    return path


def test_a_deck_without_rates_names_none() -> None:
    assert deck_rates(parse_deck(DECK.format(rates="x", compute="fp32"), ["machine.rates="])) is None


@pytest.mark.parametrize(("rates", "compute"), [("selene-2021", "bf16"), ("ours.toml", "fp32")])
def test_a_deck_is_planned_by_what_it_names(here: Path, rates: str, compute: str) -> None:
    path, machine = write(here, rates, compute), read_machine(rates)
    named = plan_deck(path, 16, options=PlanOptions(with_savings=False))
    given = plan_deck(path, 16, ["machine.rates="], options=PlanOptions(with_savings=False, rates=machine))
    assert named.step is not None
    assert named.step == given.step
    assert named.total_traffic == given.total_traffic
    assert named.deck.machine.memory == given.deck.machine.memory == machine.memory * machine.ranks_per_node
    assert named.machine == machine


def test_a_machine_that_is_given_comes_before(here: Path) -> None:
    path = write(here, "gone.toml", "bf16")
    plan = plan_deck(path, 16, options=PlanOptions(with_savings=False, rates=read_machine("selene-2022")))
    assert plan.machine is not None
    assert plan.machine.name == "selene-2022"
    with pytest.raises(HpctrainError, match=r"machine\.rates = \"gone\.toml\": cannot be read"):
        plan_deck(path, 16, options=PlanOptions(with_savings=False))


@pytest.mark.parametrize(
    ("rates", "compute", "said"),
    [
        (
            "gone.toml",
            "fp32",
            "cannot be read: no such file or directory (use a file of `hpctrain calibrate`",
        ),
        ("selene-2020", "bf16", 'did you mean "selene-2021"?'),
        ("deck.toml", "fp32", "deck.toml:19: machine.name: is missing"),
        ("lacking.toml", "fp32", "lacking.toml:2: machine.memory: is missing"),
        ("ours.toml", "bf16", "machine.products.bf16 is missing"),
        (".", "fp32", "cannot be read: is a directory"),
    ],
)
def test_what_cannot_be_planned_by_is_a_problem_of_the_deck(
    here: Path, rates: str, compute: str, said: str
) -> None:
    (here / "lacking.toml").write_text(FILE.replace("memory = 1e9\n", ""))
    path = write(here, rates, compute)
    with pytest.raises(HpctrainError) as raised:
        plan_deck(path, 16, options=PlanOptions(with_savings=False))
    assert raised.value.exit_code == EXIT_USER
    at = f'{path}:20: machine.rates = "{rates}": '
    assert all(problem.startswith(at) for problem in raised.value.problems)
    assert said in "\n".join(raised.value.problems)
    deck = parse_deck(path.read_text())
    assert [each.key for each in reference_problems(deck)] == ["machine.rates"] * len(raised.value.problems)
    assert not list(reference_problems(deck, rates=False))


def test_steps_with_servers_are_not_planned() -> None:
    text = DECK.format(rates="selene-2021", compute="bf16").replace("tensor = 2", "tensor = 1")
    with pytest.raises(HpctrainError, match=r"machine\.rates = .*: has no effect with communication\.server"):
        parse_deck(text, ["communication.server.mode=sync"])
