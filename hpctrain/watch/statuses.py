"""`hpctrain status`: states of runs, read from their folders."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.names import checkpoint_step, checkpoints
from hpctrain.errors import EXIT_DONE, HpctrainError, InputOutputError, require_exists
from hpctrain.files import parse_json, read_text
from hpctrain.report.terminal import columns, fit
from hpctrain.text import command, counted, escaped, fitted
from hpctrain.units import format_count, format_seconds
from hpctrain.watch.evaluation_text import evaluation_note
from hpctrain.watch.folder import is_free, resume_command
from hpctrain.watch.run_files import MARKER
from hpctrain.watch.status import ACTIVE, MAX_FAULTS_OF_RANK, STATUS_BYTES, STATUS_FILE, stored_status

ENDED = ("stopped", "failed", "lost")
"""States of a run that has no job and has steps left to do."""

LATE_STEPS = 10
LATE_SECONDS = 30.0
"""A run is stalled if no step has ended for this multiple of the time of a step plus these seconds."""


def show_statuses(folders: Sequence[Path], as_json: bool, show: Callable[[str], None]) -> int:
    """Show a table, or a JSON list, of the runs in these folders, and return the exit code.

    Other files and folders, which a pattern such as `runs/*` may match, are ignored if there is any run.

    Raises:
        HpctrainError: Some folders have no readable status; raised once the others are shown.
        InputOutputError: One of these is the folder of a run, or does not exist.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    others: list[str] = []
    unreadable = False
    for folder in folders:
        try:
            rows.append(read_status(folder))
        except InputOutputError as error:
            marked = _is_marked(folder)
            unreadable = unreadable or marked or not folder.exists()
            (others if folder.exists() and not marked else problems).extend(error.problems)
    if not rows:
        problems = others + problems
    if as_json:
        show(json.dumps(rows, indent=1))
    elif rows:
        show(statuses_text(rows))
    if problems:
        raise (InputOutputError if unreadable else HpctrainError)(problems)
    return EXIT_DONE


def show_faulty(folders: Sequence[Path], show: Callable[[str], None]) -> int:
    """Show the nodes of runs with too many silent faults, as a list that schedulers accept.

    The list has short names with commas. Nothing is shown if there are none.

    Args:
        folders: Run folders.
        show: Function that prints a line.

    Returns:
        The exit code.

    Raises:
        HpctrainError: A folder is not a run folder.
        InputOutputError: A status cannot be read.
    """
    nodes = dict.fromkeys(
        each["node"].partition(".")[0]
        for folder in folders
        for each in _faulty(folder)
        if each["faults"] >= MAX_FAULTS_OF_RANK
    )
    if nodes:
        show(",".join(map(escaped, nodes)))
    return EXIT_DONE


def _faulty(folder: Path) -> list[dict[str, Any]]:
    """Return the ranks of a run that had silent faults, with their nodes."""
    try:
        ranks = read_status(folder).get("faulty") or []
    except InputOutputError as error:
        unreadable = _is_marked(folder) or not folder.exists()
        raise (InputOutputError if unreadable else HpctrainError)(error.problems) from None
    kinds = {"node": str, "faults": int}
    if not isinstance(ranks, list) or not all(
        isinstance(each, dict) and all(isinstance(each.get(name), kind) for name, kind in kinds.items())
        for each in ranks
    ):
        raise InputOutputError(
            f"{folder / STATUS_FILE}: is not the status of a run (`faulty` is not a list of ranks)"
        )
    return ranks


def _is_marked(folder: Path) -> bool:
    """Return True if a folder has the marker of a run, or a status file."""
    return any((folder / name).exists() for name in (MARKER, STATUS_FILE))


