"""The folder of a run: what may be deleted in it, whose it is, and that two jobs never write to one.

Tests of watch/folder.py and watch/run_files.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.watch.folder import (
    clear_folder,
    explain_no_checkpoint,
    is_free,
    lock_folder,
    lock_run_folder,
    refuse_other_folder,
    refuse_other_run,
    resume_command,
)
from hpctrain.watch.run_files import LOCK, MARKER, mark
from tests.train.test_run import DECK

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

WRITTEN = (
    "deck.toml",
    "metrics.jsonl",
    "log.txt",
    "log.12.txt",
    "status.json",
    "ledger.json",
    "plan.json",
    "trace.json",
    "hang.3.txt",
    ".hang.ask.3",
    ".seen-0123456789abcdef0123456789abcdef",
    "checkpoints/step-00000010.h5",
    "checkpoints/.step-00000020.h5.tmp",
    "plots/loss.png",
    "plots/noise_scale.png",
    "plots/fp8.png",
    "offload/.hpctrain-offload",
    "offload/offload-elsewhere-1-2-rank0-abc/optimizer-0",
)
FOREIGN = (
    "thesis.tex",
    "log.txt.gz",
    "old/deck.toml",
    "checkpoints/best.h5",
    "checkpoints/step-1.h5",
    "plots/mine.png",
    "offload/notes",
)


def deck_of(folder: Path | str, *overrides: str) -> Deck:
    return parse_deck(DECK.format(tokens="x"), [f"run.dir={folder}", *overrides])


def make(folder: Path, names: tuple[str, ...], marked: bool = True) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    if marked:
        mark(folder)


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize(("fresh", "again"), [(True, False), (False, True)])
def test_what_a_run_wrote_goes_and_all_else_stays_and_is_said(
    tmp_path: Path, fresh: bool, again: bool
) -> None:
    folder = tmp_path / "run"
    make(folder, (*WRITTEN, *FOREIGN))
    (folder / "stop").touch()
    (folder / "checkpoint").write_text("what touch does not leave")
    (folder / "checkpoints/latest").symlink_to("step-00000010.h5")
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to("thesis.tex")
    (tmp_path / "precious").mkdir()
    (folder / "link").symlink_to(tmp_path / "precious")
    there = files(folder)
    with pytest.raises(HpctrainError, match=r"holds plan.json, which a run would write, but which is a link"):
        clear_folder(deck_of(folder), fresh, again)
    assert files(folder) == there
    (folder / "plan.json").unlink()
    told = clear_folder(deck_of(folder), fresh, again)
    assert files(folder) == {*FOREIGN, "link", "checkpoint", "offload/.hpctrain-offload", LOCK, MARKER}
    first = "checkpoint, checkpoints/best.h5, checkpoints/step-1.h5, link, log.txt.gz"
    assert told == f"{folder}: kept {first} and 4 more, which no run wrote"


def test_a_folder_that_is_no_runs_is_left_as_it_is(tmp_path: Path) -> None:
    """The user's own deck, and other files: nothing goes, and nothing is written over."""
    make(tmp_path, ("deck.toml", "thesis.tex"), marked=False)
    for fresh, again in ((True, False), (False, True), (False, False)):
        with pytest.raises(
            HpctrainError, match=r"holds no run|contains deck.toml, which the run would write"
        ):
            clear_folder(deck_of(tmp_path), fresh, again)
        assert files(tmp_path) == {"deck.toml", "thesis.tex"}
    clear_folder(deck_of(tmp_path / "absent"), fresh=True, resumes=False)
    (tmp_path / "deck.toml").unlink()
    clear_folder(deck_of(tmp_path), fresh=False, resumes=True)


