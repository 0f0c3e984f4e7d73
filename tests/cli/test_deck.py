from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.deck import command
from hpctrain.deck.read import parse_deck
from hpctrain.deck.reference import reference_text
from hpctrain.errors import HpctrainError

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
DECK = '[run]\nsteps = 2\n[model]\npreset = "gpt2-124m"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 8\n'


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A deck in a file."""
    (tmp_path / "small.toml").write_text(DECK)
    return str(tmp_path / "small.toml")


def test_the_resolved_deck_is_printed(path: str) -> None:
    result = CliRunner().invoke(command, [path, "--set", "layout.tensor=2", "--ranks", "8"])
    assert result.exit_code == 0
    assert "\nhidden = 768\n" in result.output
    assert "\n# data: fills the rest: 4 on 8 ranks\n" in result.output
    assert parse_deck(result.output) == parse_deck(DECK, ["layout.tensor=2", "run.title=small"])


def test_problems_are_raised_for_the_command_line(path: str) -> None:
    result = CliRunner().invoke(command, [path, "--ranks", "3"])
    assert isinstance(result.exception, HpctrainError)
    assert result.exception.problems == (
        f"{path}:8: batch.global_size = 8: must be a multiple of batch.micro_size x data ranks = 1 x 3 = 3 "
        "(6 or 9 would)",
    )


def test_the_reference_needs_no_deck() -> None:
    result = CliRunner().invoke(command, ["--reference"])
    assert (result.exit_code, result.output) == (0, reference_text())


def test_the_reference_of_a_section() -> None:
    result = CliRunner().invoke(command, ["--reference", "layout"])
    assert (result.exit_code, result.output) == (0, reference_text("layout"))


def test_the_ranks_that_a_launcher_started_are_checked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert isinstance(CliRunner().invoke(command, [path]).exception, HpctrainError)
    assert "fills the rest: 4 on 4 ranks" in CliRunner().invoke(command, [path, "--ranks", "4"]).output


def test_one_rank_prints(path: str, launch: Launch) -> None:
    done = launch(2, "-m", "hpctrain", "deck", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("[layout]") == 1
    assert "\n# data: fills the rest: 2 on 2 ranks\n" in done.stdout


def test_one_rank_tells_what_is_wrong(path: str, launch: Launch) -> None:
    done = launch(2, "-m", "hpctrain", "deck", path, "--set", "layout.tensor=5", "--set", "layout.tensr=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("--set layout.tensor=5: must divide model.heads = 12 (") == 1
    assert done.stderr.count("--set layout.tensr=2: unknown key (did you mean layout.tensor?)") == 1
    assert "Traceback" not in done.stderr


def test_nothing_asked_for() -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2
    assert "give a DECK, --from or --reference" in result.output
