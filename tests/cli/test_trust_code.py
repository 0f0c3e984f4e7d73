"""Tests of verbs that open a checkpoint whose deck names code. The code runs only if the user allows it.

The checkpoint plays the part of one that somebody else made. After its run, the file that its deck names is
replaced by one that creates a marker file when it is imported. Copies of the checkpoint name functions of the
standard library. This also tests checkpoint/evaluation_deck.py and train/compared_run.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from zlib import crc32

import h5py
import numpy as np
import pytest

import hpctrain
from hpctrain.comm.verb import single_world
from hpctrain.errors import HpctrainError
from tests.launch import clean_environment
from tests.warm import Server

Launch = Callable[..., "CompletedProcess[str]"]

CODE = """
from torch import nn

def build(width=8):
    return nn.Sequential(nn.Embedding(257, width), nn.Linear(width, 257))

def initial(module):
    module[0].weight.mul_(0.5)
"""
CREATE_MARKER = 'from pathlib import Path\nPath(__file__).with_name("marker").touch()\n'
DECK = """
[run]
title = "theirs"
steps = 3
[model]
module = "mine.py:build"
initial = "mine.py:initial"
[model.arguments]
width = 8
[data]
tokens = "tokens.h5"
[batch]
global_size = 2
sequence = 16
[optimizer]
epsilon = 1e-5
[learning_rate]
peak = 1e-2
[checkpoint]
every = 2
keep = 9
[machine]
peak_flops = 1e10
compile = false
"""
CHECKPOINT = "runs/theirs/checkpoints/step-00000002.h5"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, warm: Server) -> Path:
    """Folder with the code, the deck, the tokens and two equal runs of three steps."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "text.txt").write_text("".join(chr(32 + 7 * n * n % 61) for n in range(2000)))
    (folder / "mine.py").write_text(CODE)
    (folder / "deck.toml").write_text(DECK)
    environment = clean_environment()
    for words in (
        ("prepare", "tokens.h5", "text.txt"),
        ("run", "deck.toml"),
        ("run", "deck.toml", "--set", "run.dir=runs/like"),
    ):
        command = [*warm.command(environment), "-m", "hpctrain", *words]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """Copy of the runs, whose code creates a marker file. Their decks name files in `finished`."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    shutil.copy(finished / "tokens.h5", tmp_path)
    (finished / "mine.py").write_text(CREATE_MARKER + CODE)
    yield tmp_path
    (finished / "marker").unlink(missing_ok=True)


@pytest.fixture
def marker(finished: Path) -> Path:
    """File that the code of the run creates when it is imported."""
    return finished / "marker"


def copy_with_changes(source: Path, target: Path, *changes: tuple[str, str], **state: object) -> Path:
    """Copy a checkpoint, replace texts in its deck, and change values in its state."""
    shutil.copy(source, target)
    with h5py.File(target, "r+") as file:
        texts = {name: file[name][()].decode() for name in ("deck", "state")}
        for old, new in changes:
            assert old in texts["deck"], texts["deck"]
            texts["deck"] = texts["deck"].replace(old, new, 1)
        texts["state"] = json.dumps(json.loads(texts["state"]) | state)
        for name, text in texts.items():
            del file[name]
            data = text.encode()
            stored = file.create_dataset(name, data=np.array(data, h5py.string_dtype("utf-8", len(data))))
            stored.attrs["crc32"] = crc32(data)
    return target


def assert_refused(done: CompletedProcess[str], folder: Path) -> None:
    """Check that a command failed with the message that names the keys, the values and the options."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    output = " ".join(done.stderr.split())
    assert "its deck names code that runs only if you allow it: " in output
    for word in (
        f'model.initial = "{folder}/mine.py:initial"',
        f'model.module = "{folder}/mine.py:build"',
        *("--set", "--trust-deck DECK", "--trust-code"),
    ):
        assert word in output, output
    assert "Traceback" not in output


