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
    assert told["pipeline"]["split"] == [1, 1] and 0 < told["pipeline"]["waiting"] < 1
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


def test_whether_a_node_has_what_its_ranks_need_is_told(deck: Path) -> None:
    result = plan(deck, "--ranks", 4, "--set", "machine.memory=64 GB")
    assert "Fits: 4 ranks need" in result.stdout
    assert "on a node, which has 64 GB of memory (machine.memory)." in result.stdout
    result = plan(deck, "--ranks", 4, "--ranks-per-node", 1, "--set", "machine.memory=1 MB")
    assert "Does not fit: 1 rank needs" in result.stdout
    told = json.loads(plan(deck, "--ranks", 2, "--set", "machine.memory=1 MB", "--json").stdout)
    assert told["node"] == {
        "ranks": 2,
        "needed_bytes": told["node"]["needed_bytes"],
        "memory_bytes": 1_000_000,
        "fits": False,
    }
    total = told["stages"][0]["total_bytes"]
    assert total < told["node"]["needed_bytes"] <= 2 * total  # libraries lie in memory once
    on_gpus = ("--set", "run.device=cuda", "--set", "machine.gpu_memory=80 GB")
    result = plan(deck, "--ranks", 4, *on_gpus, "--set", "machine.gpus_per_node=2", "--ranks-per-node", 4)
    assert "Fits: 2 ranks need" in result.stdout
    assert "80 GB on GPU 0" in result.stdout
    assert "machine.gpu_memory" in plan(deck, "--ranks", 4, *on_gpus[:2]).stdout
