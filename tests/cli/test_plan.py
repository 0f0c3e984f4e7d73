from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.plan import command
from hpctrain.errors import HpctrainError
from tests.engines import DECK

KINDS = ("parameter", "gradient", "optimizer", "activation", "buffer", "other")


@pytest.fixture
def deck(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(DECK)
    return path


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_json_tells_every_stage(deck: Path) -> None:
    result = plan(deck, "--ranks", 4, "--set", "layout.pipeline=2", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["parameters_total"] > 0
    assert [stage["stage"] for stage in told["stages"]] == [0, 1]
    for stage in told["stages"]:
        assert stage["total_bytes"] == sum(stage[f"{kind}_bytes"] for kind in KINDS)
        assert stage["gradient_bytes"] == stage["parameter_bytes"] > 0


def test_words_tell_where_bytes_go_and_what_would_save_most(deck: Path) -> None:
    result = plan(
        deck,
        "--ranks",
        4,
        "--set",
        "model.hidden=256",
        "--set",
        "batch.sequence=512",
        "--set",
        "model.heads=2",
    )
    assert result.exit_code == 0, result.output
    assert "gpt2" in result.stdout
    assert "layout.zero = 0" in result.stdout
    assert "A rank holds at most" in result.stdout
    assert "--set batch.micro_size=1" in result.stdout


def test_the_token_file_is_asked_for_a_missing_vocabulary_alone(deck: Path) -> None:
    text = deck.read_text()
    deck.write_text(text.replace("vocabulary = 61\n", ""))
    result = plan(deck, "--ranks", 2, "--json")
    assert isinstance(result.exception, HpctrainError), result.output
    assert "none" in result.exception.problems[0]


def test_ranks_that_do_not_fit_are_refused(deck: Path) -> None:
    result = plan(deck, "--ranks", 3)
    assert isinstance(result.exception, HpctrainError), result.output
    assert result.exception.exit_code == 2
