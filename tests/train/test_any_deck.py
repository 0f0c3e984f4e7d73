"""What the check of a deck accepts, runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from hpctrain.comm.world import World
from hpctrain.data.prepare import prepare
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.named import named_problems
from hpctrain.train.run import run_deck
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
def try_deck(world: World, tokens: Path, tmp_path: Path) -> Callable[[str], None]:
    """Run a deck's text if the check accepts it for one rank."""

    def attempt(text: str) -> None:
        path, folder = tmp_path / "small.toml", tmp_path / "run"
        path.write_text(text)
        given_here = [f"data.tokens={tokens}", f"run.dir={folder}"]
        try:
            read_deck(path, given_here, world.size, check_files=named_problems)
        except HpctrainError:
            assume(False)
        shutil.rmtree(folder, ignore_errors=True)
        assert run_deck(world, path, given_here) == 0

    return attempt


def test_what_the_check_accepts_runs(try_deck: Callable[[str], None]) -> None:
    @settings(MANY, max_examples=10)
    @given(small_decks())
    def runs(text: str) -> None:
        try_deck(text)

    runs()


@pytest.mark.slow
def test_two_hundred_decks_that_the_check_accepts_run(try_deck: Callable[[str], None]) -> None:
    @settings(MANY, max_examples=200)
    @given(small_decks(12))
    def runs(text: str) -> None:
        try_deck(text)

    runs()
