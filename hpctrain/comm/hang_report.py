"""Reports in which ranks say where they are when a job hangs, and the conclusion from all of them."""

from __future__ import annotations

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

from pydantic import TypeAdapter

from hpctrain.comm.calls import Call, GroupCalls
from hpctrain.comm.outcome import name_ranks
from hpctrain.comm.world import World

LAST = 10  # calls that the text of a report shows
THREAD = "watchdog"  # so the names of the watchdog's threads begin
_STATES = 20  # different ones of ranks that the verdict shows

GroupKey = tuple[str, tuple[int, ...], int]
"""A group on all of its ranks: name, ranks, and which one of those with both."""


@dataclass(frozen=True)
class CallNote:
    """One call, as other ranks understand it: `peer` is a rank of the world (-1: none); it began (of the
    present one: is waited for since) `seconds` ago."""

    group: GroupKey
    operation: str
    number: int
    bytes: int
    dtype: str
    peer: int
    seconds: float

    def __str__(self) -> str:
        """`all_reduce 57 of data (ranks 0-1; 40 bytes of float32)`."""
        payload = f"; {self.bytes} bytes of {self.dtype}" if self.dtype else ""
        name, ranks, _ = self.group
        if self.peer >= 0:
            way = "to" if self.operation == "send" else "from"
            return f"{self.operation} {self.number} {way} rank {self.peer} of {name}{payload}"
        number = f" {self.number}" if self.number else ""  # a wait for whoever sends has none
        return f"{self.operation}{number} of {name} ({name_ranks(ranks)}{payload})"


@dataclass(frozen=True)
class GroupNote:
    """How many collective calls of a group the rank entered, and its messages by rank of the world."""

    key: GroupKey
    entered: int
    sent: dict[int, int]
    received: dict[int, int]


@dataclass(frozen=True)
class HangReport:
    """The place in the program where one rank is.

    `token` tells this job from earlier ones in the same folder. `phase` is what the rank does, in words that
    follow "while".
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

    @property
    def state(self) -> str:
        """Operation that the rank is in, in words."""
        if self.current is None:
            return f"in no operation of a group, at {self.where}"
        return f"in {self.current} for {self.current.seconds:.1f} s, at {self.where}"

    def entered(self, key: GroupKey) -> int:
        """Collective calls of a group that the rank entered."""
        return next((group.entered for group in self.groups if group.key == key), 0)

    def called(self, key: GroupKey, number: int) -> CallNote | None:
        """One of the group's collective calls, where it is still known."""
        here = (note for note in self.recent if note.group == key and note.number == number and note.peer < 0)
        return next(here, None)


@cache
def _report_type() -> TypeAdapter[HangReport]:
    return TypeAdapter(HangReport)


def take_report(world: World, token: str, silent: float) -> HangReport:
    """Report where this rank is now; called by another thread than the main one."""
    calls, now = world.ledger.calls, perf_counter()
    current = calls.current
    note = None if current is None else _note(current, now - max(current.began, calls.waits))
    groups = [_group_note(group) for group in list(calls.groups)]
    return HangReport(
        token,
        world.rank,
        world.hostname,
        silent,
        world.ledger.described,
        _where(),
        note,
        tuple(_note(call, now - call.began) for call in list(calls.recent)),
        tuple(group for group in groups if group.entered or group.sent or group.received),
    )


def write_report(path: Path, report: HangReport, size: int) -> None:
    """Write the report for people, with all threads' stacks, and in its last line for the other ranks."""
    lines = [
        f"rank {report.rank} of {size} on {report.hostname}, {time.strftime('%Y-%m-%d %H:%M:%S')}: "
        f"no sign of life for {report.silent:.1f} s, while {report.phase}",
        f"it is {report.state}",
        "",
        f"last calls, newest first ({LAST} at most):",
        *(f"  {note.seconds:9.3f} s ago  {note}" for note in report.recent[::-1][:LAST]),
        "",
        "collective calls entered, messages sent and received, by group:",
        *(f"  {line}" for line in _group_lines(report)),
        *_stacks(),
        "",
        "for the other ranks:",
        _report_type().dump_json(report).decode(),
    ]
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_report(path: Path, token: str) -> HangReport | None:
    """Another rank's report of this run; None where there is none."""
    try:
        report = _report_type().validate_json(path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2])
    except (OSError, ValueError):
        return None
    return report if report.token == token else None


