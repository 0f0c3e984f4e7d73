"""Tests that a stopped rank ends the job in each verb, from the first collective call to the end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest

from hpctrain.comm.hangs.hang_settings import HANG_SECONDS_VARIABLE, default_seconds
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare
from tests.small_work import write_small_work

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


# Program that runs the command line and stops rank 1 when it calls a function.
PROGRAM = """
import os, signal, sys, tempfile
from importlib import import_module

tempfile.tempdir = os.environ["TMPDIR"]  # a warm process has already cached another folder

module, _, name = sys.argv.pop(1).partition(":")
owner, *path = [import_module(module), *name.split(".")]
for each in path[:-1]:
    owner = getattr(owner, each)
original = getattr(owner, path[-1])

def stopped(*arguments, **options):
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*arguments, **options)

setattr(owner, path[-1], stopped)
from hpctrain.cli.main import main
main()
"""

CHECKPOINT = "done/checkpoints/step-00000002.h5"
RUN = ("run", "deck.toml", "--set", "run.dir=fresh")
# By id: the function in which rank 1 stops, the activity of the other ranks, and the command.
PLACES = {
    "launcher": ("hpctrain.comm.world:find_contradictions", "starting", RUN),
    "start": ("hpctrain.comm.world:mark_segments", "starting", RUN),
    "deck": ("hpctrain.comm.world:World.use_device", "reading the deck", RUN),
    "checks": (
        "hpctrain.comm.call_check:CallChecks.check_group",
        "reading the deck",
        (*RUN, "--set", "communication.check=true"),
    ),
    "memory": ("hpctrain.comm.group_factory:open_node_memory", "planning the layout", RUN),
    "zeros": (
        "hpctrain.comm.transports.shared:SharedTransport.common_zeros",
        "building the model",
        (*RUN, "--set", "layout.zero=3"),
    ),
    "tokens": ("hpctrain.data.corpus:open_entries", "opening the training data", RUN),
    "build": ("hpctrain.train.run_construction:build_partition_within_memory", "building the model", RUN),
    "folder": ("hpctrain.train.startup:check_run_folder", "locking the run folder", RUN),
    "load": (
        "hpctrain.train.checkpoints:Checkpoints.restore",
        "loading the model",
        ("resume", CHECKPOINT, "--set", "run.steps=3", "--set", "run.dir=resumed"),
    ),
    "checkpoint": ("hpctrain.train.checkpoints:Checkpoints.save", "training", RUN),
    "ledger": (
        "hpctrain.train.memory_ledger:MemoryLedger.at_end",
        "writing the ledger and the reports",
        RUN,
    ),
    "end": ("hpctrain.comm.world:World.finish", "ending", RUN),
    "finalize": ("hpctrain.comm.group_factory:GroupFactory.close_memories", "ending", RUN),
    "evaluate": (
        "hpctrain.train.evaluate:mean_metrics",
        "evaluating",
        ("evaluate", CHECKPOINT, "--tokens", "tokens.h5"),
    ),
    "generate": (
        "hpctrain.generate.generate_command:load_model",
        "loading the model",
        ("generate", CHECKPOINT, "--prompt", "hello", "--tokens", "4"),
    ),
    "prepare": (
        "hpctrain.data.prepare_text:examine",
        "examining the text files",
        ("prepare", "other.h5", "text.txt"),
    ),
    "write": (
        "hpctrain.data.token_writer:TokenWriter._write",
        "writing the token file",
        ("prepare", "other.h5", "text.txt"),
    ),
    "export": (
        "hpctrain.checkpoint.exchange.convert:require_new",
        "writing the exported model",
        ("export", CHECKPOINT, "exported"),
    ),
    "check": (
        "hpctrain.train.layout_check:compare_scaled_down",
        "comparing the layout with one rank",
        ("check", "deck.toml"),
    ),
}


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a text, its tokens, a deck and a finished run."""
    folder = tmp_path_factory.mktemp("stopped")
    tokens = {"tokens": str(folder / "tokens.h5")}
    write_small_work(folder, run={"title": "stopped"}, data=tokens, stability={"hang_seconds": 1.5})
    (folder / "program.py").write_text(PROGRAM)
    prepare(world.single_rank_world(), folder / "tokens.h5", [str(folder / "text.txt")])
    run_deck(world.single_rank_world(), folder / "deck.toml", [f"run.dir={folder / 'done'}"])
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_each_place_exists(place: str) -> None:
    assert callable(resolve_name(PLACES[place][0]))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", PLACES)
def test_diagnosis_names_the_stopped_rank_and_the_activity(launch: Launch, folder: Path, place: str) -> None:
    function, activity, command = PLACES[place]
    environment = {HANG_SECONDS_VARIABLE: "1.5", "TMPDIR": str(folder)}
    done = launch(2, folder / "program.py", function, *command, cwd=folder, own_end=True, **environment)
    assert done.returncode == 70, (done.returncode, done.stdout, done.stderr)
    assert f"error: the run hangs while {activity}" in done.stderr
    diagnosis = "error: rank 1 does not answer: its process is stopped, as by SIGSTOP or a debugger\n"
    assert done.stderr.count(diagnosis) == 1
    assert "error: rank 0 on " in done.stderr
    assert "Traceback" not in done.stderr


def test_environment_sets_the_time_limit_without_a_deck() -> None:
    assert default_seconds({}) == 600
    assert default_seconds({HANG_SECONDS_VARIABLE: "2 min"}) == 120
    assert default_seconds({HANG_SECONDS_VARIABLE: "0"}) == 0
    with pytest.raises(
        HpctrainError, match=f'{HANG_SECONDS_VARIABLE}: "soon" is not a time: .* turns the watchdog off'
    ):
        default_seconds({HANG_SECONDS_VARIABLE: "soon"})
