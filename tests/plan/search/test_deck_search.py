"""From a deck's file to the layouts that fit, and decks that leave theirs open.

Tests of plan/memory_budget.py, plan/search/deck_search.py, plan/search/search_output.py,
plan/search/search_text.py, plan/search/layout_sentences.py and plan/search/candidate.py, and of the way there
in deck/reading/deck_input.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.plan import command
from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.errors import HpctrainError
from hpctrain.plan import memory_budget
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.search.deck_search import SearchOptions, chosen_layout, laid_out, search_deck, with_choice
from hpctrain.plan.search.layout_sentences import arguments
from hpctrain.plan.time.machine_rates import read_machine

DECK = """
layout = "auto"
[run]
title = "open"
steps = 3
device = "cpu"
[model]
family = "gpt2"
layers = 8
hidden = 1024
heads = 16
vocabulary = 50304
[data]
tokens = "none.h5"
[batch]
global_size = 64
sequence = 1024
[precision]
compute = "fp16"
[machine]
rates = "selene-2021"
"""
RANKS = 16
NARROW = ["layout.tensor=1", "layout.context=1", "memory.recompute=full", "layout.schedule=1f1b"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "open.toml"
    found.write_text(DECK)
    return found


@pytest.fixture(autouse=True)
def same_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that plans several times holds more and more by itself."""
    monkeypatch.setattr(memory_budget, "library_bytes", lambda: 300_000_000)


