"""Names of all files that a run writes to its folder, and the deletion of an earlier run.

Only files with these names are deleted. The folder remains, with its marker and its lock, for which another
job may wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpctrain.errors import HpctrainError
from hpctrain.files import delete_files, delete_folder, files_named, write_text
from hpctrain.memory.offload_folder import delete_offload_folder, delete_scratch, is_scratch
from hpctrain.text import escaped

MARKER = ".hpctrain-run"
"""File that marks a run folder."""

LOCK = "lock"
"""File that is locked while a job writes to the folder. It names the job."""

CHECKPOINT_FILE, STOP_FILE = "checkpoint", "stop"
"""Empty files by which users request a checkpoint or a stop, as by SIGUSR1 and SIGUSR2."""

_MARK = "The folder of a run. hpctrain writes here; `hpctrain run --fresh` deletes what a run wrote.\n"

_CHECKPOINTS, _OFFLOAD, _PLOTS, _EVENTS = "checkpoints", "offload", "plots", "tensorboard"

_FILE = (
    r"deck\.toml(\.new)?|metrics\.jsonl(\.new)?|faults\.jsonl|status\.json(\.new)?|ledger\.json|plan\.json|peak\.json|trace\.json(\.partial)?"
    r"|metrics\.csv(\.new)?|dashboards\.json"
    r"|samples\.jsonl(\.new)?|\.?reference\.h5(\.tmp|\.partial)?|\.?reference\.[\w.-]+\.npy(\.partial)?"
    r"|routing\.h5|\.routing\.h5\.partial|mirror\.json(\.new)?"
    r"|log(\.\d+)?\.txt|\.?hang\.(\d+\.txt(\.new)?|ask(\.\d+)?)|\.seen-[0-9a-f]{32}"
)
_WRITTEN = re.compile(rf"{_FILE}|{re.escape(LOCK)}|{re.escape(MARKER)}")
_CHECKPOINT = r"step-\d{8,}\.h5|\.step-\d{8,}\.h5\.tmp"
_LINKS = ("latest", ".latest.tmp", "best", ".best.tmp")
_EVENT_FILE = r"events\.out\.tfevents\.\d+\.[^/]+"
_PICTURE = (
    r"(loss|learning_rate|throughput|grad_norm|noise_scale|fp8|reward|accuracy|expert_load|schedule)\.png"
)

_AT_LEAST = {"deck.toml", "log.txt", LOCK}
"""Files that every run wrote before there was a marker."""

_NAMES_SHOWN = 5


def mark(folder: Path) -> None:
    """Write the marker file to a run folder."""
    path = folder / MARKER
    if not os.path.lexists(path):
        write_text(path, _MARK)


def is_run(folder: Path) -> bool:
    """Return True if a run wrote into a folder: it has the marker, or the files of older runs without one."""
    names = _names(folder)
    if MARKER in names:
        return (folder / MARKER).is_file() and not (folder / MARKER).is_symlink()
    return "deck.toml" in names and bool(names & {LOCK, "metrics.jsonl"})


def is_bare(folder: Path) -> bool:
    """Return True if a folder has no files of a run and no other files.

    A job creates the lock and the offload folder before it marks the folder, so these do not count.
    """
    return _names(folder) <= {LOCK, _OFFLOAD}


def names_of_a_run(folder: Path) -> list[str]:
    """Return the files in a folder that have names of a run's files, without lock and marker.

    The folder of checkpoints is included if it contains checkpoints.
    """
    names = {name for name in _names(folder) if re.fullmatch(_FILE, name)}
    inner = _names(folder / _CHECKPOINTS)
    if any(re.fullmatch(_CHECKPOINT, name) for name in inner) or (
        os.path.lexists(folder / _CHECKPOINTS) and not is_run(folder)
    ):
        names.add(_CHECKPOINTS)
    return sorted(names)


def remove_run(folder: Path, needed: Sequence[str] = ()) -> list[str]:
    """Delete the files of an earlier run, whose folder the caller has locked.

    Args:
        folder: The run folder.
        needed: Files that must not be deleted.

    Returns:
        Names of files that are not a run's, which are kept.

    Raises:
        HpctrainError: The folder is not a run folder, is a folder such as the home folder, contains other
            files and no marker, or contains a needed file. Nothing is deleted then.
    """
    if not is_run(folder):
        raise HpctrainError(
            f"{folder}: holds no run (no {MARKER}), so nothing in it is deleted; choose another run.dir"
        )
    kind = kind_of_folder(folder)
    if kind:
        raise HpctrainError(
            f"{folder}: is {kind}, where no earlier run is deleted; choose another run.dir, or delete by "
            f"hand what a run wrote there ({listed(names_of_a_run(folder))})"
        )
    foreign, names = list(_foreign(folder)), _names(folder)
    if MARKER not in names and (foreign or not names >= _AT_LEAST):
        besides = f" and also holds {listed(foreign)}" if foreign else ""
        raise HpctrainError(
            f"{folder}: may hold a run, but has no {MARKER}{besides}, so nothing in it is deleted; "
            "choose another run.dir, or delete the run by hand"
        )
    blocking = [name for name in foreign if re.fullmatch(f"checkpoints/({_CHECKPOINT})", name)]
    if blocking:
        _refuse(folder, blocking)
    for name in needed:
        path = Path(name).resolve()
        pattern = {folder.resolve(): _FILE, folder.resolve() / _CHECKPOINTS: _CHECKPOINT}.get(path.parent)
        if pattern is not None and re.fullmatch(pattern, path.name):
            raise HpctrainError(
                f"{folder}: {name}, which this run reads, belongs to the run that would be deleted; "
                "move it elsewhere, or choose another run.dir"
            )
    _delete(folder)
    return foreign


def remove_replayed(folder: Path) -> None:
    """Delete the files of a replayed run, and its folder if nothing else is in it."""
    with suppress(OSError):
        delete_folder(folder, _is_run_file)


def refuse_unfit(folder: Path) -> None:
    """Check that files that a run will write are not links, pipes or other special files.

    Folders that a run makes may be links, for example to a larger disk.

    Raises:
        HpctrainError: Some are.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        unfit = sorted(entry.name for entry in entries if _is_unfit(entry))
    if unfit:
        _refuse(folder, unfit)


