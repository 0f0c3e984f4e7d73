"""Folder of a run: which run it belongs to, and the lock by which only one job writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from hpctrain.checkpoint.mirror_folder import read_token
from hpctrain.checkpoint.names import checkpoints
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import token_files
from hpctrain.errors import HpctrainError
from hpctrain.files import delete_folder, files_named, naming, open_regular, read_text
from hpctrain.text import command, command_line
from hpctrain.watch.run_files import (
    LOCK,
    MARKER,
    is_bare,
    is_run,
    kind_of_folder,
    listed,
    mark,
    names_of_a_run,
    refuse_unfit,
    remove_run,
)
from hpctrain.watch.status import stored_status

_SECONDS_BETWEEN_TRIES = 0.1
"""Seconds after which a lock is tried again. A process that checks if the folder is free holds it briefly."""

_LOCK_BYTES = 1000
_UNKNOWN = "unknown"


def must_replace_run(deck: Deck, fresh: bool, resumes: bool) -> bool:
    """Check the folder of a new run. Return True if the files of an earlier run must be deleted there.

    They are deleted with `fresh`, or if the earlier run ended before its first checkpoint. If the file system
    has no locks, nothing shows whether it has ended, so they are then deleted only with `resumes`.

    Raises:
        HpctrainError: The folder contains files that the run would overwrite.
    """
    folder = Path(deck.run.dir)
    _refuse_file(deck)
    refuse_unfit(folder)
    ended_early = resumes or not checkpoints(folder / "checkpoints")
    ended_early = ended_early and is_run(folder) and bool(names_of_a_run(folder))
    if ended_early and not (fresh or resumes or is_free(folder)):
        with lock_folder(folder):  # only where the file system has no locks
            held = "holds a run without a checkpoint that may be running; wait until it ends, or replace it"
            raise HpctrainError(deck.problem("run.dir", f"{held} with `--fresh`"))
    if ended_early and not (fresh or resumes) and read_token(folder) is not None:
        held = "holds a run whose state its nodes may still have in memory"
        remedy = f"resume it with `{resume_command(folder, None)}`, or replace it with `--fresh`"
        raise HpctrainError(deck.problem("run.dir", f"{held}; {remedy}"))
    if ended_early or (fresh and not is_bare(folder)):
        return True
    refuse_other_run(deck)
    return False


def _refuse_file(deck: Deck) -> None:
    """Raise HpctrainError if a run's folder, or a folder above it, is a file."""
    for path in (folder := Path(deck.run.dir), *folder.parents):
        if path.exists() and not path.is_dir():
            above = "" if path == folder else f"lies below {path}, which "
            raise HpctrainError(deck.problem("run.dir", f"{above}is a file, not a folder"))


def clear_folder(deck: Deck, fresh: bool, resumes: bool, needed: Sequence[str] = ()) -> str:
    """Delete the files of an earlier run from the folder of a new run, if `must_replace_run` says so.

    Call this on rank 0.

    Args:
        deck: Deck of the run.
        fresh: True to delete any earlier run.
        resumes: True if the same run continues.
        needed: Files that the run reads besides those of its deck. They must not be deleted.

    Returns:
        A sentence about files that are not a run's and are kept; "" if there are none.

    Raises:
        HpctrainError: As in `must_replace_run` and `remove_run`.
    """
    if not must_replace_run(deck, fresh, resumes):
        return ""
    foreign_files = _remove(Path(deck.run.dir), [*needed, *_files_of(deck)], warns=not fresh)
    refuse_other_run(deck)
    return foreign_files


def delete_run(folder: Path) -> None:
    """Delete a run, and its folder if nothing else is in it.

    Raises:
        HpctrainError: As in `remove_run`.
    """
    if is_run(folder):
        with lock_folder(folder):
            if not remove_run(folder):
                delete_folder(folder, files_named(f"{re.escape(LOCK)}|{re.escape(MARKER)}"))


