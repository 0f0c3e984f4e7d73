"""Reports in which each rank records its position in the program when a job hangs, and their diagnosis."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from hpctrain.comm.calls import Call, CallHistory, GroupCalls
from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.hangs.flight_recorder import RecordedCall, recorded_calls
from hpctrain.host.process_lifetime import stat_fields

if TYPE_CHECKING:
    from hpctrain.comm.world import World

SHOWN_CALLS = 10
"""Number of calls that the text of a report shows."""

THREAD_PREFIX = "watchdog"
"""Prefix of the names of the watchdog's threads."""

_PACKAGE = Path(__file__).parents[2]
"""Folder of hpctrain."""

_MOST_STATES = 20
"""Largest number of different states of ranks that a diagnosis shows."""

GroupKey = tuple[str, tuple[int, ...], int]
"""Identity of a group, equal on all of its ranks: name, ranks, and number among groups with both the same."""


@dataclass(frozen=True)
class CallNote:
    """One call of a group, in a form that other ranks can read.

    Attributes:
        group: The group.
        operation: Name of the operation, such as "all_reduce".
        number: Number of the call among the group's collective calls, or among the messages to or from the
            peer; 0 if the call has none.
        bytes: Size of the data in bytes.
        dtype: dtype of the data; "" without data.
        peer: Rank in the world that the message goes to or comes from; -1 for collective calls.
        seconds: Seconds since the call began; for the current call, since the rank has waited for it.
        file: Path of the file that the ranks open or close; "" in other calls.
        error: Reason why the call failed on this rank; "" if it did not.
    """

    group: GroupKey
    operation: str
    number: int
    bytes: int
    dtype: str
    peer: int
    seconds: float
    file: str = ""
    error: str = ""

    def __str__(self) -> str:
        """Return the call in words, such as "all_reduce 57 of data (ranks 0-1; 40 bytes of float32)"."""
        payload = f"; {self.bytes} bytes of {self.dtype}" if self.dtype else ""
        payload += f"; {self.file}" if self.file else ""
        name, ranks, _ = self.group
        if self.peer >= 0:
            way = "to" if self.operation == "send" else "from"
            return f"{self.operation} {self.number} {way} rank {self.peer} of {name}{payload}"
        number = f" {self.number}" if self.number else ""  # a receive from any rank has no number
        return f"{self.operation}{number} of {name} ({name_ranks(ranks)}{payload})"


@dataclass(frozen=True)
class GroupNote:
    """Counts of a rank's calls in one group.

    Attributes:
        key: The group.
        entered: Number of collective calls that the rank has entered.
        sent: Number of messages sent, by the receiver's rank in the world.
        received: Number of messages received, by the sender's rank in the world.
    """

    key: GroupKey
    entered: int
    sent: dict[int, int]
    received: dict[int, int]


@dataclass(frozen=True)
class HangReport:
    """Position of one rank in the program when the job hangs.

    Attributes:
        token: Text that is the same on all ranks of the job, and differs from that of earlier jobs in the
            folder.
        rank: Rank in the world.
        hostname: Host name of the rank's node.
        silent: Seconds since the rank's last sign of life.
        phase: Activity of the rank, in words that follow "while".
        where: File, line and function that the rank's main thread executes.
        current: Call of a group that the rank is in, or None.
        recent: Last calls of the rank, oldest first.
        groups: Number of calls of the rank, by group.
        sleeps: True if the rank's main thread sleeps in the kernel, as while a file system does not answer;
            False if it uses the processor, as MPI does while it waits for other ranks.
        incomplete: First call of the process groups of torch that is not complete, in words; "" if there is
            none.
    """

    token: str
    rank: int
    hostname: str
    silent: float
    phase: str
    where: str
    current: CallNote | None
    recent: tuple[CallNote, ...]
    groups: tuple[GroupNote, ...]
    sleeps: bool = False
    incomplete: str = ""

    @property
    def state(self) -> str:
        """Text of the call that the rank is in, and of its position in the program, to follow "is".

        An example is "in no communication call, at hpctrain/train/step.py:12 in run".
        """
        waits = f", and waits for {self.incomplete} to complete" if self.incomplete else ""
        if self.current is None:
            return f"in no communication call, at {self.where}{waits}"
        return f"in {self.current} for {self.current.seconds:.1f} s, at {self.where}{waits}"

    def entered_calls(self, key: GroupKey) -> int:
        """Return the number of collective calls of a group that the rank has entered; 0 if it has none."""
        return next((group.entered for group in self.groups if group.key == key), 0)

    def find_call(self, key: GroupKey, number: int) -> CallNote | None:
        """Return this rank's collective call with a number in a group; None if it is not in `recent`.

        Args:
            key: The group.
            number: Number of the call among the collective calls of the group, from 1.
        """
        here = (note for note in self.recent if note.group == key and note.number == number and note.peer < 0)
        return next(here, None)


