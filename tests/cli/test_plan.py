from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.check import command as check
from hpctrain.cli.plan import command
from hpctrain.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_USER, HpctrainError
from hpctrain.plan.rehearse import rehearsal
from hpctrain.plan.rehearse.checks.matching import MatchResult, match_programmes
from hpctrain.plan.rehearse.programme import SEND, Programme, StepProgrammes
from tests.engines import DECK

pytestmark = pytest.mark.usefixtures("fresh")
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
    assert "A rank needs up to" in result.stdout
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
    assert result.exit_code == EXIT_USER
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


REHEARSED = ("--ranks", 4, "--set", "layout.pipeline=2", "--rehearse")


def test_a_rehearsal_tells_what_it_matched(deck: Path) -> None:
    result = plan(deck, *REHEARSED)
    assert result.exit_code == EXIT_DONE, result.output
    text = " ".join(result.stdout.split())
    assert "needs up to" in text
    assert "Rehearsed a step of 4 ranks (2 kinds)" in text
    assert "All sends and receives match, all collective calls match, and there is no cyclic wait." in text
    told = json.loads(plan(deck, *REHEARSED, "--json").stdout)["rehearsal"]
    assert (told["ranks"], told["classes"], told["faults"]) == (4, 2, [])
    assert told["events"] > told["messages"] > 0


def test_communication_is_checked_by_the_rules_of_nccl(deck: Path) -> None:
    arguments = [str(deck), "--set", "layout.pipeline=2", "--communication"]
    result = CliRunner().invoke(
        check, [*arguments, "--ranks", "4", "--set", "communication.transport=shared"]
    )
    assert result.exit_code == EXIT_DONE, result.output
    text = " ".join(result.stdout.split())
    assert "Rehearsed a step of 4 ranks" in text
    assert "there is no cyclic wait, by the rules of NCCL." in text
    missing = CliRunner().invoke(check, arguments)
    assert isinstance(missing.exception, HpctrainError)
    assert "add --ranks N" in str(missing.exception)


def test_communication_of_the_launched_ranks_is_reported_once(
    deck: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    arguments = "-m", "hpctrain", "check", deck, "--communication", "--set"
    done = launch(2, *arguments, "layout.pipeline=2", COLUMNS="200")
    assert done.returncode == EXIT_DONE, done.stderr
    assert done.stdout.count("Rehearsed a step of 2 ranks (2 kinds)") == 1
    assert done.stdout.count("by the rules of NCCL.") == 1
    done = launch(2, *arguments, "layout.pipeline=3")
    assert (done.returncode, done.stdout) == (EXIT_USER, "")
    assert done.stderr.count("must divide the number of ranks, 2") == 1


def test_a_rehearsal_that_lacks_memory_is_the_user_s_matter(deck: Path) -> None:
    small = "--set", "machine.memory=1 MB"
    result = plan(deck, *REHEARSED, *small)
    assert result.exit_code == EXIT_USER, result.output
    assert "Does not fit into memory on 2 stages:" in result.stdout
    told = plan(deck, *REHEARSED, *small, "--json")
    assert told.exit_code == EXIT_USER
    faults = json.loads(told.stdout)["rehearsal"]["faults"]
    assert [fault["fault"] for fault in faults] == ["over memory"] * 2


def test_programmes_that_do_not_fit_are_no_user_s_mistake(
    deck: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(job: StepProgrammes, on_streams: bool) -> MatchResult:
        assert not on_streams
        first = next(number for number, events in enumerate(job.programmes) if _sends(events))
        programmes = list(job.programmes)
        *_, last = _sends(programmes[first])
        programmes[first] = tuple(
            replace(e, call_index=e.call_index - (e.call_index > last))
            for n, e in enumerate(programmes[first])
            if last not in {n, e.call_index}
        )
        return match_programmes(StepProgrammes(programmes, job.programme_of, job.groups, job.place))

    def _sends(events: Programme) -> list[int]:
        return [number for number, event in enumerate(events) if event.operation == SEND]

    monkeypatch.setattr(rehearsal, "match_programmes", planted)
    # Whatever lacks besides: what no deck can mend comes first.
    result = plan(deck, *REHEARSED, "--set", "machine.memory=1 MB")
    assert result.exit_code == EXIT_INTERNAL, result.output
    assert "1 fault in messages and calls:" in result.stdout
    assert "missing send: message" in result.stdout


def test_steps_with_servers_are_not_rehearsed(deck: Path) -> None:
    result = plan(deck, "--ranks", 3, "--set", "communication.server.mode=sync", "--rehearse")
    assert isinstance(result.exception, HpctrainError) and result.exception.exit_code == EXIT_USER
    assert "is unsupported in a rehearsal" in result.exception.problems[0]


def test_steps_of_models_on_ranks_of_their_own_are_not_rehearsed(deck: Path) -> None:
    policy = (
        *("--set", "objective.kind=ppo", "--set", 'policy.reward=["exact-match"]'),
        *("--set", "policy.tokens=2", "--set", "policy.critic_ranks=2"),
    )
    result = plan(deck, "--ranks", 3, *policy, "--rehearse")
    assert isinstance(result.exception, HpctrainError)
    (sentence,) = result.exception.problems
    assert "policy.critic_ranks=2: is unsupported in a rehearsal" in sentence