def refuse_other_run(deck: Deck) -> None:
    """Check that a run's folder contains no other run and no files that the run would overwrite.

    Raises:
        HpctrainError: It does.
    """
    folder = Path(deck.run.dir)
    there = names_of_a_run(folder)
    if is_run(folder) and {"deck.toml", "metrics.jsonl", "checkpoints"}.intersection(there):
        go_on = resume_command(folder, next(iter(checkpoints(folder / "checkpoints")), None))
        held = f"holds another run already; resume it with `{go_on}`, replace it with `--fresh`, or"
        raise HpctrainError(deck.problem("run.dir", f"{held} choose another run.dir or run.title"))
    if there and not is_run(folder):
        held = f"is not a run folder, but contains {listed(there)}, which the run would write over;"
        raise HpctrainError(deck.problem("run.dir", f"{held} choose another run.dir or run.title"))


def resume_command(folder: Path, newest: Path | None, by_name: bool = False) -> str:
    """Return the command that continues a run whose job has ended; "" if there is none.

    Args:
        folder: The run folder.
        newest: Its newest good checkpoint. If None, the run continues from what its nodes have in memory of
            it, or else begins again.
        by_name: True if the command names this checkpoint even if a resumed run takes it anyway.
    """
    start = stored_status(folder).get("started_in")
    elsewhere = isinstance(start, str) and Path(start).is_absolute() and Path(start).is_dir()
    elsewhere = elsewhere and Path(str(start)) != Path.cwd()
    # Relative paths of the deck, and that of the run, are relative to that folder.
    run_path = folder.resolve() if elsewhere else folder
    if newest is None and read_token(folder) is not None:
        line = command_line("resume", run_path)
    elif newest is None:
        if not (folder / "deck.toml").exists():
            return ""
        fresh = ["--fresh"] if checkpoints(folder / "checkpoints") else []
        here = ["--set", f"run.dir={run_path}"] if elsewhere else []
        line = command_line("run", run_path / "deck.toml", *here, *fresh)
    elif newest.parent.absolute() == (folder / "checkpoints").absolute():
        named = newest.absolute() if elsewhere else newest
        line = command_line("resume", named if by_name else run_path)
    else:
        line = command_line(
            "resume", newest.resolve() if elsewhere else newest, "--set", f"run.dir={run_path}"
        )
    return f"cd {shlex.quote(str(start))} && {line}" if elsewhere else line


def explain_no_checkpoint(folder: Path) -> str:
    """Return why no run can be resumed from a folder without a good checkpoint, and what to do instead."""
    if (folder / "config.json").is_file() and not (folder / "checkpoints").exists():
        made = f"{command('import', folder, 'FILE.h5')} makes a checkpoint of it"
        return f"{folder}: is a Hugging Face folder, not a run folder; {made}"
    reason, again = (
        f"{folder / 'checkpoints'}: holds no valid checkpoint to resume from",
        resume_command(folder, None),
    )
    if _is_locked(folder):
        holder = _locking_job(folder)
        return (
            f"{reason}; its job is still running ({holder}); wait for its first checkpoint or until it ends"
        )
    kind = kind_of_folder(folder)
    if again and kind and read_token(folder) is None:
        begin = f"start in another one with `{again} --set run.dir=FOLDER`"
        return f"{reason}; {folder} is {kind}, where no run is deleted: {begin}"
    does = "resume" if read_token(folder) is not None else "start again"
    return f"{reason}; {does} with `{again}`" if again else reason


def refuse_other_folder(deck: Deck, checkpoint: Path) -> None:
    """Raise an error if a resumed run would overwrite files in its folder that belong to another run.

    Files of a job that ended before its first checkpoint are allowed: `clear_other_folder` deletes them.
    """
    folder = Path(deck.run.dir)
    _refuse_file(deck)
    refuse_unfit(folder)
    resumes_here = _contains_checkpoint(folder, checkpoint)
    if not (resumes_here or _ended_early(folder)) or not (
        is_run(folder) or names_of_a_run(folder) == ["checkpoints"]
    ):
        refuse_other_run(deck)