def plan(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def test_what_is_found_takes_as_long_and_holds_as_much_as_its_deck_by_itself(path: Path) -> None:
    found = search_deck(path, RANKS, (), SearchOptions()).result.best
    assert len(found) == 10
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    for each in (found[0], found[-1]):
        alone = plan_deck(
            path,
            RANKS,
            ["layout.auto=false", *arguments(each.changes)[1::2]],
            options=PlanOptions(with_savings=False),
        )
        assert alone.step is not None
        assert alone.step.seconds == pytest.approx(each.seconds, rel=1e-12)
        assert alone.memory.largest.memory.total == each.memory_bytes


def test_the_deck_that_is_written_has_the_quickest_layout_and_plans_alike(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    result = plan(path, "--ranks", RANKS, "--search", "--write", out, "--json")
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"][0]
    written = read_deck(out, ranks=RANKS)
    assert not written.layout.auto
    assert {key: written.value(key) for key in best["changes"]} == best["changes"]
    step = plan_deck(out, RANKS, options=PlanOptions(with_savings=False)).step
    assert step is not None and step.seconds == pytest.approx(best["seconds"], rel=1e-12)
    again = plan(path, "--ranks", RANKS, "--search", "--write", out)
    assert isinstance(again.exception, HpctrainError) and "--force" in str(again.exception)
    assert plan(path, "--ranks", RANKS, "--search", "--write", out, "--force").exit_code == 0


def test_a_plan_of_an_open_deck_is_that_of_the_quickest_layout(path: Path) -> None:
    deck = read_deck(path, ranks=RANKS)
    best, _ = chosen_layout(deck, RANKS)
    told = plan_deck(path, RANKS, options=PlanOptions(with_savings=False))
    assert told.step is not None and told.step.seconds == pytest.approx(best.seconds, rel=1e-12)
    chosen = laid_out(deck, RANKS)
    assert all(chosen.value(key) == value for key, value in best.changes.items())
    assert laid_out(chosen, RANKS) is chosen


def test_keys_that_are_given_stay(path: Path) -> None:
    given = ["batch.micro_size=2", "memory.recompute=full", "layout.tensor=4", "layout.pipeline=2"]
    best = search_deck(path, RANKS, given, SearchOptions()).result.best
    assert all(each.deck.layout.tensor == 4 and each.deck.layout.pipeline == 2 for each in best)
    assert not {"batch.micro_size", "memory.recompute", "layout.tensor"} & set(best[0].changes)
    opened = search_deck(path, RANKS, [*given, "layout.tensor="], SearchOptions()).result.best
    assert opened[0].seconds <= best[0].seconds and "layout.tensor" in opened[0].changes


@pytest.mark.parametrize(
    ("given", "value"),
    [("layout.schedule=zb-v", "zb-v"), ("layout.chunks=2", 2), ("layout.sequence_parallel=true", True)],
)
def test_a_key_may_be_given_alone_that_asks_others_to_be_chosen(
    path: Path, given: str, value: object
) -> None:
    best = search_deck(path, RANKS, [given, "layout.context=1"], SearchOptions()).result.best
    assert all(each.deck.value(given.partition("=")[0]) == value for each in best)
    deck = read_deck(path, [given, "layout.auto=true"])
    assert laid_out(deck, RANKS).value(given.partition("=")[0]) == value


def test_a_group_of_a_node_is_of_as_many_ranks_as_the_machine_says(path: Path) -> None:
    best = search_deck(path, RANKS, ["layout.zero=1", "layout.zero_group=node"], SearchOptions()).result.best
    assert all(each.deck.layout.zero_group == "node" for each in best)


def test_a_word_opens_the_layout_that_was_given() -> None:
    text = DECK.replace('layout = "auto"', "") + "[layout]\ntensor = 4\nzero = 1\n"
    assert parse_deck(text).layout.tensor == 4
    opened = parse_deck(text, ["layout=auto"])
    assert opened.layout.auto and opened.layout.tensor == 1 and opened.layout.zero == 0
    again = parse_deck(text, ["layout=auto", "layout.tensor=2"])
    assert again.layout.auto and again.layout.tensor == 2
    assert parse_deck(text, ["layout.auto=true"]).layout.tensor == 4


def test_what_chooses_no_layout_refuses_to_have_none(path: Path) -> None:
    with pytest.raises(
        HpctrainError,
        match=r"open\.toml:2: layout\.auto = true: is supported by run, resume, plan, deck and job",
    ):
        axis_sizes(read_deck(path, ranks=RANKS), RANKS)


def test_choices_that_do_not_go_with_what_is_given_are_refused(path: Path) -> None:
    deck = read_deck(path)
    best, _ = chosen_layout(deck, RANKS)
    with pytest.raises(HpctrainError, match="layout"):
        with_choice(deck, best.changes | {"layout.tensor": 3}, RANKS)


@pytest.mark.parametrize(
    ("overrides", "ranks", "words"),
    [
        (["machine.rates="], 16, ("requires machine.rates", "calibrate")),
        (["machine.memory=3.2 GB", *NARROW], 16, ("no layout fits into memory", "lacks", "3.2 GB")),
        ([], 13, ("no layout fits 13 ranks", "8 or 16 ranks would")),
        (
            ["layout.local_steps.replicas=2", "layout.local_steps.steps=2"],
            16,
            ("is unsupported in a search",),
        ),
    ],
)
def test_impossible_wishes(path: Path, overrides: list[str], ranks: int, words: tuple[str, ...]) -> None:
    with pytest.raises(HpctrainError) as caught:
        laid_out(read_deck(path, overrides), ranks)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 1
    assert all(word in caught.value.problems[0] for word in words), caught.value.problems


def test_less_memory_asks_for_another_layout_and_more_seconds(path: Path) -> None:
    roomy = search_deck(path, RANKS, (), SearchOptions()).result
    tight = search_deck(path, RANKS, ["machine.memory=16 GB"], SearchOptions()).result
    assert tight.best[0].node_bytes <= 16e9 < roomy.best[0].node_bytes
    assert tight.best[0].seconds >= roomy.best[0].seconds
    assert tight.rejected.counts["memory"] > roomy.rejected.counts["memory"]


def test_words_tell_the_best_and_why_others_fell(path: Path) -> None:
    result = plan(path, "--ranks", RANKS, "--search", "--set", "machine.memory=16 GB")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert text.startswith("open: the 10 fastest layouts that fit on 16 ranks of selene-2021")
    assert "were pruned, because their minimum memory does not fit (use more ranks or larger nodes);" in text
    assert "were pruned, because all layouts that they stand for are slower" in text
    assert re.search(r" are unsupported: [a-z_]+\.[a-z_]+ = \d+: ", text)
    assert re.search(r" 1 [\d.]+ m?s - [\d.]+[KM] .* 2 [\d.]+ m?s \+\d\.\d% [\d.]+[KM] ", text)
    assert re.search(r"`hpctrain run \S+open\.toml --set .*` trains with the fastest layout", text)


def test_a_picture_has_memory_against_time(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "layouts.svg"
    narrow = [word for key in NARROW for word in ("--set", key)]
    assert plan(path, "--ranks", RANKS, "--search", "--plot", picture, *narrow).exit_code == 0
    assert "largest memory per rank" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "x.txt"], "x.txt"),
        (["--write", "/nowhere/x.toml"], "/nowhere"),
    ],
)
def test_files_that_cannot_be_written(path: Path, arguments: list[str], words: str) -> None:
    result = plan(path, "--ranks", RANKS, "--search", *arguments)
    assert isinstance(result.exception, HpctrainError) and words in str(result.exception)


def test_published_machines_keep_their_habits(path: Path) -> None:
    """Gradients are summed as the machine does, and memory is that of its nodes."""
    machine = read_machine("selene-2021")
    deck = search_deck(path, RANKS, (), SearchOptions(rates=machine)).result.best[0].deck
    assert deck.precision.gradients == "compute" and deck.machine.memory == 640e9


def test_a_file_that_is_no_schedule_is_refused_where_one_stage_has_no_use_for_it(path: Path) -> None:
    result = plan(path, "--ranks", RANKS, "--search", "--set", f"layout.schedule={path}")
    assert isinstance(result.exception, HpctrainError)
    assert "is not an action (write F, B, I or W" in result.exception.problems[0]