def test_a_run_from_before_there_was_a_marker(tmp_path: Path) -> None:
    """It is replaced where nothing else is there, and gone on with in any case."""
    make(tmp_path, (*WRITTEN, "lock", "thesis.tex"), marked=False)
    there = files(tmp_path)
    for fresh, again in ((True, False), (False, True)):
        with pytest.raises(HpctrainError, match=r"and also holds thesis.tex, so nothing in it is deleted"):
            clear_folder(deck_of(tmp_path), fresh, again)
        assert files(tmp_path) == there
    refuse_other_folder(deck_of(tmp_path), tmp_path / "checkpoints/step-00000010.h5")
    (tmp_path / "thesis.tex").unlink()
    clear_folder(deck_of(tmp_path), fresh=True, resumes=False)
    assert files(tmp_path) == {LOCK}

    make(tmp_path, ("deck.toml", LOCK), marked=False)
    with pytest.raises(HpctrainError, match="may hold a run"):
        clear_folder(deck_of(tmp_path), fresh=True, resumes=False)


def test_places_where_no_run_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "above" / "run"
    make(run, WRITTEN)
    make(tmp_path / "above", ("deck.toml",))
    there = files(tmp_path)

    def refused(folder: Path | str, what: str) -> None:
        with pytest.raises(HpctrainError, match=f"is {what}.*, where no earlier run is deleted"):
            clear_folder(deck_of(folder), fresh=True, resumes=False)
        assert files(tmp_path) - {"above/lock", "above/run/lock", "link"} == there - {"link"}

    monkeypatch.chdir(run)
    refused(".", "the current folder, or one above it")
    refused(tmp_path / "above", "the current folder, or one above it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(run))
    refused(run, "the home folder, or one above it")
    monkeypatch.delenv("HOME")
    (tmp_path / "link").symlink_to(run)
    refused(tmp_path / "link", "a symbolic link")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == run)
        refused(run, "a mount point")
        for inner in ("checkpoints", "plots", "offload"):
            patch.setattr(Path, "is_mount", lambda path, inner=inner: path == run / inner)
            refused(run, f"a folder whose {inner} is a mount point")
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    there = files(tmp_path) - {"above/lock", "above/run/lock"}
    refused(run, "a folder whose checkpoints is a symbolic link")


def test_mount_points_on_the_same_file_system_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.watch import run_files

    line = r"36 35 98:0 /a /mnt/two\040words rw - ext3 /dev/root rw"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: line + "\n")
    assert run_files._mount_points() == {"/mnt/two words"}


@pytest.mark.parametrize("key", ["data.tokens", "model.from"])
def test_what_the_run_is_to_read_is_not_deleted(tmp_path: Path, key: str) -> None:
    make(tmp_path, WRITTEN)
    (tmp_path / "checkpoints/latest").symlink_to("step-00000010.h5")
    with pytest.raises(HpctrainError, match="which this run reads"):
        clear_folder(deck_of(tmp_path, f"{key}={tmp_path}/checkpoints/latest"), fresh=True, resumes=False)
    assert files(tmp_path) == {*WRITTEN, "checkpoints/latest", LOCK, MARKER}


def test_a_deck_is_refused_where_a_run_is(tmp_path: Path) -> None:
    deck = deck_of(tmp_path)
    refuse_other_run(deck)
    mark(tmp_path)
    refuse_other_run(deck)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000010.h5").touch()
    with pytest.raises(HpctrainError, match=f"hpctrain resume {tmp_path}"):
        refuse_other_run(deck)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    deck = deck_of(folder)
    make(folder, ("deck.toml", "metrics.jsonl"))
    with lock_folder(folder), pytest.raises(HpctrainError, match="another job writes to this run folder"):
        clear_folder(deck, fresh=False, resumes=False)
    assert (folder / "metrics.jsonl").exists()
    clear_folder(deck, fresh=False, resumes=False)
    assert not (folder / "metrics.jsonl").exists()