def verdict(
    reports: Mapping[int, HangReport], size: int, stopped: Collection[int] = frozenset()
) -> list[str]:
    """Conclude why nothing moves, in sentences, from the reports of the ranks that gave one.

    `stopped` are ranks whose processes the kernel calls stopped.
    """
    causes = [
        *_missing(reports, size, stopped),
        *_disagreements(reports),
        *_absent(reports),
        *_messages(reports),
    ]
    sentences = causes or list(_behind(reports))
    states: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        states.setdefault(report.state, []).append(rank)
    # Who waits for nobody comes first: there the cause is.
    order = sorted(states.items(), key=lambda item: (reports[item[1][0]].current is not None, item[1]))
    for state, ranks in order[:_STATES]:
        sentences.append(f"{_on_nodes(ranks, reports)} {'is' if len(ranks) == 1 else 'are'} {state}")
    if len(order) > _STATES:
        sentences.append(f"and {len(order) - _STATES} more states of ranks")
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
    """Collective calls (or messages) that ranks are in, and which ranks."""
    waiting: dict[tuple[GroupKey, int], list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.current is not None and (report.current.peer >= 0) == pairs:
            waiting.setdefault((report.current.group, report.current.number), []).append(rank)
    return waiting


def _disagreements(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Calls with one number in a group that differ."""
    for key, number in _waiting(reports, pairs=False):
        calls: dict[tuple[str, int, str], tuple[CallNote, list[int]]] = {}
        for rank in key[1]:
            note = reports[rank].called(key, number) if rank in reports else None
            if note is not None:
                size = 0 if note.operation == "all_to_all" else note.bytes  # which is uneven
                calls.setdefault((note.operation, size, note.dtype), (note, []))[1].append(rank)
        if len(calls) > 1:
            texts = [f"{name_ranks(ranks)} called {note}" for note, ranks in calls.values()]
            yield f"the ranks disagree in what they call: {'; '.join(texts)}"


def _absent(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Ranks that never entered a call in which others wait; first those that wait for nobody themselves."""
    lines = []
    for (key, number), waiting in _waiting(reports, pairs=False).items():
        absent = [rank for rank in key[1] if rank in reports and reports[rank].entered(key) < number]
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
    """Ranks that wait for a message, or for one of theirs to be taken."""
    for ranks in _waiting(reports, pairs=True).values():
        for rank in ranks:
            note = reports[rank].current
            assert note is not None
            peer = reports.get(note.peer)
            there = next((group for group in peer.groups if group.key == note.group), None) if peer else None
            sending = note.operation == "send"
            done = 0 if there is None else (there.received if sending else there.sent).get(rank, 0)
            verb = "received" if sending else "sent"
            answer = "does not answer" if peer is None else f"has {verb} {done} in all"
            yield f"rank {rank} waits for {note.seconds:.1f} s in {note}; rank {note.peer} {answer}"


def _behind(reports: Mapping[int, HangReport]) -> Iterator[str]:
    """Groups in which ranks have made fewer calls than others: on a GPU nobody is seen waiting."""
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
            note = reports[ahead[0]].called(key, least + 1)
            call = note or f"call {least + 1} of {key[0]} ({name_ranks(key[1])})"
            yield f"{_on_nodes(behind, reports)} never entered {call}, which {name_ranks(ahead)} entered"


def _on_nodes(ranks: list[int], reports: Mapping[int, HangReport]) -> str:
    """The ranks, with their node where it is one."""
    nodes = {reports[rank].hostname for rank in ranks}
    return name_ranks(ranks) + (f" on {nodes.pop()}" if len(nodes) == 1 else "")


def _note(call: Call, seconds: float) -> CallNote:
    group = call.group
    dtype = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
    peer = group.ranks[call.peer] if call.peer >= 0 else -1
    return CallNote(_key(group), call.operation, call.number, call.bytes, dtype, peer, seconds)


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


def _where() -> str:
    """The line that the main thread is at, and the one that called comm/ if it is in there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no line"
    outside = frame
    while outside.f_back is not None and outside.f_globals.get("__name__", "").startswith("hpctrain.comm."):
        outside = outside.f_back
    return _line(frame) + ("" if outside is frame else f", called at {_line(outside)}")


def _line(frame: FrameType) -> str:
    path = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"


def _stacks() -> Iterator[str]:
    """The stacks of all threads but the watchdog's, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(THREAD):
            yield ""
            yield f"stack of {name}, innermost call last:"
            yield from "".join(traceback.format_stack(frame)).rstrip().splitlines()