def _refuse(folder: Path, names: Sequence[str]) -> NoReturn:
    raise HpctrainError(
        f"{folder}: holds {listed(names)}, which a run would write, but which is a link or not a regular "
        "file; move it elsewhere, or choose another run.dir"
    )


def _is_unfit(entry: os.DirEntry[str]) -> bool:
    if entry.name in _RUN_FILE_CHECKS:
        return not entry.is_dir()
    return bool(_WRITTEN.fullmatch(entry.name)) and not entry.is_file(follow_symlinks=False)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return escaped(", ".join(names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def is_request(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is a request to a run: an empty file with such a name."""
    if entry.name not in {CHECKPOINT_FILE, STOP_FILE} or not entry.is_file(follow_symlinks=False):
        return False
    return entry.stat(follow_symlinks=False).st_size == 0


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def kind_of_folder(folder: Path) -> str:
    """Return the kind of a folder in which no run is deleted, such as a home folder; "" for other folders."""
    path = folder.resolve()
    if folder.is_symlink():
        return "a symbolic link"
    if Path.cwd().is_relative_to(path):
        return "the current folder, or one above it"
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111  (Path.home fails where there is none)
    if home.is_relative_to(path):
        return "the home folder, or one above it"
    mounted = _mount_points()
    if path.is_mount() or str(path) in mounted:
        return "a mount point"
    for name in (_CHECKPOINTS, _OFFLOAD, _PLOTS, _EVENTS):
        if (folder / name).is_symlink():
            return f"a folder whose {name} is a symbolic link"
        if (path / name).is_mount() or str(path / name) in mounted:
            return f"a folder whose {name} is a mount point"
    return ""


def _mount_points() -> set[str]:
    """Return the mount points of the kernel, including those on the file system of their parents."""
    try:
        lines = (
            Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        )
    except OSError:
        return set()
    return {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines}


def _foreign(folder: Path) -> Iterator[str]:
    """Yield the paths in a folder that do not belong to a run, relative to the folder, in order."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if not entry.is_dir(follow_symlinks=False):
                if entry.name not in {LOCK, MARKER} and not _is_run_file(entry):
                    yield entry.name
            elif entry.name in _RUN_FILE_CHECKS:
                with os.scandir(entry.path) as inner:
                    names = sorted(each.name for each in inner if not _RUN_FILE_CHECKS[entry.name](each))
                yield from (f"{entry.name}/{name}" for name in names)
            else:
                yield f"{entry.name}/"


def _delete(folder: Path) -> None:
    for name in (_CHECKPOINTS, _PLOTS, _EVENTS):
        if (folder / name).is_dir():
            delete_folder(folder / name, _RUN_FILE_CHECKS[name])
    if (folder / _OFFLOAD).is_dir():
        for each in (folder / _OFFLOAD).iterdir():
            delete_scratch(each)
        delete_offload_folder(folder / _OFFLOAD)
    delete_files(folder, _is_run_file)


def _is_run_file(entry: os.DirEntry[str]) -> bool:
    return files_named(_FILE)(entry) or is_request(entry)


def _is_checkpoint_file(entry: os.DirEntry[str]) -> bool:
    return files_named(_CHECKPOINT)(entry) or (entry.name in _LINKS and entry.is_symlink())


_RUN_FILE_CHECKS = {
    _CHECKPOINTS: _is_checkpoint_file,
    _PLOTS: files_named(_PICTURE),
    _EVENTS: files_named(_EVENT_FILE),
    _OFFLOAD: is_scratch,
}
"""Functions that recognize the files of a run, by the folder that contains them."""