def clear_other_folder(deck: Deck, checkpoint: Path) -> str:
    """Delete the files of a job that ended before its first checkpoint from the folder of a resumed run.

    Nothing is deleted if the checkpoint is in that folder. Call this on rank 0.

    Returns:
        A sentence about files that are not a run's and are kept; "" if there are none.
    """
    folder = Path(deck.run.dir)
    if _contains_checkpoint(folder, checkpoint) or not _ended_early(folder):
        return ""
    return _remove(folder, [str(checkpoint), *_files_of(deck)], warns=True)


def _files_of(deck: Deck) -> list[str]:
    """Return the names of the files that a run of a deck reads."""
    source = [deck.model.source] if deck.model.source else []
    sets = (each.tokens for each in deck.evaluation.sets)
    return [*token_files(deck), *sets, deck.layout.schedule, *source]


def _contains_checkpoint(folder: Path, checkpoint: Path) -> bool:
    return checkpoint.resolve().parent == (folder / "checkpoints").resolve()


def _ended_early(folder: Path) -> bool:
    """Return True if the job of the run in a folder has ended and left nothing to resume from."""
    ended = is_run(folder) and bool(names_of_a_run(folder)) and not checkpoints(folder / "checkpoints")
    return ended and is_free(folder) and read_token(folder) is None


def _remove(folder: Path, needed: Sequence[str], warns: bool) -> str:
    """Delete the run in a folder; errors as in `remove_run`.

    Returns:
        A sentence about files that are not a run's and are kept; "" if there are none.
    """
    # A folder without a run is not locked, since that would write a file. The lock file itself is kept, since
    # other jobs may wait for it.
    with lock_folder(folder) if is_run(folder) else contextlib.nullcontext():
        foreign_files = remove_run(folder, needed)
    if warns:
        sentence = "%s: replaces a run that ended before its first checkpoint"
        logging.getLogger("hpctrain").warning(sentence, folder)
    return f"{folder}: kept {listed(foreign_files)}, which no run wrote" if foreign_files else ""


def lock_run_folder(folder: Path) -> TextIO:
    """Create a run's folder if necessary, lock it, and mark it as a run's.

    Returns:
        The lock, as `lock_folder` returns it.

    Raises:
        HpctrainError: Another process has locked it, or it contains a link or a special file in place of a
            file that the run will write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_unfit(folder)
    lock = lock_folder(folder)
    mark(folder)
    return lock


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the returned file is closed or the process ends.

    If the file system has no locks, a warning is logged.

    Raises:
        HpctrainError: Another process has locked the folder.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    stream = os.fdopen(os.open(folder / LOCK, flags, 0o666), "a+", encoding="utf-8")
    try:
        _lock(stream)
    except BlockingIOError:
        stream.close()
        raise HpctrainError(
            f"{folder}: another job writes to this run folder ({_locking_job(folder)}); "
            "let it end, or choose another run.dir or run.title"
        ) from None
    except OSError as error:
        # File systems without locks report it by different errors.
        logging.getLogger("hpctrain").warning(
            "%s: this file system has no locks (%s): nothing keeps a second job out of the folder",
            folder,
            error.strerror or error,
        )
    job = os.environ.get("SLURM_JOB_ID")
    with naming(folder / LOCK):
        stream.truncate(0)
        stream.write(
            f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
        )
        stream.flush()
    return stream


def is_free(folder: Path) -> bool:
    """Return True if no process has locked the folder. Without locks in the file system, return False."""
    return _is_locked(folder) is False


def running_job(folder: Path) -> str:
    """Return the job that writes to a run's folder now, in words; "" if there is none or it is unknown."""
    return _locking_job(folder) if _is_locked(folder) else ""


def _is_locked(folder: Path) -> bool | None:
    """Return True if a process has locked the folder; None if the file system has no locks."""
    try:
        with open_regular(folder / LOCK) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    return False


def _locking_job(folder: Path) -> str:
    """Return the job that has locked the folder, in words."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(folder / LOCK, _LOCK_BYTES).strip() or _UNKNOWN
    return _UNKNOWN


def _lock(stream: TextIO) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_SECONDS_BETWEEN_TRIES)
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
