"""Checkpoints whose decks name code, opened by every verb: the code runs only where the user wants it to.

The checkpoint is somebody else's here: after its run the file that its deck names writes a marker when it is
loaded, and copies of it name functions of Python's own. Of engine/evaluated.py and
train/compared_run.py, too.
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
from hpctrain.comm.single import single_world
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
EVIL = 'from pathlib import Path\nPath(__file__).with_name("marker").touch()\n'
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
    """A folder with a run of three steps, its code, deck and tokens, and another run like it."""
    home = tmp_path_factory.mktemp("theirs")
    (home / "text.txt").write_text("".join(chr(32 + 7 * n * n % 61) for n in range(2000)))
    (home / "mine.py").write_text(CODE)
    (home / "deck.toml").write_text(DECK)
    environment = clean_environment()
    for words in (
        ("prepare", "tokens.h5", "text.txt"),
        ("run", "deck.toml"),
        ("run", "deck.toml", "--set", "run.dir=runs/like"),
    ):
        command = [*warm.command(environment), "-m", "hpctrain", *words]
        subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True)
    return home


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """The run, whose code writes a marker by now. Paths in its deck are those of the folder where it ran."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    shutil.copy(finished / "tokens.h5", tmp_path)
    (finished / "mine.py").write_text(EVIL + CODE)
    yield tmp_path
    (finished / "marker").unlink(missing_ok=True)


@pytest.fixture
def marker(finished: Path) -> Path:
    """What the code of the run writes when it is loaded."""
    return finished / "marker"


def with_deck(source: Path, target: Path, *changes: tuple[str, str], **state: object) -> Path:
    """A copy of a checkpoint with other words in its deck and other values in its state."""
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


def refused(done: CompletedProcess[str], home: Path) -> None:
    """It ended with the sentence that names keys, values and what would be right."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    said = " ".join(done.stderr.split())
    assert "its deck names code that runs only if you allow it: " in said
    for word in (
        f'model.initial = "{home}/mine.py:initial"',
        f'model.module = "{home}/mine.py:build"',
        *("--set", "--trust-deck DECK", "--trust-code"),
    ):
        assert word in said, said
    assert "Traceback" not in said


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
    refused(launch(0, "-m", "hpctrain", *words), finished)
    assert not marker.exists()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    done = launch(0, "-m", "hpctrain", *words, "--trust-code")
    assert done.returncode == 0 and marker.exists(), (done.stdout, done.stderr)
    said = " ".join((done.stdout + done.stderr).split())
    assert said.count("--trust-code: ") == 1 + (verb == "compare")
    assert f'may run model.initial = "{finished}/mine.py:initial", model.module = ' in said


def test_code_that_a_deck_of_the_users_own_names_runs(
    folder: Path, finished: Path, marker: Path, launch: Launch
) -> None:
    """By --trust-deck, by --set with the same values, and by `run DECK --resume`, as in batch scripts."""
    evaluate = "-m", "hpctrain", *VERBS["evaluate"]
    own = folder / "own.toml"
    own.write_text(f'[model]\nmodule = "{finished}/mine.py:build"\n')
    done = launch(0, *evaluate, "--trust-deck", own)
    assert done.returncode == 2 and "model.initial" in done.stderr and "model.module" not in done.stderr
    keys = [
        f"model.{key}={finished}/mine.py:{name}"
        for key, name in (("module", "build"), ("initial", "initial"))
    ]
    assert not marker.exists()
    done = launch(0, *evaluate, "--trust-deck", own, "--set", keys[1])
    assert done.returncode == 0 and marker.exists(), done.stderr
    assert launch(0, *evaluate, *(word for key in keys for word in ("--set", key))).returncode == 0
    done = launch(0, "-m", "hpctrain", "run", finished / "deck.toml", "--resume", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr
    done = launch(0, *evaluate, "--trust-deck", "no.toml")
    assert done.returncode == 3 and "no.toml: cannot be read" in done.stderr


def test_functions_of_python_itself_run_for_nobody(folder: Path, finished: Path, launch: Launch) -> None:
    bad = with_deck(
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
def test_verbs_that_only_read_run_nothing(
    words: tuple[str, ...], folder: Path, marker: Path, launch: Launch
) -> None:
    done = launch(0, "-m", "hpctrain", *words)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


FROM = """
[run]
title = "own"
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
        *((verb, "own.toml") for verb in ("run", "plan", "check", "deck")),
    ],
    ids=" ".join,
)
def test_verbs_that_know_no_modules_refuse_and_run_nothing(
    words: tuple[str, ...], folder: Path, marker: Path, launch: Launch
) -> None:
    (folder / "own.toml").write_text(FROM.replace("CHECKPOINT", CHECKPOINT))
    done = launch(0, "-m", "hpctrain", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, (done.stdout, done.stderr)
    assert not marker.exists()


def test_scripts_run_stored_code_only_if_they_trust_it(folder: Path, finished: Path, marker: Path) -> None:
    with pytest.raises(HpctrainError, match=r"module of a user's"):
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
