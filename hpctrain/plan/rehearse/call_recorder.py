"""Recorder of the calls of one rank, to which a planned mesh reports them, with names for its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, GroupCalls
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import AXES, EXPERT_AXES, communicator_axes, connected_axes, expert_sizes, rank_count
from hpctrain.comm.planned import PlannedCalls, PlannedMesh
from hpctrain.comm.transports.traffic import Traffic
from hpctrain.comm.transports.transport import TransportWork
from hpctrain.plan.rehearse.audit_messages import AuditMessages
from hpctrain.plan.rehearse.programme import NEW_GROUP, SEND, WAIT, Membership, Numbers, RehearsedCall


@dataclass(frozen=True)
class NamedGroup:
    """Group of this rank: its name in programmes, the place of this rank in it, and its ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]


class Recorder:
    """Recorder of the calls and waits of a rank.

    Args:
        loads: Function that returns the rows that a rank sends to each expert; None without experts.
        audit: Additional messages of the check for silent faults.

    Attributes:
        events: Recorded events.
        note: Function that takes each event, and returns the pending work of a started call.
        groups: Names of the groups of this rank.
        creations: Creations of communicators before the step.
        listening: True while calls are recorded.
        action: Action of the schedule in which calls are made; "" if it is not known yet.
        carried: Content of the next message that is sent.
        done: Action that has just ended, after which that message is sent.
    """

    def __init__(self, loads: Callable[[int], Tensor] | None, audit: AuditMessages) -> None:
        self._loads, self.audit = loads, audit
        self.events: list[RehearsedCall] = []
        self.note: Callable[[RehearsedCall], TransportWork | None] = self.add
        self.groups: dict[GroupCalls, NamedGroup] = {}
        self.creations: list[RehearsedCall] = []
        self.listening = False
        self.action = self.carried = self.done = ""

    def __call__(self, call: Call, _: Traffic) -> TransportWork | None:
        """Record a call, and return its pending work if it is started and recorded."""
        self._exchange_loads(call)
        if not self.listening:
            return None
        pending = self.note(self.event(call))
        return None if pending is None else _PendingGroupCall(call, pending)

    def _exchange_loads(self, call: Call) -> None:
        """Write the result of a call that exchanges loads of experts in host memory."""
        sent, received = call.tensor, call.output
        if sent is None or received is None or not sent.is_cpu or sent is received:
            return
        named = self.groups[call.group]
        if call.counts is not None or call.operation not in {"all_to_all", "all_gather"}:
            return
        if self._loads is None:
            own = sent.view(len(named.ranks), -1)[named.rank] if call.operation == "all_to_all" else sent
            received.view(len(named.ranks), -1).copy_(own.reshape(-1))
            return
        here = named.ranks[named.rank]
        by_expert = next((each for each in self.groups.values() if each.name == "expert"), None)
        place, sources = (by_expert.rank, by_expert.ranks) if by_expert else (0, (here,))
        for number, rank in enumerate(named.ranks):
            # In an all-gather, each rank sends what it has received. Parts of an expert have the same order.
            whose = [rank] if call.operation == "all_to_all" else [each + rank - here for each in sources]
            pieces = [self._loads(each).view(len(sources), -1)[place] for each in whose]
            received.view(len(named.ranks), -1)[number] = torch.cat(pieces)

    def add(self, event: RehearsedCall) -> TransportWork | None:
        """Add an event, and return its pending work if it is started."""
        self.audit.count(event)
        checksum = self.audit.checksum(event)
        self.events += [checksum] if checksum is not None else []
        self.events.append(event)
        last = len(self.events) - 1
        awaited = [last] if checksum is None or event.operation == SEND else [last, last - 1]
        if event.blocking:
            for index in awaited[1:]:
                self.wait(index)
            return None
        return _PendingCall(self, awaited)

    def exchange_records(self, action: str) -> None:
        """Add the exchange of the records of all calls that are checked, and wait for it."""
        exchanges, first = self.audit.exchanges(action), len(self.events)
        self.events += exchanges
        for index in range(first, first + len(exchanges)):
            self.wait(index)

    def wait(self, index: int) -> None:
        """Add the wait for an event."""
        self.events.append(RehearsedCall(WAIT, call_index=index, action=self.action))

    def name(self, group: Group, name: str) -> None:
        """Set the name of a group in programmes."""
        self.groups[group.calls] = NamedGroup(name, group.rank, group.ranks)

    def name_new(self, parent: Group, group: Group, name: str) -> None:
        """Name a group whose communicator all ranks of `parent` create together, and record the creation."""
        self.name(group, name)
        self.creations.append(RehearsedCall(NEW_GROUP, self.groups[parent.calls].name, what=name))

    def event(self, call: Call) -> RehearsedCall:
        """Return the event of a call."""
        named = self.groups[call.group]
        form = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
        if call.peer >= 0:
            step = (call.peer - named.rank) % len(named.ranks)
            sends = call.operation == "send"
            what, action = (self.carried, self.done or self.action) if sends else ("", self.action)
            message = call.operation, named.name, call.bytes, step, call.tag
            return RehearsedCall(*message, what, form, call.blocking, action)
        details: list[str] = [call.reduction or ""]
        details += [f"root {call.root}"] if call.root >= 0 else []
        sent = received = None
        if call.receive_counts is not None and call.counts is not None:
            sent, received = tuple(call.counts), tuple(call.receive_counts)
        elif call.counts is not None:
            details.append(f"in {len(call.counts)} pieces {hash(tuple(call.counts)):x}")
        return RehearsedCall(
            call.operation,
            named.name,
            call.bytes,
            what=" ".join(filter(None, details)),
            format=form,
            blocking=call.blocking,
            action=self.action,
            sent=sent,
            received=received,
        )

    def label(self, first: int, action: str) -> None:
        """Set the action of the events from `first` on that have none yet."""
        self.events[first:] = [
            event if event.action else replace(event, action=action) for event in self.events[first:]
        ]