def test_nobody_is_sent_in_a_circle(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The command that a message tells is the last one: it trains, or finds that all is done."""
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    (tmp_path / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    run = tmp_path / "a run"
    keys = ("run", "small.toml", "--set", "run.dir=a run", "--set", "run.steps=2")
    killed = """
import os, signal
from hpctrain.train.step import Step
Step.__call__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from hpctrain.cli.main import main
main()
"""

    def follow(*command: str) -> None:
        done = launch(0, "-m", "hpctrain", *command)
        told = re.findall(r"`(hpctrain [^`]*)`", done.stdout + done.stderr)
        assert told, done.stderr
        done = launch(0, "-m", "hpctrain", *shlex.split(told[0])[1:])
        assert done.returncode == 0, done.stderr

    assert launch(0, "-c", killed, *keys).returncode == -signal.SIGKILL
    follow("status", "a run")
    there = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = launch(0, "-m", "hpctrain", "resume", "a run")
    assert (done.returncode, "steps are done; continue with `hpctrain resume" in done.stdout) == (0, True)
    done = launch(0, "-m", "hpctrain", "resume", "a run", "--set", "run.steps=1")
    assert done.returncode == 2
    assert "run.steps=1: is below the step of a run/checkpoints/step-00000002.h5, 2;" in done.stderr
    assert there == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    follow(*keys)
    (run / "checkpoints" / "step-00000002.h5").write_bytes(b"damaged")
    follow("resume", "a run")
    assert launch(0, "-c", killed, *keys, "--fresh").returncode == -signal.SIGKILL
    follow("resume", "a run")


def test_going_on_writes_over_nothing_of_others(tmp_path: Path) -> None:
    """A checkpoint that lies by itself leads to a folder two above it, which may be anything."""
    make(tmp_path, ("deck.toml", "backup/step-00000010.h5"), marked=False)
    with pytest.raises(HpctrainError, match=r"contains deck.toml, which the run would write over"):
        refuse_other_folder(deck_of(tmp_path), tmp_path / "backup/step-00000010.h5")
    make(tmp_path / "run", ("deck.toml", "checkpoints/step-00000010.h5"))
    refuse_other_folder(deck_of(tmp_path / "run"), tmp_path / "run/checkpoints/step-00000010.h5")
    with pytest.raises(HpctrainError, match="holds another run"):
        refuse_other_folder(deck_of(tmp_path / "run"), tmp_path / "backup/step-00000010.h5")
    make(tmp_path / "copy", ("checkpoints/step-00000010.h5",), marked=False)
    refuse_other_folder(deck_of(tmp_path / "copy"), tmp_path / "copy/checkpoints/step-00000010.h5")


def test_the_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(OSError, match="symbolic"):
        lock_folder(tmp_path)
    with pytest.raises(HpctrainError, match="holds lock, which a run would write, but"):
        lock_run_folder(tmp_path)
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.parametrize(
    "name",
    ["lock", ".hpctrain-run", "peak.json", "log.txt", "log.7.txt", "metrics.jsonl", "status.json", "plots"],
)
def test_a_pipe_by_a_name_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    """Opening it would wait for ever. A link would lead the run out of its folder."""
    make(tmp_path, ("checkpoints/step-00000010.h5",))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    deck, there = deck_of(tmp_path), sorted(tmp_path.rglob("*"))
    for begin in (
        lambda: clear_folder(deck, fresh=False, resumes=False),
        lambda: clear_folder(deck, fresh=True, resumes=False),
        lambda: refuse_other_folder(deck, tmp_path / "checkpoints/step-00000010.h5"),
        lambda: lock_run_folder(tmp_path).close(),
    ):
        with pytest.raises(HpctrainError, match=f"holds {name}, which a run would write, but"):
            begin()
    assert sorted(tmp_path.rglob("*")) == there
    assert is_free(tmp_path) == (name != "lock")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../elsewhere")
    with pytest.raises(HpctrainError, match=f"holds {name}, which a run would write, but"):
        lock_run_folder(tmp_path)


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/run"):
        deck = deck_of(tmp_path / place)
        with pytest.raises(HpctrainError, match=r"run\.dir=.*is a file, not a folder"):
            clear_folder(deck, fresh=False, resumes=False)
        with pytest.raises(HpctrainError, match=r"run\.dir=.*is a file, not a folder"):
            refuse_other_folder(deck, tmp_path / "step-00000010.h5")


def test_a_hugging_face_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert explain_no_checkpoint(tmp_path) == (
        f"{tmp_path}: is a Hugging Face folder, not a run folder; "
        f"`hpctrain import {tmp_path} FILE.h5` makes a checkpoint of it"
    )


def test_a_run_that_is_alive_is_not_begun_again(tmp_path: Path) -> None:
    make(tmp_path, ("deck.toml",))
    assert "start again with `hpctrain run " in explain_no_checkpoint(tmp_path)
    with lock_folder(tmp_path):
        assert f"its job is still running (process {os.getpid()} on " in explain_no_checkpoint(tmp_path)
    assert "start again with `hpctrain run " in explain_no_checkpoint(tmp_path)


def test_a_run_begins_again_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relative paths of its deck lead elsewhere from anywhere else."""
    run, place = tmp_path / "runs/small", tmp_path / "a place"
    place.mkdir()
    make(run, ("deck.toml",))
    (run / "status.json").write_text(json.dumps({"started_in": str(place)}))
    monkeypatch.chdir(tmp_path)
    again = f"hpctrain run {run}/deck.toml --set run.dir={run}"
    assert resume_command(Path("runs/small"), None) == f"cd '{place}' && {again}"
    newest, other = Path("runs/small/checkpoints/step-00000002.h5"), Path("runs/other/checkpoints/step-2.h5")
    assert resume_command(Path("runs/small"), newest) == f"cd '{place}' && hpctrain resume {run}"
    absolute = f"cd '{place}' && hpctrain resume {tmp_path}/{other} --set run.dir={run}"
    assert resume_command(Path("runs/small"), other) == absolute
    monkeypatch.chdir(place)
    assert resume_command(Path("../runs/small"), None) == "hpctrain run ../runs/small/deck.toml"


def corpus(folder: Path, launch: Launch) -> None:
    (folder / "text.txt").write_text("hello world, " * 300)
    (folder / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0


def test_a_run_that_is_refused_costs_no_earlier_one(tmp_path: Path, launch: Launch) -> None:
    """What is wrong may be known late: a tokenizer, a layout, memory."""
    corpus(tmp_path, launch)
    keys = ("small.toml", "--set", "run.dir=run", "--set", "run.steps=2")
    assert launch(0, "-m", "hpctrain", "run", *keys).returncode == 0
    there = files(tmp_path / "run")
    done = launch(0, "-m", "hpctrain", "run", *keys, "--fresh", "--set", "machine.memory=1 MB")
    assert (done.returncode, "does not fit into memory" in done.stderr) == (2, True), done.stderr
    assert files(tmp_path / "run") == there


def test_two_jobs_never_write_to_one_folder(tmp_path: Path, launch: Launch) -> None:
    """The second one ends at once, whatever it was to do; the lock of a job that ended holds nothing."""
    corpus(tmp_path, launch)
    keys = ("--set", "run.dir=run", "--set", "run.steps=2")
    assert launch(0, "-m", "hpctrain", "run", "small.toml", *keys).returncode == 0
    with lock_folder(tmp_path / "run"):
        for command in (("resume", "run"), ("run", "small.toml", "--fresh")):
            done = launch(2, "-m", "hpctrain", *command, *keys, "--set", "run.steps=4")
            assert done.returncode == 2, done.stderr
            assert done.stderr.count("another job writes to this run folder (process ") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.h5").exists()
    done = launch(0, "-m", "hpctrain", "resume", "run", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr


def test_all_that_a_run_leaves_is_known_by_name(tmp_path: Path, launch: Launch) -> None:
    """Else a fresh run would leave it, and say so. What lies beside it stays, and both ranks go on."""
    corpus(tmp_path, launch)
    keys = ("--set", "run.dir=run", "--set", "run.trace=true", "--set", "memory.optimizer=disk")
    command = ("-m", "hpctrain", "run", "small.toml", *keys, "--set", "run.steps=2")
    assert launch(2, *command).returncode == 0
    assert launch(0, "-m", "hpctrain", "plot", "run").returncode == 0
    assert MARKER in files(tmp_path / "run")
    done = launch(2, *command, "--fresh")
    assert done.returncode == 0, done.stderr
    assert "no run wrote" not in done.stdout
    (tmp_path / "run/thesis.tex").write_text("years of work")
    done = launch(2, *command, "--fresh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run: kept thesis.tex, which no run wrote") == 1
    assert "kept thesis.tex, which no run wrote" in (tmp_path / "run/log.txt").read_text()
    assert (tmp_path / "run/thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("flag", ["--resume", "--fresh"])
def test_a_deck_in_the_folder_where_all_is_written_is_not_deleted(
    tmp_path: Path, launch: Launch, flag: str
) -> None:
    corpus(tmp_path, launch)
    text = DECK.format(tokens="tokens.h5").replace("[run]", '[run]\ndir = "."')
    (tmp_path / "deck.toml").write_text(text)
    there = files(tmp_path)
    done = launch(2, "-m", "hpctrain", "run", "deck.toml", flag)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("hpctrain: error: ") == 1
    assert files(tmp_path) == there
    assert (tmp_path / "deck.toml").read_text() == text
    assert text != deck_text(parse_deck(text))


def test_links_of_folders_are_not_deleted_through(tmp_path: Path) -> None:
    from hpctrain.files import delete_files, files_named

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/a.txt").touch()
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        delete_files(tmp_path / "link", files_named(".*"))
    (tmp_path / "precious/b.txt").symlink_to("a.txt")
    assert delete_files(tmp_path / "precious", files_named(".*")) == ["b.txt"]


def test_make_clean_deletes_what_make_wrote(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "Makefile").write_bytes((root / "Makefile").read_bytes())
    for name in ("hpctrain", "tests", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    make(tmp_path, (".venv/hpctrain.env", "build/lib/x", "runs/quickstart-data/tokens.h5"), marked=False)
    make(tmp_path / "runs/quickstart", WRITTEN)
    foreign = {".venv-mine/x", "build/notes", "runs/quickstart-data/notes", "mine.egg-info"}
    make(tmp_path, tuple(foreign), marked=False)

    def clean() -> None:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(
            ["make", "clean"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    clean()
    assert files(tmp_path) == {*foreign, "Makefile"}
    assert not (tmp_path / "runs/quickstart").exists()

    make(tmp_path / "runs/quickstart", (*WRITTEN, "thesis.tex"))
    clean()  # without an environment, which knows what a run writes
    assert (tmp_path / "runs/quickstart/thesis.tex").exists()


def test_no_command_is_named_that_is_refused(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make(folder, ("deck.toml",))
    elsewhere.mkdir()
    (folder / "checkpoints").symlink_to(elsewhere)
    for names, fresh in (((), False), (("step-00000002.h5",), True)):
        make(elsewhere, names, marked=False)
        with pytest.raises(HpctrainError, match="where no earlier run is deleted"):
            clear_folder(deck_of(folder), fresh, resumes=False)
        there = f"{folder} is a folder whose checkpoints is a symbolic link, where no run is deleted"
        line = f"hpctrain run {folder}/deck.toml{' --fresh' * fresh} --set run.dir=FOLDER"
        assert f"{there}: start in another one with `{line}`" in explain_no_checkpoint(folder)
        assert clear_folder(deck_of(tmp_path / "another"), fresh, resumes=False) == ""


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOLCK, errno.ESTALE, errno.EPERM])
def test_locks_that_fail_in_any_way_are_a_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_folder(tmp_path).close()
    told = f"{tmp_path}: this file system has no locks ({os.strerror(code)}): nothing keeps a second job out"
    assert told in caplog.text