@cache
def _report_type() -> TypeAdapter[HangReport]:
    return TypeAdapter(HangReport)


def take_report(world: World, token: str, silent: float) -> HangReport:
    """Return a report of this rank's current position. Local; communicates with no rank and writes nothing.

    It is called from a thread other than the main one, whose position it reports.

    Args:
        world: The world of this rank.
        token: Identity of the job.
        silent: Seconds without a sign of life of this rank.
    """
    calls, now = world.ledger.calls, perf_counter()
    current = calls.current
    note = None if current is None else _note(current, now - max(current.start, calls.waiting_since))
    groups = [_group_note(group) for group in list(calls.groups)]
    incomplete = (_process_group_call(call, calls) for call in recorded_calls() if not call.is_complete)
    return HangReport(
        token,
        world.rank,
        world.hostname,
        silent,
        world.ledger.activity_and_phase,
        _where(),
        note,
        tuple(_note(call, now - call.start) for call in list(calls.recent)),
        tuple(group for group in groups if group.entered or group.sent or group.received),
        stat_fields(Path(f"/proc/self/task/{os.getpid()}/stat"))[:1] in (["S"], ["D"]),
        next(incomplete, ""),
    )


def write_report(path: Path, report: HangReport, size: int) -> None:
    """Write a report as text with the stacks of all threads of this process, and as JSON in its last line.

    Local.

    Args:
        path: File to write; it appears complete or not at all.
        report: The report.
        size: Number of ranks of the world.

    Raises:
        OSError: The file cannot be written.
    """
    lines = [
        f"rank {report.rank} of {size} on {report.hostname}, {time.strftime('%Y-%m-%d %H:%M:%S')}: "
        f"no sign of life for {report.silent:.1f} s, while {report.phase}",
        f"it is {report.state}",
        "",
        f"last calls, newest first ({SHOWN_CALLS} at most):",
        *(f"  {note.seconds:9.3f} s ago  {note}" for note in report.recent[::-1][:SHOWN_CALLS]),
        "",
        "collective calls entered, messages sent and received, by group:",
        *(f"  {line}" for line in _group_lines(report)),
        *_process_group_lines(),
        *_stacks(),
        "",
        "for the other ranks:",
        _report_type().dump_json(report).decode(),
    ]
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_report(path: Path, token: str) -> HangReport | None:
    """Return the report in a file of another rank. Local; does not wait, and raises no error.

    Args:
        path: File of the report.
        token: Identity of this job.

    Returns:
        The report; None if the file does not exist, cannot be read, does not end with a complete report of
        this version of hpctrain, or is of another job.
    """
    try:
        report = _report_type().validate_json(path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2])
    except (OSError, ValueError):
        return None
    return report if report.token == token else None


def diagnose(
    reports: Mapping[int, HangReport], size: int, stopped: Collection[int] = frozenset()
) -> list[str]:
    """Return sentences that say why the job hangs: first any causes, then where the ranks are. Local.

    Nothing is printed. Sentences name the ranks and have no full stop.

    Args:
        reports: Reports by rank, at least one; ranks that could not write one are missing.
        size: Number of ranks of the world.
        stopped: Ranks whose processes are stopped according to the kernel.
    """
    causes = [
        *_missing(reports, size, stopped),
        *_failed(reports),
        *_blocked(reports),
        *_disagreements(reports),
        *_absent(reports),
        *_messages(reports),
    ]
    sentences = causes or list(_fewer_calls(reports))
    states: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        states.setdefault(report.state, []).append(rank)
    # Ranks that are in no call come first, since one of them is usually the cause.
    order = sorted(states.items(), key=lambda item: (reports[item[1][0]].current is not None, item[1]))
    for state, ranks in order[:_MOST_STATES]:
        sentences.append(f"{_on_nodes(ranks, reports)} {'is' if len(ranks) == 1 else 'are'} {state}")
    if len(order) > _MOST_STATES:
        sentences.append(f"and {len(order) - _MOST_STATES} more states of ranks")
    return sentences


