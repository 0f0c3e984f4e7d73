"""`hpctrain report`: a report page, made of files in run folders.

Run folders must have metrics. Other missing files are left out, and unreadable ones are listed as problems.
Files are read with limits on their sizes and never changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.names import LATEST, checkpoints
from hpctrain.checkpoint.provenance import HistorySegment, history
from hpctrain.deck.sources import toml_value
from hpctrain.deck.toml import MAX_DECK_BYTES, TomlError, parse_toml
from hpctrain.errors import HpctrainError, InputOutputError, failing_as
from hpctrain.files import check_output, distinct, open_regular, read_text, require_writable
from hpctrain.report.marks import FAULTS_FILE, LOG_FILE, LogLine, StepMark, marks_of, read_faults, read_log
from hpctrain.report.metric_rows import METRICS_FILE, Row
from hpctrain.report.page.page import HEAD, page
from hpctrain.report.page.run_summary import RunEvent, RunSummary, StoredCheckpoint
from hpctrain.report.plots import PlottedRun, load_runs
from hpctrain.report.recorded import TRACE_FILE, RecordedStep, read_trace
from hpctrain.report.samples import SAMPLES_FILE, try_samples
from hpctrain.watch.predicted_vs_measured import compare_with_plan
from hpctrain.watch.run_files import is_run
from hpctrain.watch.status import STATUS_FILE
from hpctrain.watch.statuses import read_status

RANK_FILES = 64
"""Largest number of logs of ranks other than 0, or of reports of hangs, that are read."""

RANK_LINES = 100
"""Lines of each of these logs that are read."""

BEST = "best"
"""Name of the link to the best checkpoint."""

_LOG_OF_RANK = re.compile(r"log\.(\d{1,9})\.txt")
_HANG = re.compile(r"hang\.(\d{1,9})\.txt")
_HANG_LINES = 2
_LINE = 400
_EXAMINED = 3
"""Largest number of checkpoints that are tried until one can be read."""

_OF_STEP = re.compile(r"step (\d{1,15}): (.*)", re.DOTALL)
_WENT_BACK = re.compile(r"returned from step (\d{1,15}): ")
_VALUE_LETTERS = 300
_DECK_KEYS = 5000

_FACTS = {
    "steps": "steps",
    "ranks": "ranks",
    "nodes": "nodes",
    "host": "node of rank 0",
    "job": "job",
    "started": "last started (UTC)",
    "time": "last update (UTC)",
    "started_in": "started in",
}


def write_report(run_dirs: Sequence[Path], output: Path, *, force: bool = False) -> int:
    """Write a report of runs.

    Args:
        run_dirs: Folders of at least one run. A run that is named twice appears once.
        output: File to write. An earlier report is replaced.
        force: True to replace a file that is not a report.

    Returns:
        Size of the report in bytes.

    Raises:
        HpctrainError: Folders are not run folders or have no steps yet, or the output is a folder or another
            file. All problems are reported together.
        InputOutputError: Metrics cannot be read, or the output cannot be written.
    """
    run_dirs = distinct(run_dirs)
    require_runs(run_dirs)
    check_output(output, replace=force or is_report(output))
    require_writable(output)
    content = page(read_runs(run_dirs)).encode()
    partial = output.with_name(f".{output.name}.partial")
    with failing_as(f"{output}: cannot be written"):
        try:
            partial.write_bytes(content)
            partial.replace(output)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
    return len(content)


def require_runs(run_dirs: Sequence[Path]) -> None:
    """Check that all folders are run folders with at least one step.

    Raises:
        HpctrainError: Some are not.
    """
    problems = []
    for folder in run_dirs:
        path = folder / METRICS_FILE
        if not folder.is_dir():
            problems.append(f"{folder}: no such folder; name the folder of a run, such as runs/quickstart")
        elif not path.is_file() and not is_run(folder):
            problems.append(f"{folder}: is not a run folder: it has no {METRICS_FILE}")
        elif not path.is_file() or path.stat().st_size == 0:
            problems.append(f"{folder}: has no steps yet; a report requires at least one")
    if problems:
        raise HpctrainError(problems)


def is_report(path: Path) -> bool:
    """Return True if a file is a report of hpctrain."""
    try:
        with open_regular(path) as stream:
            return stream.read(len(HEAD)) == HEAD.encode()
    except OSError:
        return False


def read_runs(run_dirs: Sequence[Path]) -> list[RunSummary]:
    """Return what a report shows of runs.

    Raises:
        InputOutputError: Metrics of some runs cannot be read. All problems are reported together.
    """
    return [read_run(folder, run) for folder, run in zip(run_dirs, load_runs(run_dirs), strict=True)]


def read_run(folder: Path, run: PlottedRun) -> RunSummary:
    """Return what a report shows of a run.

    Args:
        folder: The run folder.
        run: Metrics of the run.
    """
    problems: list[str] = []
    status = _status(folder, problems)
    tables = _deck(folder / "deck.toml", problems)
    stored, chain = _checkpoints(folder, problems)
    facts = {words: str(status[key]) for key, words in _FACTS.items() if status.get(key) not in (None, "")}
    run_table = tables.get("run")
    title = status.get("title") or (run_table.get("title") if isinstance(run_table, dict) else None)
    return RunSummary(
        name=run.name,
        folder=folder,
        title=title if isinstance(title, str) else "",
        rows=run.rows,
        marks=run.marks,
        counts="samples" if status.get("counts") == "samples" else "tokens",
        state=str(status.get("state", "")),
        reason=str(status.get("reason") or ""),
        facts=facts,
        deck=dict(_deck_keys(tables)),
        comparisons=compare_with_plan(folder, tables, run, problems),
        step=_recorded(folder / TRACE_FILE, problems),
        checkpoints=stored,
        history=chain,
        events=_events(folder, run.rows, status, problems),
        samples=try_samples(folder / SAMPLES_FILE, problems),
        problems=problems,
    )


def _status(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    if not os.path.lexists(folder / STATUS_FILE):
        return {}
    try:
        return read_status(folder)
    except InputOutputError as error:
        problems.extend(error.problems)
        return {}


def _deck(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """Return the tables of a deck without validation, since it may be of another version."""
    try:
        return parse_toml(read_text(path, MAX_DECK_BYTES))[0]
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, TomlError) as error:
        problems.append(f"{path}: is not a deck ({error})")
        return {}


def _deck_keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the full names and the values of the keys of a deck."""
    left = _DECK_KEYS
    for section, content in tables.items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            if left == 0:
                return
            left -= 1
            yield f"{section}.{key}".rstrip("."), toml_value(value)[:_VALUE_LETTERS]


