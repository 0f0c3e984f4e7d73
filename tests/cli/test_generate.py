"""`hpctrain generate` as a user starts it: on a run's folder, alone, under mpirun and on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli.generate import Output
from hpctrain.comm.world import World
from hpctrain.train.run_construction import open_run
from tests.data.preparing import prepare
from tests.engines import small_deck
from tests.launch import clean_environment
from tests.warm import Server

Launch = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = "from hpctrain.cli.generate import command; command()"
TEXT = "the cat sat on the mat, and the dog on the cat.\n"


@pytest.fixture(scope="module")
def run_dir(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learned TEXT by heart."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT * 100)
    alone = world.single_rank_world()
    prepare(alone, folder / "tokens.h5", [str(folder / "text.txt")], train_bpe=270)
    deck = small_deck(
        f"run.dir={folder / 'run'}",
        "run.steps=40",
        f"data.tokens={folder / 'tokens.h5'}",
        "model.vocabulary=320",
    )
    assert open_run(alone, deck).train() == 0
    return folder / "run"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_folder_continues_its_text(launch: Launch, run_dir: Path, ranks: int) -> None:
    done = launch(
        ranks, "-c", PROGRAM, run_dir, "--prompt", "the cat sat", "--tokens", "30", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\r\n", "\n").startswith(TEXT.removesuffix("\n"))


def test_samples_go_to_a_stdout_of_few_characters(launch: Launch, run_dir: Path) -> None:
    [checkpoint] = (run_dir / "checkpoints").glob("*.h5")
    options = ("--prompt", "thé", "--tokens", "20", "--top-k", "50", "--top-p", "0.95", "--seed", "5")
    done = launch(0, "-c", PROGRAM, checkpoint, *options, "--samples", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- sample 1 of 2 ---\nth?")
    assert "\n--- sample 2 of 2 ---\nth?" in done.stdout


def test_a_terminal_shows_the_same_text(run_dir: Path, python: list[str]) -> None:
    command = [*python, "-c", PROGRAM, str(run_dir), "--prompt", "a", "--temperature", "0"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=clean_environment(), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1024):
                shown += piece
        except OSError:  # how a pseudo-terminal ends
            pass
        os.close(ours)
    plain = subprocess.run(command, env=clean_environment(), capture_output=True, check=True)
    assert process.returncode == 0
    assert len(plain.stdout) > 100
    assert shown.replace(b"\r\n", b"\n") == plain.stdout


def test_mistakes_are_said_once(launch: Launch, tmp_path: Path) -> None:
    done = launch(2, "-c", PROGRAM, tmp_path / "gone", "--top-p", "2", "--samples", "0")
    assert done.returncode == 2
    assert done.stderr.count("--top-p 2: must be above 0 and at most 1") == 1
    assert done.stderr.count("--samples 0: must be at least 1") == 1
    assert "Traceback" not in done.stderr
    done = launch(0, "-c", PROGRAM, tmp_path / "gone")
    assert done.returncode == 3
    assert done.stderr == f"hpctrain: error: {tmp_path / 'gone'}: no such run folder or checkpoint\n"


UNUSABLE = f"""
from hpctrain.host import device
device.unusable_gpus = lambda: "the driver is too old; update it"
{PROGRAM}
"""


def test_a_gpu_that_torch_cannot_use_is_refused_as_in_training(launch: Launch, run_dir: Path) -> None:
    options = (run_dir, "--prompt", "the cat sat", "--tokens", "3", "--temperature", "0")
    done = launch(2, "-c", UNUSABLE, *options)
    assert (done.returncode, done.stdout) == (2, "")
    reason = 'the driver is too old; update it, or use "cpu" to compute on the CPU'
    assert done.stderr.count(f"hpctrain: error: --device auto: {reason}") == 1, done.stderr
    done = launch(0, "-c", UNUSABLE, *options, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the cat sat on")
    done = launch(0, "-c", PROGRAM, *options, "--device", "gpu")
    assert done.returncode == 2
    assert done.stderr.startswith('hpctrain: error: --device gpu: must be "auto", "cpu", "cuda", "xpu", ')


def test_a_full_disk_is_a_sentence_and_a_reader_that_leaves_is_none(run_dir: Path, warm: Server) -> None:
    python = warm.command(clean_environment(), own_end=True)
    command = [*python, "-c", PROGRAM, str(run_dir), "--tokens", "20"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (3, "hpctrain: error: stdout: No space left on device\n")
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, env=clean_environment(), stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")  # as of any verb


def test_a_terminal_obeys_no_character_that_was_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\tb\x1b[31m\r\x0e\x7f\x9b\n"
    Output(terminal=True).show(text)
    assert capsys.readouterr().out == "a\tb␛[31m␍␎␡\N{REPLACEMENT CHARACTER}\n"
    Output(terminal=False).show(text)
    assert capsys.readouterr().out == text
