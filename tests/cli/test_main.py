"""The command line loads only the verb it is asked for, and answers mistakes once."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import hpctrain.cli
from hpctrain.cli.main import VERBS, command, main
from tests.launch import clean_environment

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
HEAVY = ("torch", "mpi4py", "numpy", "h5py", "pydantic", "matplotlib", "rich")


def test_help_loads_nothing_heavy(launch: Launch) -> None:
    script = (
        "import sys\nfrom hpctrain.cli.main import main\nsys.argv = ['hpctrain', '--help']\n"
        "try:\n    main()\nfinally:\n"
        f"    print('heavy:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = launch(0, "-c", script, cold=True)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout
    assert "\n    0    done\n    1    a comparison" in done.stdout
    assert "\\b" not in done.stdout
    for verb in VERBS:
        assert verb in done.stdout


def test_help_fits_a_narrow_terminal() -> None:
    result = CliRunner().invoke(command, ["--help"], prog_name="hpctrain", terminal_width=60)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 60, result.output
    assert "Exit codes:\n" in result.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_table_is_there(verb: str) -> None:
    assert isinstance(import_module(f"hpctrain.cli.{VERBS[verb][0]}").command, click.Command)
    result = CliRunner().invoke(command, [verb, "--help"], prog_name="hpctrain")
    assert result.exit_code == 0, result.output
    assert f"Usage: hpctrain {verb}" in result.output


def test_an_unknown_verb_gets_the_nearest_known(launch: Launch) -> None:
    done = launch(0, "-m", "hpctrain", "doktor")
    assert done.returncode == 2
    assert 'unknown verb "doktor": did you mean "doctor"?' in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("plan --serch", "No such option"),
        ("plan a.toml --ranks x", "Invalid value for '--ranks': 'x' is not a valid integer range"),
    ],
)
def test_a_mistake_in_a_command_is_one_sentence(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hpctrain", *words.split()])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"hpctrain: error: {sentence}")


def test_a_mistake_on_several_ranks_is_told_once(launch: Launch) -> None:
    done = launch(2, "-m", "hpctrain", "doctor", "--no-such-option")
    assert done.returncode == 2
    assert done.stderr.count("--no-such-option") == 1
    assert "Traceback" not in done.stderr


def test_version(launch: Launch) -> None:
    done = launch(0, "-m", "hpctrain", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("hpctrain 0.")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_mistake(closed: str) -> None:
    words = f"{shlex.quote(sys.executable)} -m hpctrain --version {closed}"
    done = subprocess.run(["bash", "-c", words], env=clean_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["deck", "--reference"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
        ["doctor"],
    ],
)
def test_a_reader_that_leaves_is_told_by_the_exit_code_alone(words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "hpctrain", *words]
    done = subprocess.run(command, env=clean_environment(), stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


DEVICE_OF_DECK = {
    *("check", "compare", "evaluate", "replay", "resume", "run", "doctor"),
    *("checkpoint", "communication", "mixture", "mup", "offload", "rate", "train"),
}
"""Functions of verbs and benchmarks whose deck names the device. `hpctrain doctor` ends before it computes if
torch cannot use the GPUs."""


def test_every_other_verb_says_on_which_device_it_computes() -> None:
    without = set()
    for file in Path(hpctrain.cli.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "run_bench":
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {"run_verb", "run_bench"}:
                    names_device = any(each.arg == "device" for each in call.keywords)
                    if not names_device and not (call.func.id == "run_verb" and len(call.args) > 1):
                        without.add(file.stem if function.name == "command" else function.name)
    assert without == DEVICE_OF_DECK