@dataclass(frozen=True)
class _PendingCall:
    """Pending calls of a recorder, which are complete only after a wait."""

    recorder: Recorder
    indices: Sequence[int]

    def wait(self) -> None:
        for index in self.indices:
            self.recorder.wait(index)

    def test(self) -> bool:
        return False


@dataclass(frozen=True)
class _PendingGroupCall:
    """Pending call of a group. The rank waits for it alone, or by tests of several calls (`Work`)."""

    call: Call
    pending: TransportWork

    def wait(self) -> None:
        self.pending.wait()

    def test(self) -> bool:
        waiting = self.call.group.calls.current is self.call
        if waiting:
            self.pending.wait()
        return waiting


class RecordedMesh(PlannedMesh):
    """Planned mesh that reports calls to a recorder, with group names that are the same on all ranks."""

    def __init__(
        self,
        recorder: Recorder,
        sizes: Mapping[str, int],
        stage: int,
        ranks_per_node: int,
        device: torch.device,
        place: int,
        transport: str,
    ) -> None:
        super().__init__(sizes, stage, ranks_per_node, device, place, transport, PlannedCalls(recorder))
        self.recorder = recorder

    def record_creation(self) -> None:
        """Record that all ranks create the communicators of the mesh together, as `Mesh` does."""
        name = self.recorder.groups[self.group(*AXES).calls].name
        for axes in connected_axes(self.sizes):
            self.recorder.creations.append(RehearsedCall(NEW_GROUP, name, what=group_name(axes)))

    @override
    def group(self, *axes: str) -> Group:
        group = super().group(*axes)
        name, communicator = group_name(axes), group_name(communicator_axes(self.sizes, axes))
        self.recorder.name(group, name)
        if communicator != name:
            self.recorder.audit.communicators[name] = communicator
        return group

    @override
    def new_subgroup(self, axis: str, size: int | Sequence[int]) -> Group:
        group = super().new_subgroup(axis, size)
        sizes = [size] if isinstance(size, int) else dict.fromkeys(size)
        self.recorder.name_new(self.group(axis), group, f"{axis}/{'+'.join(map(str, sizes))}")
        return group

    @override
    def split_group(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        part, peers = super().split_group(group, size, across)
        self.recorder.name_new(group, part, f"{group.name}/{size}")
        self.recorder.name_new(group, peers, f"{across} of {group.name}/{size}")
        return part, peers


def group_name(axes: Iterable[str]) -> str:
    """Return the name of the group along axes: "world" if these are all axes."""
    axes = tuple(axes)
    return "world" if axes == AXES else " x ".join(axes)


def membership(name: str, sizes: Mapping[str, int]) -> Membership:
    """Return the groups of a name on a mesh.

    Args:
        name: Joined axes, such as "data x context"; with "/4" for parts of 4 neighbors; "replicas of data/4"
            for the ranks with the same place in each part.
        sizes: Size of each axis of the mesh.
    """
    across, _, whole = name.rpartition(" of ")
    axes, _, size = whole.partition("/")
    rows = _lattice(AXES if axes in {"world", "agreements"} else tuple(axes.split(" x ")), sizes)
    if size:
        parts = rows.reshape(len(rows), -1, int(size))
        rows = parts.swapaxes(1, 2) if across else parts
        rows = rows.reshape(-1, rows.shape[-1])
    return Membership(rows, rank_count(sizes))


def _lattice(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Numbers:
    """Return the ranks of the groups along axes, [groups, size]."""
    folding = AXES if set(axes) <= set(AXES) else EXPERT_AXES
    along = {**expert_sizes(sizes), **sizes}
    lattice = np.arange(rank_count(sizes)).reshape([along[axis] for axis in folding])
    inner = [folding.index(axis) for axis in folding if axis in axes]
    outer = [place for place in range(len(folding)) if place not in inner]
    rows: Numbers = lattice.transpose([*outer, *inner]).reshape(-1, prod(along[axis] for axis in axes))
    return rows