def read_status(folder: Path, finds_checkpoint: bool = True) -> dict[str, Any]:
    """Return the status of a run, with fields that its folder shows.

    - `folder`: The folder.
    - `state`: "lost" if the file names a running job but no process has locked the folder, "stalled" if no
      step has ended for a long time, else the state in the file.
    - `seconds_since_step`: Seconds since the last step, for a run that has a job.
    - `checkpoint`: Newest good checkpoint, even if the run could not write it to the file.
    - `go_on`: Command that resumes a run which ended before its last step; "" if there is none. If the last
      steps made no update, the command starts before them.

    Args:
        folder: The run folder.
        finds_checkpoint: True to look for the checkpoint and the command.

    Raises:
        HpctrainError: The folder does not exist.
        InputOutputError: It has no readable status.
    """
    require_exists(folder, "run folder")
    path = folder / STATUS_FILE
    try:
        status: dict[str, Any] = parse_json(read_text(path, STATUS_BYTES))
        status |= {"folder": str(folder), **_observed_state(status, folder)}
        newest = _newest_valid(folder, status.get("checkpoint")) if finds_checkpoint else None
        last_update = _last_update(status)
        if finds_checkpoint and last_update is not None:
            before = _newest_valid(folder, None, last_update)
            status["go_on"] = resume_command(folder, before, by_name=True)
    except OSError as error:
        below = f"; {command('status')} expects run folders, such as {folder}/*" if _has_runs(folder) else ""
        reason = f"cannot be read: {error.strerror or error} (a run writes it during training){below}"
        raise InputOutputError(f"{path}: {reason}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputOutputError(f"{path}: is not the status of a run ({error!r})") from error
    if not finds_checkpoint:
        return status
    status["checkpoint"] = None if newest is None else str(newest)
    if status["state"] in ENDED and last_update is None:
        status["go_on"] = resume_command(folder, newest)
    return status


def _last_update(status: Mapping[str, Any]) -> int | None:
    """Return the step of the last update of a run that ended since later steps made none; else None."""
    step = status.get("last_update")
    return step if status["state"] == "failed" and isinstance(step, int) else None


def _has_runs(folder: Path) -> bool:
    """Return True if folders in this one are run folders."""
    try:
        return any((below / STATUS_FILE).is_file() for below in folder.iterdir())
    except OSError:
        return False


def is_done(folder: Path) -> bool:
    """Return True if the status of a run says that all of its steps are done."""
    return stored_status(folder).get("state") == "done"


def _observed_state(status: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state and `seconds_since_step` of a run that has a job according to its file; else {}."""
    state, step_time, written = status["state"], status.get("step_time"), _seconds_since(status["time"])
    if state not in ACTIVE:
        return {}
    late = LATE_STEPS * (status.get("step_seconds") or 0.0) + LATE_SECONDS
    since = None if step_time is None else _seconds_since(step_time)
    # From another node, a file system with locks of each node's own shows every folder as free.
    certain = status.get("host") == socket.gethostname() or written > late
    if certain and is_free(folder):
        state = "lost"
    elif state == "running" and since is not None and since > late:
        state = "stalled"
    return {"state": state, "seconds_since_step": since}


def _newest_valid(folder: Path, known: str | None, last_step: int | None = None) -> Path | None:
    """Return the newest complete checkpoint of a run, of at most this step if one is given; None without any.

    `known` is one that the run knew, which was verified when written.
    """
    for path in checkpoints(folder / "checkpoints"):
        if last_step is not None and (checkpoint_step(path) or 0) > last_step:
            continue
        if known is not None and path.name == Path(known).name:
            return path
        from hpctrain.checkpoint.retention import is_complete  # with torch, which takes seconds

        if is_complete(path):
            return path
    return Path(known) if known is not None and Path(known).is_file() else None


def statuses_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of runs, and notes on single runs below it."""
    head = ("run", "state", "step", "loss", "tokens/s", "left", "last step", "ranks", "job", "checkpoint")
    cells = [head, *map(_cells, rows)]
    notes = [f"{row['folder']}: {note}" for row in rows for note in _notes(row)]
    width = columns()
    lines = [*fitted(cells, (0, 1, 8, 9), width), *([""] if notes else [])]
    lines += [line for note in notes for line in fit(note, width)]
    return "\n".join(map(escaped, lines))  # anybody may have written such a file


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    active = "seconds_since_step" in row and row["state"] != "lost"
    left, since = row.get("seconds_left"), row.get("seconds_since_step")
    loss, rate = row.get("loss"), row.get("tokens_per_s")
    unit = " samples" if row.get("counts") == "samples" else ""
    ago = (row.get("step_time") or "").replace("T", " ").removesuffix("Z")
    if since is not None:
        ago = f"{format_seconds(round(since))} ago" if since >= 1 else "now"
    return (
        row["folder"],
        row["state"],
        f"{row.get('step', 0)}/{row.get('steps', '?')}",
        "" if loss is None else f"{loss:.4f}",
        "" if rate is None or not active else format_count(rate) + unit,
        "" if left is None or not active else format_seconds(round(left)),
        ago,
        str(row.get("ranks", "")),
        row.get("job") or f"process {row.get('pid')} on {row.get('host')}",
        row.get("checkpoint") or "none",
    )


def _notes(row: dict[str, Any]) -> list[str]:
    notes = [_reason(row)] if row.get("reason") else []
    if row["state"] == "lost":
        notes.append("its job ended without writing its state")
    if row.get("go_on") and _last_update(row) is not None:
        notes.append(
            "change what `hpctrain guide loss-spikes` names, and repeat these steps with "
            f"`{row['go_on']} --set KEY=VALUE`"
        )
    elif row.get("go_on"):
        notes.append(f"resume with `{row['go_on']}`")
    if row["state"] == "stalled":
        notes.append(f"the last steps took {format_seconds(row.get('step_seconds') or 0.0)} each")
    notes += evaluation_note(row)
    if row.get("silent_faults"):
        notes.append(f"{counted(row['silent_faults'], 'silent fault')} found so far (faults.jsonl)")
    return notes + [slow["words"] for slow in row.get("stragglers") or []]


def _reason(row: Mapping[str, Any]) -> str:
    """Return why a run ended, without the path of its folder, with which the note begins anyway."""
    reason, start = str(row["reason"]), row.get("started_in")
    path, colon, rest = reason.partition(": ")
    named, folder = Path(start if isinstance(start, str) else "", path), Path(row["folder"])
    same = os.path.normpath(named.absolute()) == os.path.normpath(folder.absolute())
    return rest if colon and same else reason


def _seconds_since(text: str) -> float:
    then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