def _missing(reports: Mapping[int, HangReport], size: int, stopped: Collection[int]) -> Iterator[str]:
    missing = [rank for rank in range(size) if rank not in reports]
    if halted := [rank for rank in missing if rank in stopped]:
        are = "its process is" if len(halted) == 1 else "their processes are"
        verb = "does" if len(halted) == 1 else "do"
        yield f"{name_ranks(halted)} {verb} not answer: {are} stopped, as by SIGSTOP or a debugger"
    missing = [rank for rank in missing if rank not in stopped]
    if missing:
        words = (
            "do not answer: their processes are" if len(missing) > 1 else "does not answer: its process is"
        )
        yield f"{name_ranks(missing)} {words} dead or stopped, or cannot write to the folder of the reports"


def _waiting(reports: Mapping[int, HangReport], pairs: bool) -> dict[tuple[GroupKey, int], list[int]]:
    """Return the ranks that are in each collective call or, with `pairs`, in each message."""
    waiting: dict[tuple[GroupKey, int], list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.current is not None and (report.current.peer >= 0) == pairs:
            waiting.setdefault((report.current.group, report.current.number), []).append(rank)
    return waiting


def _disagreements(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each call of a group that ranks have made with different arguments."""
    for key, number in _waiting(reports, pairs=False):
        calls: dict[tuple[str, int, str], tuple[CallNote, list[int]]] = {}
        for rank in key[1]:
            note = reports[rank].find_call(key, number) if rank in reports else None
            if note is not None:
                size = 0 if note.operation == "all_to_all" else note.bytes  # ranks may pass different sizes
                calls.setdefault((note.operation, size, note.dtype), (note, []))[1].append(rank)
        if len(calls) > 1:
            texts = [f"{name_ranks(ranks)} called {note}" for note, ranks in calls.values()]
            yield f"the ranks make different calls: {'; '.join(texts)}"


def _failed(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each rank on which a call failed in which other ranks still wait."""
    for (key, number), waiting in _waiting(reports, pairs=False).items():
        for rank in key[1]:
            note = reports[rank].find_call(key, number) if rank in reports and rank not in waiting else None
            if note is not None and note.error:
                yield (
                    f"{note} failed on {_on_nodes([rank], reports)} ({note.error}), and "
                    f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in it"
                )


def _blocked(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each file that all ranks of a group open or close."""
    for (key, _), waiting in _waiting(reports, pairs=False).items():
        call = reports[waiting[0]].current
        blocked = [rank for rank in waiting if reports[rank].sleeps]
        if call is None or not call.file or len(waiting) < len(key[1]):
            continue
        if blocked:
            waits = "waits" if len(blocked) == 1 else "wait"
            yield f"{_on_nodes(blocked, reports)} {waits} for the file system in {call}"
        else:
            yield f"{call} has not returned on any rank; MPI has probably failed in it on one of them"


def _absent(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each call in which ranks wait and that other ranks have not entered.

    Calls that a rank misses without waiting in another call come first.
    """
    lines = []
    for (key, number), waiting in _waiting(reports, pairs=False).items():
        absent = [rank for rank in key[1] if rank in reports and reports[rank].entered_calls(key) < number]
        if absent:
            calls = [call for rank in waiting if (call := reports[rank].current) is not None]
            have = f"{name_ranks(waiting)} {'has' if len(waiting) == 1 else 'have'} waited"
            seconds = max(call.seconds for call in calls)
            line = (
                f"{_on_nodes(absent, reports)} never entered {calls[0]}, in which {have} for {seconds:.1f} s"
            )
            lines.append((all(reports[rank].current is not None for rank in absent), line))
    yield from (line for _, line in sorted(lines, key=lambda each: each[0]))


def _messages(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each rank that waits until a message is received, or until its own is."""
    for ranks in _waiting(reports, pairs=True).values():
        for rank in ranks:
            note = reports[rank].current
            assert note is not None
            peer = reports.get(note.peer)
            there = next((group for group in peer.groups if group.key == note.group), None) if peer else None
            sending = note.operation == "send"
            done = 0 if there is None else (there.received if sending else there.sent).get(rank, 0)
            messages = f"{done} message{'s' * (done != 1)}"
            has = f"has received {messages} from it" if sending else f"has sent {messages} to it"
            answer = "does not answer" if peer is None else f"{has} in total"
            yield f"rank {rank} waits for {note.seconds:.1f} s in {note}; rank {note.peer} {answer}"


def _fewer_calls(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Yield a sentence for each group in which some ranks have made fewer calls than others.

    On GPUs this is the only symptom, since the host does not wait in calls.
    """
    entered: dict[GroupKey, dict[int, int]] = {}
    for rank, report in sorted(reports.items()):
        for group in report.groups:
            entered.setdefault(group.key, {})[rank] = group.entered
    for key, known in entered.items():
        counts = {rank: known.get(rank, 0) for rank in key[1] if rank in reports}
        least, most = min(counts.values()), max(counts.values())
        if least < most:
            behind = [rank for rank, count in counts.items() if count == least]
            ahead = [rank for rank, count in counts.items() if count > least]
            note = reports[ahead[0]].find_call(key, least + 1)
            call = note or f"call {least + 1} of {key[0]} ({name_ranks(key[1])})"
            yield f"{_on_nodes(behind, reports)} never entered {call}, which {name_ranks(ahead)} entered"


def _on_nodes(ranks: list[int], reports: Mapping[int, HangReport]) -> str:
    """Return the ranks in words, with the name of their node if all are on the same one."""
    nodes = {reports[rank].hostname for rank in ranks}
    return name_ranks(ranks) + (f" on {nodes.pop()}" if len(nodes) == 1 else "")


def _note(call: Call, seconds: float) -> CallNote:
    group = call.group
    dtype = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
    peer = group.ranks[call.peer] if call.peer >= 0 else -1
    return CallNote(
        _key(group), call.operation, call.number, call.bytes, dtype, peer, seconds, call.file, call.error
    )


def _group_note(group: GroupCalls) -> GroupNote:
    sent, received = (
        {group.ranks[peer]: count for peer, count in numbers.copy().items()}
        for numbers in (group.sent, group.received)
    )
    return GroupNote(_key(group), group.entered, sent, received)


def _key(group: GroupCalls) -> GroupKey:
    return group.name, group.ranks, group.copy


def _group_lines(report: HangReport) -> Iterator[str]:
    for group in report.groups:
        name, ranks, copy = group.key
        made = f"number {copy + 1} of " if copy else ""
        messages = [f"{count} to rank {rank}" for rank, count in group.sent.items()]
        messages += [f"{count} from rank {rank}" for rank, count in group.received.items()]
        yield f"{made}{name} ({name_ranks(ranks)}): {', '.join([str(group.entered), *messages])}"


def _process_group_lines() -> Iterator[str]:
    """Yield the last calls of torch's process groups, under a title; nothing if there are none."""
    newest = recorded_calls()[::-1][:SHOWN_CALLS]
    if newest:
        yield from ("", f"last calls of torch's process groups, newest first ({SHOWN_CALLS} at most):")
    for call in newest:
        yield f"  {call.seconds:9.3f} s ago  {call}{'' if call.is_complete else ', incomplete'}"


def _process_group_call(call: RecordedCall, calls: CallHistory) -> str:
    """Return a call of a process group in words, with all groups of this rank that use the process group."""
    names = [group.name for group in list(calls.groups) if group.communicator == call.group != group.name]
    sharing = f", shared with {' and '.join(dict.fromkeys(names))}" if names else ""
    return f"{call}{sharing}"


def _where() -> str:
    """Return the line of the main thread and, if that is in comm/ or audit/, the line that called it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no line"
    outside = frame
    while outside.f_back is not None and _is_communication(outside):
        outside = outside.f_back
    return _line(frame) + ("" if outside is frame else f", called at {_line(outside)}")


def _is_communication(frame: FrameType) -> bool:
    """Return True if a frame belongs to comm/ or audit/, or to a context manager's machinery."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(("hpctrain.comm.", "hpctrain.audit.")) or name == "contextlib"


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(_PACKAGE):
        path = path.relative_to(_PACKAGE.parent)
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"


def _stacks() -> Iterator[str]:
    """Yield the lines of the stacks of all threads except the watchdog's; the main thread comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(THREAD_PREFIX):
            yield ""
            yield f"stack of {name}, innermost call last:"
            yield from "".join(traceback.format_stack(frame)).rstrip().splitlines()
