from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.schedule import command
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import SCHEDULE_NAMES, generate_schedule
from tests.launch import clean_environment

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
PNG = b"\x89PNG"


def schedule(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def refused(*arguments: object) -> tuple[str, ...]:
    """The sentences of the error that these arguments get."""
    result = schedule(*arguments)
    assert isinstance(result.exception, HpctrainError), result.output
    assert result.exception.exit_code == 2
    return result.exception.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_name_is_drawn(name: str) -> None:
    result = schedule(name, "--stages", 2, "--microbatches", 4)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{name}, 2 stages, 4 micro-batches")
    assert "\x1b" not in result.stdout
    assert name in schedule("--help").stdout


def test_json_has_the_published_numbers() -> None:
    arguments = ("--stages", 8, "--microbatches", 24, "--times", "18.522,18.086,9.337,.601", "--json")
    result = schedule("1f1b", *arguments)
    found = json.loads(result.stdout)
    assert list(found) == [
        "schedule",
        "stages",
        "microbatches",
        "chunks",
        "cost",
        "ideal",
        "bubble_rate",
        "peak_activations",
    ]
    assert (found["schedule"], found["stages"], found["microbatches"], found["chunks"]) == ("1f1b", 8, 24, 1)
    assert found["ideal"] == pytest.approx(24 * (18.522 + 18.086 + 9.337))
    assert found["bubble_rate"] == pytest.approx(1 - found["ideal"] / found["cost"])
    assert found["bubble_rate"] == pytest.approx(0.2431, abs=5e-5)
    assert found["peak_activations"] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_text_parses_back_and_is_read_as_a_file(tmp_path: Path) -> None:
    arguments = ("--stages", 4, "--microbatches", 8, "--chunks", 2)
    made = schedule("interleaved", *arguments, "--text").stdout
    assert Schedule.parse(made) == generate_schedule("interleaved", 4, 8, 2)
    path = write(tmp_path / "mine.txt", made)
    assert schedule(path, "--text").stdout == made
    assert schedule(path).stdout == schedule("interleaved", *arguments).stdout
    assert schedule(path, "--json").stdout == schedule("interleaved", *arguments, "--json").stdout


def test_a_file_without_a_name_is_called_as_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.txt", "F0 B0\n")
    assert schedule(path).stdout.startswith("mine.txt, 1 stage, 1 micro-batch: bubble 0.00%")
    assert json.loads(schedule(path, "--json").stdout)["schedule"] == "mine.txt"


def test_a_picture_is_written_and_named(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    result = schedule("zb-h1", "--stages", 4, "--microbatches", 8, "--png", path)
    assert result.stdout.splitlines()[-1] == str(path)
    assert path.read_bytes().startswith(PNG)


def test_a_bad_file_is_told_and_framed(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.txt", "# mine\n\nF0 B0 F1 B1\nF0 B0 B1 F1\n")
    problem, shown = refused(path, "--png", tmp_path / "bad.png")
    assert problem.startswith(f"{path}:4: stage 1, B1")
    assert "F1" in problem
    assert shown == f"see {tmp_path / 'bad.png'} for the locations"
    assert (tmp_path / "bad.png").read_bytes().startswith(PNG)
    assert refused(path) == (problem,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0 B0 F1 B1\nF0 B0 F1\n", ("bad.txt:2: stage 1, B1", "missing")),
        ("F0 F0 B0\n", ("bad.txt:1: stage 0, F0", "duplicate")),
        ("F0 X0\n", ("bad.txt:1", "'X0': is not an action")),
        ("F0 B0 F1 B1\nF0 F1 B0 B1\n", ("bad.txt:1: stage 0", "stage 1")),
        ("# 2 stages, 1 micro-batch, 1 chunk, loop\nF0 B0\n", ("bad.txt:1", "2 stages")),
        ("", ("bad.txt", "no stage")),
    ],
)
def test_mistakes_in_a_file(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    problem = refused(write(tmp_path / "bad.txt", text))[0]
    assert all(word in problem for word in words), problem


def test_a_file_with_many_mistakes_tells_the_first(tmp_path: Path) -> None:
    problems = refused(write(tmp_path / "bad.txt", "".join(f"F{number} F{number} " for number in range(40))))
    assert len(problems) == 11
    assert problems[-1].endswith(" more")


def test_other_counts_than_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.txt", "F0 B0\n")
    assert refused(path, "--stages", 2, "--microbatches", 1, "--chunks", 3) == (
        f"{path}: --stages 2 conflicts with the file, which has 1",
        f"{path}: --chunks 3 conflicts with the file, which has 1",
    )


def test_a_file_over_the_limit_of_activations(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.txt", str(generate_schedule("gpipe", 2, 4)))
    assert schedule(path, "--memory-limit", 4).exit_code == 0
    assert "stage 0, F3" in refused(path, "--memory-limit", 3)[0]


def test_names_and_numbers_that_cannot_be(tmp_path: Path) -> None:
    assert refused("1f2b") == ('"1f2b" is neither a schedule nor a file: did you mean "1f1b"?',)
    assert refused("1f1b", "--stages", 2) == ("schedule 1f1b requires --microbatches M",)
    assert refused("gpipe", "--stages", 2, "--microbatches", 2, "--chunks", 2)
    result = schedule(tmp_path)
    assert isinstance(result.exception, InputOutputError)
    write(tmp_path / "binary", "").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path / "binary")[0].endswith("is not text; a schedule has the format of --text")


@pytest.mark.parametrize("times", ["1,1,1", "1,1,1,x", "1,-1,1,0", "0,0,0,1", "nan,1,1,0", ""])
def test_times_that_cannot_be(times: str) -> None:
    result = schedule("1f1b", "--stages", 2, "--microbatches", 2, "--times", times)
    assert result.exit_code == 2
    assert "Invalid value for '--times'" in result.output


def test_text_or_json() -> None:
    result = schedule("1f1b", "--stages", 2, "--microbatches", 2, "--text", "--json")
    assert result.exit_code == 2
    assert "--text conflicts with --json" in result.output


def test_loads_neither_torch_nor_mpi(launch: Launch) -> None:
    script = (
        "import sys\nfrom hpctrain.cli.main import main\n"
        "sys.argv = ['hpctrain', 'schedule', 'zb-v', '--stages', '2', '--microbatches', '4']\n"
        "try:\n    main()\nfinally:\n"
        "    print('heavy:', [name for name in ('torch', 'mpi4py', 'matplotlib') if name in sys.modules])\n"
    )
    done = launch(0, "-c", script, cold=True)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout


@pytest.mark.parametrize(
    ("environment", "colourful"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_on_a_terminal_only(environment: dict[str, str], colourful: bool) -> None:
    ours, theirs = pty.openpty()
    arguments = ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"]
    kept = {name: value for name, value in clean_environment().items() if name != "NO_COLOR"}
    subprocess.run(
        [sys.executable, "-m", "hpctrain", *arguments],
        stdout=theirs,
        env=kept | {"TERM": "xterm", "COLUMNS": "100"} | environment,
        check=True,
        timeout=60,
    )
    printed = b""
    while not printed.rstrip().endswith((b"numbers: micro-batches", b"of the micro-batch")):
        printed += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert (b"\x1b[48;5;" in printed) == colourful
    assert b"1f1b, 2 stages, 4 micro-batches" in printed
