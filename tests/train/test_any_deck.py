"""What the check of a deck accepts, runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.strategies import SearchStrategy

from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.deck_references import reference_problems
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare
from tests.deck.small_deck import small_decks

MANY = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, print_blob=True
)


@pytest.fixture(scope="module")
def tokens(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of 2,000 bytes of text."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 45)
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return folder / "tokens.h5"


@pytest.fixture
def try_deck(world: World, tokens: Path, tmp_path: Path) -> Callable[[str], bool]:
    """Return a function that runs a deck's text if the check accepts it for one rank.

    It returns False if no step made an update: some decks have numbers with which gradients overflow, such
    as a dropout of 0.99 with a norm_epsilon of 1e-30, or the largest loss scale with a single step in fp16.
    """

    def attempt(text: str) -> bool:
        path, folder = tmp_path / "small.toml", tmp_path / "run"
        path.write_text(text)
        given_here = [f"data.tokens={tokens}", f"run.dir={folder}"]
        try:
            read_deck(path, given_here, world.size, check_files=reference_problems)
        except HpctrainError:
            assume(False)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            assert run_deck(world, path, given_here) == 0
        except HpctrainError as error:
            if re.search(r"none of its \d+ steps? made an update; .* is not finite", str(error)) is None:
                raise
            return False
        return True

    return attempt


def test_what_the_check_accepts_runs(try_deck: Callable[[str], bool]) -> None:
    run_examples(try_deck, small_decks(), 10)


@pytest.mark.slow
def test_two_hundred_decks_that_the_check_accepts_run(try_deck: Callable[[str], bool]) -> None:
    run_examples(try_deck, small_decks(12), 200)


def run_examples(try_deck: Callable[[str], bool], decks: SearchStrategy[str], count: int) -> None:
    """Run examples of a strategy, of which few may overflow."""
    outcomes: list[bool] = []

    @settings(MANY, max_examples=count)
    @given(decks)
    def runs(text: str) -> None:
        outcomes.append(try_deck(text))

    runs()
    assert outcomes.count(False) <= len(outcomes) // 10