VERBS = {
    "resume": ("resume", "runs/theirs", "--set", "run.steps=4"),
    "evaluate": ("evaluate", "runs/theirs", "--tokens", "tokens.h5", "--sequences", "2"),
    "replay": ("replay", CHECKPOINT),
    "compare": ("compare", "runs/theirs", "runs/like"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_stored_code_runs_only_if_it_is_trusted(
    verb: str, folder: Path, finished: Path, marker: Path, launch: Launch
) -> None:
    words = VERBS[verb]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert_refused(launch(0, "-m", "hpctrain", *words), finished)
    assert not marker.exists()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    done = launch(0, "-m", "hpctrain", *words, "--trust-code")
    assert done.returncode == 0 and marker.exists(), (done.stdout, done.stderr)
    output = " ".join((done.stdout + done.stderr).split())
    assert output.count("--trust-code: ") == 1 + (verb == "compare")
    assert f'may run model.initial = "{finished}/mine.py:initial", model.module = ' in output


def test_code_in_the_users_deck_runs(folder: Path, finished: Path, marker: Path, launch: Launch) -> None:
    """It is named by --trust-deck, by --set, or by the deck of `run DECK --resume`."""
    evaluate = "-m", "hpctrain", *VERBS["evaluate"]
    user_deck = folder / "user_deck.toml"
    user_deck.write_text(f'[model]\nmodule = "{finished}/mine.py:build"\n')
    done = launch(0, *evaluate, "--trust-deck", user_deck)
    assert done.returncode == 2 and "model.initial" in done.stderr and "model.module" not in done.stderr
    keys = [
        f"model.{key}={finished}/mine.py:{name}"
        for key, name in (("module", "build"), ("initial", "initial"))
    ]
    assert not marker.exists()
    done = launch(0, *evaluate, "--trust-deck", user_deck, "--set", keys[1])
    assert done.returncode == 0 and marker.exists(), done.stderr
    assert launch(0, *evaluate, *(word for key in keys for word in ("--set", key))).returncode == 0
    done = launch(0, "-m", "hpctrain", "run", finished / "deck.toml", "--resume", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr
    done = launch(0, *evaluate, "--trust-deck", "no.toml")
    assert done.returncode == 3 and "no.toml: cannot be read" in done.stderr


def test_standard_library_functions_never_run(folder: Path, finished: Path, launch: Launch) -> None:
    bad = copy_with_changes(
        folder / CHECKPOINT,
        folder / "bad.h5",
        (f"{finished}/mine.py:build", "subprocess:run"),
        ("width = 8", 'args = ["touch", "marker"]'),
    )
    for words in (("resume", bad), ("evaluate", bad, "--tokens", "tokens.h5")):
        done = launch(0, "-m", "hpctrain", *words)
        assert done.returncode == 2 and 'model.module = "subprocess:run"' in done.stderr, done.stderr
        done = launch(0, "-m", "hpctrain", *words, "--trust-code")
        assert done.returncode == 2 and "subprocess is part of Python's standard library" in done.stderr
    assert not (folder / "marker").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", CHECKPOINT),
        ("inspect", CHECKPOINT, "--diff", "runs/like/checkpoints/step-00000002.h5"),
        ("plot", "runs/theirs"),
        ("report", "runs/theirs"),
        ("compare", "runs/theirs", "runs/like", "--figures"),
    ],
    ids=" ".join,
)
def test_verbs_that_only_read_run_no_code(
    words: tuple[str, ...], folder: Path, marker: Path, launch: Launch
) -> None:
    done = launch(0, "-m", "hpctrain", *words)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


FROM = """
[run]
title = "user_deck"
steps = 1
[model]
from = "CHECKPOINT"
[data]
tokens = "tokens.h5"
[batch]
global_size = 2
sequence = 16
[learning_rate]
peak = 1e-2
"""


@pytest.mark.parametrize(
    "words",
    [
        ("generate", CHECKPOINT, "--prompt", "a"),
        ("export", CHECKPOINT, "exported"),
        *((verb, "user_deck.toml") for verb in ("run", "plan", "check", "deck")),
    ],
    ids=" ".join,
)
def test_verbs_without_modules_refuse_and_run_no_code(
    words: tuple[str, ...], folder: Path, marker: Path, launch: Launch
) -> None:
    (folder / "user_deck.toml").write_text(FROM.replace("CHECKPOINT", CHECKPOINT))
    done = launch(0, "-m", "hpctrain", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, (done.stdout, done.stderr)
    assert not marker.exists()


def test_scripts_run_stored_code_only_if_they_trust_it(folder: Path, finished: Path, marker: Path) -> None:
    with pytest.raises(HpctrainError, match=r"its model is a user module"):
        hpctrain.load(folder / CHECKPOINT)
    world = single_world("cpu")
    checkpoint = hpctrain.open_checkpoint(folder / CHECKPOINT)
    assert checkpoint.deck.model.module == f"{finished}/mine.py:build"
    for call in (
        lambda: hpctrain.run(checkpoint.deck, world=world),
        lambda: hpctrain.check(checkpoint.deck, world=world),
        lambda: hpctrain.resume(folder / CHECKPOINT, world=world),
    ):
        with pytest.raises(HpctrainError, match=r"model\.initial = .*model\.module = .*trust_code=True"):
            call()
    assert not marker.exists()
    changes = {"run.dir": str(folder / "runs/new"), "data.tokens": str(folder / "tokens.h5")}
    trusted = hpctrain.open_checkpoint(folder / CHECKPOINT, trust_code=True)
    hpctrain.run(trusted.deck, world=world, changes=changes)
    assert marker.exists()
    hpctrain.resume(folder / "runs/new", world=world, changes={"run.steps": 4}, trust_code=True)
