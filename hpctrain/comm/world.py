"""World: this process's place among the ranks, made once by a verb and never at import."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.check import CallChecks
from hpctrain.comm.device import choose_device, gpu_count, on_host, peak_bytes, prepare_device, used_bytes
from hpctrain.comm.group import Group, GroupTransports
from hpctrain.comm.hang_settings import HangSettings
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.outcome import combine_errors, flush_output, print_error, print_problems, to_hpctrain_error
from hpctrain.comm.topology import Topology
from hpctrain.comm.transports.choose import TRANSPORTS, TransportPair, TransportSetting
from hpctrain.comm.transports.emulated import EmulatedLink, EmulatedTransport
from hpctrain.comm.transports.node_memory import NodeMemory, open_node_memory
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.work import StartedWork
from hpctrain.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, HpctrainError, UsersError
from hpctrain.host.launcher import find_contradictions
from hpctrain.host.launcher_checks import check_contradictions, check_launcher
from hpctrain.host.memory import is_out_of_memory
from hpctrain.host.mpi_library import MPI, communicator_of, finalizes_between_nodes, start_mpi
from hpctrain.host.shared_memory_cleanup import SegmentMarker, mark_segments, remove_stale_segments
from hpctrain.units import Link, format_bytes

Nodes = tuple[int, ...]

GRACE_SECONDS = 5.0  # how long a rank with an error of its own waits for the others to end too
SECONDS_FOR_OUTPUT = 0.2  # in which launchers fetch what ranks have written before these are ended


class TransportDecorator(ABC):
    """Extension point: object that wraps the transports of all groups of a world, such as to check messages.

    Without a decorator, calls go to the transports directly.
    """

    @abstractmethod
    def wrap(
        self,
        transports: TransportPair,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        scratch: ReductionScratch,
    ) -> TransportPair:
        """Return the transports that a new group uses instead of `transports`. Collective over its ranks.

        Args:
            transports: Transports for host memory and for the accelerator.
            communicator: Communicator of the group. Other calls use it, so messages need a duplicate of it.
            ranks: Ranks of the group in the whole world; at least two.
            scratch: Memory that reductions may receive into.
        """

    @abstractmethod
    def for_part(self) -> TransportDecorator:
        """Return the decorator of a world that consists of some ranks of this one."""


class World:
    """Position of this process among all ranks, and the group of all ranks.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        node: Number of this rank's node. Nodes are numbered by their lowest rank.
        local_rank: Number of this rank among the ranks of its node.
        device: Device that this rank computes on.
        topology: Nodes of all ranks, which groups use.
        planned_bytes: Memory that this rank will use according to its plan, in bytes; 0 without a plan.
    """

    def __init__(self, communicator: MPI.Intracomm, whole: World | None = None) -> None:
        """Collective. `start` is what verbs call; this takes MPI as it is and installs nothing.

        A part of a `whole` world enters what it does in the ledger of that, under the ranks there.
        """
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.hostname = socket.gethostname()
        node = communicator.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.local_rank = node.rank
        self.local_size = node.size
        leaders = communicator.allgather(node.bcast(self.rank))
        node.Free()
        lowest = sorted(set(leaders))
        self.nodes = len(lowest)
        self.node = lowest.index(leaders[self.rank])
        machine = [lowest.index(leader) for leader in leaders]
        self.topology: Topology = Topology(machine) if whole is None else whole.topology
        self.ledger: Ledger = Ledger() if whole is None else whole.ledger
        self.hang: HangSettings = HangSettings() if whole is None else whole.hang
        self.device: torch.device = torch.device("cpu") if whole is None else whole.device
        self._scratch: ReductionScratch = ReductionScratch() if whole is None else whole._scratch
        # By the nodes of all ranks, of which some may be emulated.
        self._seen: dict[Nodes, NodeMemory | str] = {} if whole is None else dict(whole._seen)
        self._memories: list[NodeMemory] = [] if whole is None else whole._memories
        self._in_flight: set[StartedWork[Any]] = set() if whole is None else whole._in_flight
        self._checks: CallChecks | None = None
        self.transport_decorator: TransportDecorator | None = None
        """Decorator of the transports of groups that are made later; None if there is none."""
        self._link: EmulatedLink | None = None if whole is None else whole._link
        # Errors are agreed on here, apart from what the groups may have under way.
        self._control = communicator.Dup()
        mine = self.rank if whole is None else whole._ranks[whole.rank]
        # Those of the whole world, by which a hang is told.
        self._ranks: tuple[int, ...] = tuple(communicator.allgather(mine))
        self._agreements = self.ledger.calls.group("world", self._ranks)
        self._agreed: HpctrainError | None = None
        self._marker: SegmentMarker | None = None
        self.swept: list[str] = []
        """What was removed on this node, of what dead jobs had left; told to its first rank."""
        self.planned_bytes = 0
        self.everyone = self._group(("world",), tuple(range(self.size)), communicator, "mpi")

    @classmethod
    def start(cls, device: str = "auto", begin: Callable[[World], None] = lambda _: None) -> World:
        """Start MPI and take this process's place; called once, by a verb, on all ranks alike.

        `begin` is called as soon as there is a World, before anything else can fail; it may communicate.
        `device`: "auto" (the local rank's GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        From here on an uncaught exception on any rank, in any thread, prints its traceback and ends the
        job with exit code 70. HpctrainError where the launcher and MPI disagree, or the device is missing.
        """
        if not MPI.Is_initialized():
            start_mpi()
        check_launcher(os.environ, MPI.COMM_WORLD.size, MPI.get_vendor()[0])
        world = cls(MPI.COMM_WORLD)
        begin(world)
        here = find_contradictions(os.environ, world.rank, world.local_rank, world.nodes)
        check_contradictions([each for rank in world._control.allgather(here) for each in rank])
        world.use_device(device)
        world._clean()
        sys.excepthook = world._on_exception
        threading.excepthook = world._on_thread_exception
        return world

    def _clean(self) -> None:
        """Remove what dead jobs left in shared memory, and note what this one has. Collective."""
        node = self.communicator.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        assert isinstance(node, MPI.Intracomm)
        if node.rank == 0:
            self.swept = [f"{name} on {self.hostname}" for name in remove_stale_segments()]
        self._marker = mark_segments(node)
        node.Free()

    def use_device(self, name: str) -> None:
        """Choose the device, as `start` does. Collective; before any Mesh is made."""
        with self.agreement():
            self.device = choose_device(name, self.local_rank, gpu_count())
        prepare_device(self.device)
        self.everyone.device = self.device

    def compare_calls(self, wanted: bool) -> None:
        """Set whether ranks compare their collective calls, in `everyone` and in groups that are made later.

        Collective. If calls differ, the ranks of the group raise a MismatchError; for messages, the receiver
        does.
        """
        if not wanted:
            self._checks = None
            self.everyone.comparer = None
        elif self._checks is None:
            self._checks = CallChecks()
            self._checks.check_group(self.everyone)

    def emulate_nodes(self, ranks: int | None) -> None:
        """Divide the ranks into nodes of so many ranks, for groups and shared memory that are made later."""
        self.topology.emulate(ranks)

    def emulate(self, link: Link | None) -> None:
        """Make transfers of `everyone`, and of groups that are made later, as slow as over a link.

        Collective. All ranks must be on one machine, since they compare their clocks.
        """
        if link is None and self._link is None:
            return
        assert link is None or self.nodes == 1
        self._link = None if link is None else EmulatedLink(link)
        everyone = self.everyone
        everyone.host, everyone.accelerator = self._pair(self.communicator, self._ranks, "mpi")

    def decorate_transports(self, decorator: TransportDecorator | None) -> None:
        """Wrap the transports of `everyone`, and of groups that are made later. None ends this.

        Collective.
        """
        if decorator is not self.transport_decorator:
            self.transport_decorator = decorator
            self.everyone.host, self.everyone.accelerator = self._pair(self.communicator, self._ranks, "mpi")

    def alone(self) -> World:
        """A world of this rank alone, on the same device, with a ledger of its own."""
        world = World(MPI.COMM_SELF)
        world.device = world.everyone.device = self.device
        return world

    def part(self, ranks: Sequence[int]) -> World:
        """A world of these ranks of this one, in rising order, whose ledger is this one's. Collective: the
        other ranks make the parts that they are in.
        """
        assert self.rank in ranks, (self.rank, ranks)
        communicator = self.communicator.Split(min(ranks), self.rank)
        assert isinstance(communicator, MPI.Intracomm) and communicator.size == len(ranks), ranks
        world = World(communicator, self)
        world.compare_calls(self._checks is not None)
        decorator = self.transport_decorator
        world.decorate_transports(None if decorator is None else decorator.for_part())
        return world

    def share_memory(self) -> str:
        """Have the ranks of each node see memory of each other, for groups made from now on; why they cannot,
        where they cannot: the same on all ranks. Collective.
        """
        nodes = self.topology.nodes
        if nodes not in self._seen:
            node = self.communicator.Split(nodes[self._ranks[self.rank]], self.rank)
            assert isinstance(node, MPI.Intracomm)
            opened = self._seen[nodes] = open_node_memory(node, self._ranks[self.rank])
            if isinstance(opened, NodeMemory):
                self._memories.append(opened)
        mine = self._memory if isinstance(self._memory, str) else ""
        return next((each for each in self._control.allgather(mine) if each), "")

    @property
    def _memory(self) -> NodeMemory | str | None:
        """What this rank sees of its node's, or why nothing; None before `share_memory`."""
        return self._seen.get(self.topology.nodes)

    def nodes_of(self, ranks: Sequence[int]) -> list[int]:
        """The nodes of these ranks of this world, as groups go by them."""
        return [self.topology.nodes[self._ranks[rank]] for rank in ranks]

    @property
    def buffer_bytes(self) -> int:
        """The most host memory that reductions have used for what they receive."""
        return self._scratch.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The most memory that this rank has held, without that of others that it sees."""
        return max(0, peak_bytes(self.device) - sum(memory.foreign_bytes() for memory in self._memories))

    def split(
        self, axes: tuple[str, ...], ranks: tuple[int, ...], transport: str, among: Group | None = None
    ) -> Group:
        """The Group of these ranks of this world, in rising order.

        Collective over `among` (default: everyone), whose other ranks make the groups that they are in.
        """
        communicator = communicator_of((among or self.everyone).objects).Split(ranks[0], self.rank)
        assert isinstance(communicator, MPI.Intracomm)
        return self._group(axes, ranks, communicator, transport)

    def _group(
        self, axes: tuple[str, ...], ranks: tuple[int, ...], communicator: MPI.Intracomm, transport: str
    ) -> Group:
        of_world = tuple(self._ranks[rank] for rank in ranks)
        host, accelerator = self._pair(communicator, of_world, transport)
        transports = GroupTransports(communicator, host, accelerator)
        group = Group(axes, ranks, transports, self.device, self.ledger, self._in_flight, of_world)
        if self._checks is not None:
            self._checks.check_group(group)
        return group

    def _pair(self, communicator: MPI.Intracomm, ranks: tuple[int, ...], transport: str) -> TransportPair:
        """What carries tensors of host and accelerator. Collective over the communicator."""
        nodes = [self.topology.nodes[rank] for rank in ranks]
        memory = self._memory if isinstance(self._memory, NodeMemory) else None
        host, accelerator = TRANSPORTS[transport].make(
            TransportSetting(communicator, nodes, self._scratch, memory)
        )
        if self._link is not None:
            times, apart = communicator.Dup(), nodes if self.topology.per_node else list(range(len(ranks)))
            slow = (EmulatedTransport(each, times, self._link, apart) for each in (host, accelerator))
            host, accelerator = next(slow), next(slow)
        if self.transport_decorator is None or len(ranks) == 1:
            return host, accelerator
        return self.transport_decorator.wrap((host, accelerator), communicator, ranks, self._scratch)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Inside, each rank works alone; on leaving, if any rank has an error, all raise the same.

        HpctrainErrors are exchanged, OSErrors as InputOutputErrors: the class is the lowest failing
        rank's, the problems are all distinct ones, or of a UsersError that rank's alone. Any other exception
        goes on up and ends the job. Nothing inside may communicate.
        """
        error: HpctrainError | None = None
        try:
            yield
        except (HpctrainError, OSError) as problem:
            error = to_hpctrain_error(problem)
        mine = None if error is None else (error.exit_code, error.problems, isinstance(error, UsersError))
        self._agreements.enter(Call("agreement"))
        failures = [each for each in self._control.allgather(mine) if each is not None]
        self._agreements.leave()
        if failures:
            told = failures[:1] if failures[0][2] else failures
            self._agreed = combine_errors([each[:2] for each in told])
            raise self._agreed from error

    def finish(self, code: int = 0, problems: Sequence[str] = (), agreed: bool = True) -> int:
        """End normally: print the problems from rank 0, finalize MPI; the exit code of all ranks.

        Collective. The lowest failing rank's code is everyone's. With `agreed` false, where this rank
        may be alone with its error, the job is aborted if the others do not come within seconds.
        """
        return self.finalize(self.conclude(code, problems, agreed))

    def conclude(self, code: int = 0, problems: Sequence[str] = (), agreed: bool = True) -> int:
        """Print the problems from rank 0 and return the exit code of all ranks; MPI stays usable.

        Collective, with the arguments of `finish`.
        """
        self.ledger.activity = "ending"
        self._agreements.enter(Call("end"))  # for the watchdog, which names the ranks that have not come
        arrived = self._control.Ibarrier()
        deadline = None if agreed else time.monotonic() + GRACE_SECONDS
        pause = 1e-5
        while not arrived.Test():
            if deadline is not None and time.monotonic() > deadline:
                print_problems(problems)
                self.abort(code)
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        outcomes = self._control.allgather((code, tuple(problems)))
        failed = [outcome for outcome in outcomes if outcome[0] != 0 or outcome[1]]
        if failed:
            code = failed[0][0]
            if self.rank == 0:
                print_problems(combine_errors(failed).problems)
        flush_output()
        return code

    def finalize(self, code: int) -> int:
        """Finalize MPI, after `conclude`, and return the exit code. Collective."""
        # Launchers may end the others as soon as one rank has left, which must not change their exit codes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._control.Barrier()
        self._restore_hooks()
        if self.nodes > 1 and not finalizes_between_nodes():
            self._leave_unfinalized(code)
        self._close_memories()
        MPI.Finalize()
        return code

    def release(self) -> None:
        """Release what this world holds and leave MPI running, after `conclude`.

        Of a job of several ranks an uncaught exception still ends all of them: one rank that is gone would
        otherwise keep the others waiting where MPI ends.
        """
        if self.size == 1:
            self._restore_hooks()
        self._close_memories()

    def _restore_hooks(self) -> None:
        sys.excepthook = sys.__excepthook__
        threading.excepthook = threading.__excepthook__

    def _close_memories(self) -> None:
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _leave_unfinalized(self, code: int) -> NoReturn:
        """End all ranks, which have nothing left to do, with this exit code and without MPI's Finalize."""
        flush_output()
        time.sleep(SECONDS_FOR_OUTPUT)
        if self.rank == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI's word on the end is no news
            self.communicator.Abort(code)
        time.sleep(GRACE_SECONDS)
        os._exit(code)

    def abort(self, code: int = EXIT_INTERNAL) -> NoReturn:
        """End the job at once, on all ranks, with this exit code."""
        flush_output()
        if self._marker is not None:
            self._marker.remove()
        if MPI.COMM_WORLD.size > 1:  # else there is nobody to end, and MPI would say much about it
            self.communicator.Abort(code)
        os._exit(code)

    def fail(self, error: BaseException) -> NoReturn:
        """Print this rank's traceback (of an interrupt or the end of memory one line) and abort the job."""
        who = f"hpctrain: rank {self.rank} of {self.size} on {self.hostname}"
        if isinstance(error, KeyboardInterrupt):
            print_error(f"{who}: interrupted")
            self.abort(EXIT_INTERRUPTED)
        if is_out_of_memory(error):
            print_problems([self._out_of_memory(error)])
            self.abort(EXIT_INTERNAL)
        text = "".join(traceback.format_exception(error))
        print_error(f"{who}: uncaught exception, ending the job\n{text}".removesuffix("\n"))
        self.abort(EXIT_INTERNAL)

    def _out_of_memory(self, error: BaseException) -> str:
        """In one sentence, what this rank had and was to have when it got no more."""
        held, where = used_bytes(self.device), "" if on_host(self.device) else f" on {self.device}"
        plan = f", of {format_bytes(self.planned_bytes)} by the plan" if self.planned_bytes else ""
        why = " ".join(str(error).split()) or type(error).__name__
        return (
            f"rank {self.rank} of {self.size} on {self.hostname} ran out of memory: it held "
            f"{format_bytes(held)}{where}{plan}, and got no more ({why[:300]}); fewer ranks on a node, or "
            "what `hpctrain plan` advises, would leave room"
        )

    def is_agreed(self, error: HpctrainError) -> bool:
        """Return True if all ranks raise this error, which came from `agreement`."""
        return error is self._agreed

    def _on_exception(
        self, _kind: type[BaseException], error: BaseException, _traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HpctrainError):
            print_problems(error.problems)
            self.abort(error.exit_code)
        self.fail(error)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            self.fail(arguments.exc_value)