def _recorded(path: Path, problems: list[str]) -> RecordedStep | None:
    """Return the middle step of a trace; None if there is no trace of several stages."""
    if not os.path.lexists(path):
        return None
    try:
        steps = read_trace(path)
    except (HpctrainError, ValueError) as error:
        problems.append(str(error))
        return None
    return steps[len(steps) // 2] if steps and steps[0].schedule.stage_count > 1 else None


def _checkpoints(folder: Path, problems: list[str]) -> tuple[list[StoredCheckpoint], list[HistorySegment]]:
    """Return the checkpoints, newest first, and the chain of runs that led to the newest readable one."""
    inner = folder / "checkpoints"
    try:
        paths = checkpoints(inner)
    except OSError as error:
        problems.append(f"{inner}: cannot be read: {error.strerror or error}")
        return [], []
    links: dict[str, list[str]] = {}
    for name in (LATEST, BEST):
        if (inner / name).is_symlink():
            links.setdefault(Path(os.path.realpath(inner / name)).name, []).append(name)
    stored: list[StoredCheckpoint] = []
    for path in paths:
        with suppress(OSError):  # a run deletes old ones at any time
            status = path.stat()
            written = datetime.fromtimestamp(status.st_mtime, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            stored.append(
                StoredCheckpoint(path, status.st_size, written, ", ".join(links.get(path.name, [])))
            )
    return stored, _history(paths[:_EXAMINED], problems)


def _history(paths: Sequence[Path], problems: list[str]) -> list[HistorySegment]:
    for path in paths:
        from hpctrain.checkpoint.checkpoint_index import examine  # with torch, which takes seconds

        try:
            return history(examine(path).state)
        except HpctrainError as error:
            problems.extend(error.problems[:1])
    return []


def _events(
    folder: Path, rows: Sequence[Row], status: Mapping[str, Any], problems: list[str]
) -> list[RunEvent]:
    """Return warnings in logs, faults, hangs and the end of the run. Events without a log line come first."""
    try:
        log, faults = read_log(folder / LOG_FILE), read_faults(folder / FAULTS_FILE)
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except (InputOutputError, OSError) as error:
        problems.append(str(error))
        log, faults, names = [], [], []
    marks = [mark for mark in marks_of(rows, log, faults) if mark.kind != "resumed"]
    kinds = {_step_of(mark): mark.kind for mark in marks}
    logged_events = [_logged(line, kinds) for line in log]
    known = {event.step for event in logged_events}
    events = [RunEvent("", mark.step, mark.kind, mark.words) for mark in marks if _step_of(mark) not in known]
    events += logged_events
    for rank, name in _rank_files(names, _LOG_OF_RANK):
        with suppress(InputOutputError):
            lines = read_log(folder / name, RANK_LINES)
            # Lines that all ranks log are in the log of rank 0 already.
            logged_texts = {line.text for line in log}
            events += [
                _logged(line, kinds, f"rank {rank}: ") for line in lines if line.text not in logged_texts
            ]
    for _, name in _rank_files(names, _HANG):
        with suppress(OSError), open_regular(folder / name) as stream:
            head = [stream.readline(_LINE).decode(errors="replace").strip() for _ in range(_HANG_LINES)]
            events.append(RunEvent("", None, "hang", " ".join(head)))
    events.sort(key=lambda event: event.time)
    reason = status.get("reason")
    if reason:
        time = str(status.get("time", "")).replace("T", " ").removesuffix("Z")
        step = status.get("step")
        events.append(
            RunEvent(time, step if isinstance(step, int) else None, str(status["state"]), str(reason))
        )
    return events


def _step_of(mark: StepMark) -> int:
    """Return the step that the log names for a mark. After a spike it is that of the spike."""
    match = _WENT_BACK.match(mark.words) if mark.kind == "went back" else None
    return int(match[1]) if match else mark.step


def _logged(line: LogLine, kinds: Mapping[int, str], whose: str = "") -> RunEvent:
    match = _OF_STEP.fullmatch(line.text)
    step, words = (int(match[1]), match[2]) if match else (line.resumed_at, line.text)
    of_step = kinds.get(step, "") if match and step is not None else ""
    kind = "resumed" if line.resumed_at is not None else of_step or line.level.lower()
    return RunEvent(line.time, step, kind, whose + words)


def _rank_files(names: Sequence[str], pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return the numbers of ranks and the names that match a pattern, by rank, at most `RANK_FILES`."""
    files = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
    return files[:RANK_FILES]
