"""World: rank, node and device of this process, and the group of all ranks. No import makes one."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

import torch

from hpctrain.comm.call_check import CallChecks
from hpctrain.comm.calls import Call
from hpctrain.comm.error_messages import (
    combine_errors,
    flush_output,
    print_error,
    print_problems,
    to_hpctrain_error,
)
from hpctrain.comm.group import Group
from hpctrain.comm.group_factory import GroupFactory, TransportDecorator
from hpctrain.comm.hangs.hang_settings import HangSettings, default_seconds
from hpctrain.comm.hangs.start_watch import watch_start
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.rank_devices import RankDevice, device_problems
from hpctrain.comm.transports.emulated import EmulatedLink
from hpctrain.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, HpctrainError, UserCodeError
from hpctrain.host.c_libraries import CompilerError
from hpctrain.host.device import choose_device, device_of_run, on_host, prepare_device, visible_gpus
from hpctrain.host.device_memory import peak_bytes, used_bytes
from hpctrain.host.launcher import check_launched_size, find_contradictions
from hpctrain.host.memory import is_out_of_memory
from hpctrain.host.mpi_library import (
    MPI,
    communicator_of,
    finalize_mpi,
    finalizes_between_nodes,
    require_unfinalized,
    start_mpi,
)
from hpctrain.host.shared_memory_cleanup import SegmentMarker, mark_segments, remove_stale_segments
from hpctrain.host.tensor_heap.tensor_heap import build_tensor_heap, install_tensor_heap
from hpctrain.host.topology import Topology
from hpctrain.units import Link, format_bytes

GRACE_SECONDS = 5.0
"""Time for which a rank with an error of its own waits for the other ranks to end, too."""

SECONDS_FOR_OUTPUT = 0.2
"""Time in which launchers read what ranks have written, before the ranks are ended."""


class World:
    """Position of this process among all ranks, and the group of all ranks.

    Scripts call `start`; verbs call `connect` and then `set_up`. These methods initialize MPI and install
    handlers for uncaught exceptions. The constructor does neither: MPI must be running. It is collective over
    the communicator.

    A World ends in one of two ways: all ranks call `finish`, or one rank calls `abort` or `abort_with`, which
    end the processes of all ranks at once. `run_verb` calls them; scripts of users call `finish`.

    Args:
        communicator: Communicator of all ranks.
        parent: World that this one is a part of (`subworld`), whose ledger and settings it uses, or None.

    Attributes:
        rank: Rank of this process in this world.
        size: Number of ranks of this world.
        node: Number of this rank's node. Nodes are numbered by their lowest rank.
        nodes: Number of nodes.
        local_rank: Number of this rank among the ranks of its node.
        local_size: Number of ranks of this node.
        device: Device that this rank computes on.
        topology: Node of each rank as groups use it; differs from `node` while smaller nodes are emulated.
        ledger: Payload and time of the calls of this rank.
        hang: Settings of the watchdog.
        groups: Factory that makes the groups of this world.
        everyone: Group of all ranks of this world.
        removed_segments: Files in /dev/shm that killed jobs had left and that this rank has removed.
        planned_bytes: Memory that this rank will use according to its plan, in bytes; 0 without a plan.
        malloc_reason: Reason why malloc allocates the CPU tensors of some rank, instead of the heap of
            `host/tensor_heap`; "" if no rank computes on a CPU with malloc.
    """

    def __init__(self, communicator: MPI.Intracomm, parent: World | None = None) -> None:
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
        self.topology: Topology = Topology(machine) if parent is None else parent.topology
        self.ledger: Ledger = Ledger() if parent is None else parent.ledger
        self.hang: HangSettings = HangSettings() if parent is None else parent.hang
        self.device: torch.device = torch.device("cpu") if parent is None else parent.device
        groups = None if parent is None else parent.groups
        self.groups: GroupFactory = GroupFactory(self.topology, self.ledger, groups)
        # A world that is made from another one leaves MPI and the memory of nodes to it.
        self._owns_mpi = parent is None
        # Ranks agree on errors over this communicator, whatever messages their groups have in flight.
        self._control = communicator.Dup()
        root_rank = self.rank if parent is None else parent.groups.ranks[parent.rank]
        self.groups.ranks = tuple(communicator.allgather(root_rank))
        self._agreements = self.ledger.calls.add_group("world", self.groups.ranks)
        self._agreed: HpctrainError | None = None
        self._marker: SegmentMarker | None = None
        self.removed_segments: list[str] = []
        self.planned_bytes = 0
        self.malloc_reason = ""
        self._has_set_up_heap = False
        everyone = tuple(range(self.size))
        self.everyone: Group = self.groups.make(("world",), everyone, communicator, "mpi", self.device)

    @classmethod
    def start(cls, device: str = "auto") -> World:
        """Start MPI and make the World of all ranks, with a device. A script calls this once. Collective.

        If a rank does not arrive here, `watch_start` ends the job. When this has returned, an uncaught
        exception on any rank, in any thread, ends the job as `abort_with` describes: with a traceback and
        exit code 70, unless it is an HpctrainError or an interrupt. A fatal signal, such as SIGSEGV, prints
        the stacks of all threads of its rank.

        Args:
            device: "auto" (the local rank's GPU if there is one, otherwise the CPU), or another name that
                `choose_device` takes.

        Raises:
            HpctrainError: MPI cannot start or was finalized, launcher and MPI contradict each other, there is
                no such device, or the variable HPCTRAIN_HANG_SECONDS is not a time.
        """
        with watch_start(default_seconds(os.environ)):
            world = cls.connect()
            world.set_up(device)
        return world

    @classmethod
    def connect(cls) -> World:
        """Start MPI unless it runs, and make the World of all ranks, which needs `set_up` next. Collective.

        Verbs call `connect` and `set_up` instead of `start`. In between they start the watchdog, which needs
        a World, so that it reports a rank that stops in `set_up`.

        Raises:
            HpctrainError: MPI cannot start or was finalized, or has another number of ranks than the
                launcher.
        """
        require_unfinalized()
        removed = remove_stale_segments()
        if not MPI.Is_initialized():
            start_mpi()
        if not faulthandler.is_enabled():
            # Only now, so that MPI's own handler is called after this one. 2 is the descriptor of stderr.
            faulthandler.enable(2)
        check_launched_size(os.environ, MPI.COMM_WORLD.size, MPI.get_vendor()[0])
        world = cls(MPI.COMM_WORLD)
        world.removed_segments = [f"{name} on {world.hostname}" for name in removed]
        return world

    def set_up(self, device: str) -> None:
        """Check the launcher's variables, choose the device, and install handlers for uncaught exceptions.

        Collective. It is called once, after `connect`.

        Args:
            device: Name of the device, as `start` takes it.

        Raises:
            HpctrainError: The launcher's variables contradict MPI, or there is no such device. It is raised
                on all ranks.
        """
        contradictions = find_contradictions(os.environ, self.rank, self.local_rank, self.nodes)
        for each in self.everyone.all_gather_object(contradictions):
            if each:
                raise HpctrainError(
                    f"the launcher's variables contradict MPI ({each[0]}): start all ranks with one "
                    "launcher, and do not set or export its variables yourself"
                )
        with self.agreement():
            chosen = choose_device(device, self.local_rank, visible_gpus())
        self._compute_on(chosen)
        with self._agreements.record(Call("mark_segments")):
            self._mark_segments()
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def _mark_segments(self) -> None:
        """Mark the shared memory of this job on this node. Collective."""
        node = self.communicator.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        assert isinstance(node, MPI.Intracomm)
        self._marker = mark_segments(node)
        node.Free()

    def use_device(self, name: str, deterministic: bool = True, setting: str = "run.device") -> None:
        """Set the device that a user asks for, on which this rank and `everyone` compute. Collective.

        It prepares the process for the device. It may be called before any Mesh is made, since groups that
        exist keep their device.

        Args:
            name: Name of the device, as `start` takes it.
            deterministic: True for kernels of GPUs that always add in the same order.
            setting: Key of the deck, or option, by which the user gave the name.

        Raises:
            HpctrainError: There is no such device on some rank, torch cannot use the GPUs of a node, or some
                ranks compute on CPUs and others on GPUs. It is raised on all ranks.
        """
        device, problem = torch.device("cpu"), ""
        try:
            device = device_of_run(name, self.local_rank, setting)
        except HpctrainError as error:
            problem = str(error)
        devices = self.everyone.all_gather_object(RankDevice(self.hostname, device.type, problem))
        with self.agreement():
            problems = device_problems(name, devices, setting)
            if problems:
                raise HpctrainError(problems)
        self._compute_on(device, deterministic)

    def _compute_on(self, device: torch.device, deterministic: bool = True) -> None:
        """Prepare this process for a device. Collective."""
        self.device = self.everyone.device = device
        prepare_device(device, deterministic)
        if not self._has_set_up_heap:
            with self._agreements.record(Call("set_up_tensor_heap")):
                self._set_up_tensor_heap()

    def _set_up_tensor_heap(self) -> None:
        """Let torch allocate the CPU tensors of all ranks from heaps, if all compute on CPUs. Collective.

        One rank of each node builds the library. Ranks that get no library, or no heap, use malloc.
        """
        node = self.communicator.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        computes_on_cpu, problem = on_host(self.device), ""
        library: bytes | None = None
        if node.rank == 0 and computes_on_cpu:
            try:
                library = build_tensor_heap()
            except CompilerError as error:
                problem = str(error)
        library = node.bcast(library)
        node.Free()
        if library is not None and computes_on_cpu:
            try:
                install_tensor_heap(library)
            except OSError as error:
                problem = f"no addresses for a heap: {error.strerror or error}"
        where = f" (rank {self.rank} on {self.hostname})" if problem else ""
        gathered = self.everyone.all_gather_object((computes_on_cpu, problem + where))
        self._has_set_up_heap = all(on_cpu for on_cpu, _ in gathered)
        self.malloc_reason = next((reason for _, reason in gathered if reason), "")

    def compare_calls(self, enabled: bool) -> None:
        """Switch the comparison of calls between ranks on or off. Collective.

        While it is on, each call is compared before it runs: if the ranks of a group make different calls,
        they raise a MismatchError; for messages, only the receiver does. The switch acts on `everyone` and on
        groups that are made later. Other groups that exist already stay as they are. Nothing changes if it
        already has that state.

        Args:
            enabled: True to switch the comparison on. All ranks pass the same value.
        """
        if not enabled:
            self.groups.checks = None
            self.everyone.comparer = None
        elif self.groups.checks is None:
            self.groups.checks = CallChecks()
            with self._agreements.record(Call("compare_calls")):
                self.groups.checks.check_group(self.everyone)

    def sum_halves_natively(self, enabled: bool) -> None:
        """Let NCCL and gloo add 16-bit floats, in groups that are made later. Local.

        Otherwise they are added in fp32 and in rank order, as by other transports.

        Args:
            enabled: The same value on all ranks.
        """
        self.groups.native_half_sums = enabled

    def emulate_nodes(self, ranks: int | None) -> None:
        """Divide each node into nodes of `ranks` ranks, for groups and memory that are made later. Local.

        `node`, `nodes`, `local_rank` and `local_size` of this world stay those of the machine; `topology`
        changes.

        Args:
            ranks: Number of ranks of an emulated node, the same on all ranks; None ends the emulation.
        """
        self.topology.emulate(ranks)

    def emulate_link(self, link: Link | None) -> None:
        """Make transfers of `everyone`, and of groups that are made later, as slow as over a link.

        Collective. Other groups that exist already stay as they are. All ranks must be on one machine, since
        they compare their clocks; otherwise an AssertionError is raised.

        Args:
            link: Speed (bytes per second) and latency (seconds) of the link of a rank; None ends the
                emulation. All ranks pass the same.
        """
        if link is None and self.groups.link is None:
            return
        assert link is None or self.nodes == 1
        self.groups.link = None if link is None else EmulatedLink(link)
        self._remake_transports()

    def decorate_transports(self, decorator: TransportDecorator | None) -> None:
        """Wrap the transports of `everyone`, and of groups that are made later. Collective.

        Other groups that exist already stay as they are. Nothing changes if `decorator` is the present one.

        Args:
            decorator: This rank's decorator; None ends the wrapping on all ranks.
        """
        if decorator is not self.groups.decorator:
            self.groups.decorator = decorator
            self._remake_transports()

    def _remake_transports(self) -> None:
        with self._agreements.record(Call("make_transports")):
            transports = self.groups.make_transports(
                self.everyone.axes, self.communicator, self.groups.ranks, "mpi", self.device
            )
        self.everyone.host, self.everyone.accelerator = transports

    def single_rank_world(self) -> World:
        """Return a new World of size 1 whose only rank is this process. Local: other ranks need not call it.

        It computes on the same device. Its ledger, watchdog settings and groups are new, so that nothing that
        this world compares, emulates or checks applies to it. Its `finish` leaves MPI running.
        """
        world = World(MPI.COMM_SELF)
        world._owns_mpi = False
        world.device = world.everyone.device = self.device
        return world

    def subworld(self, ranks: Sequence[int]) -> World:
        """Return a new World of some ranks of this one, renumbered from 0 in the same order. Collective.

        All ranks of this world call it, each with the ranks of its own subworld, so that each rank belongs to
        exactly one. The result uses the device, ledger, watchdog settings and node memory of this world, and
        compares or checks calls if this world does. Its `finish` leaves MPI running; its communicators exist
        until MPI is finalized.

        Args:
            ranks: Ranks of this world that form the subworld, in rising order; this rank is among them. An
                AssertionError is raised if the ranks of a subworld pass different numbers of ranks.
        """
        assert self.rank in ranks, (self.rank, ranks)
        with self._agreements.record(Call("subworld")):
            communicator = self.communicator.Split(min(ranks), self.rank)
            assert isinstance(communicator, MPI.Intracomm) and communicator.size == len(ranks), ranks
            world = World(communicator, self)
        world.compare_calls(self.groups.checks is not None)
        decorator = self.groups.decorator
        world.decorate_transports(None if decorator is None else decorator.for_subworld())
        return world

    def share_memory(self) -> str:
        """Open memory that the ranks of each node share. Collective.

        Groups that are made later with the transport "shared" use it, if they have several ranks on a node,
        and equally many on each. Groups that exist do not change. A repeated call opens nothing, unless
        `emulate_nodes` has changed the nodes since.

        Returns:
            "" if all nodes have such memory, otherwise the reason why one does not; the same on all ranks.
        """
        with self._agreements.record(Call("share_memory")):
            reasons = self._control.allgather(self.groups.open_memory(self.communicator))
        return next((each for each in reasons if each), "")

    def open_store(self) -> None:
        """Open the store that groups over "nccl" or "gloo" need when they are made. Collective.

        Rank 0 serves it until its process ends. A repeated call does nothing.
        """
        with self._agreements.record(Call("open_store")):
            self.groups.open_store(self.communicator)

    def nodes_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the node of each of these ranks of this world, in the order of `ranks`. Local.

        Nodes are numbered as groups use them: while smaller nodes are emulated, these are counted.
        """
        return [self.topology.nodes[self.groups.ranks[rank]] for rank in ranks]

    @property
    def buffer_bytes(self) -> int:
        """Peak size, in bytes, of the host memory that this rank keeps for reductions; never reset."""
        return self.groups.scratch.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of the memory, in bytes, that this rank has used on its device.

        On a CPU it is resident memory since the start of the process, without memory of other ranks that is
        resident in this process now. On a GPU it is memory of tensors since the last `reset_peak`.
        """
        foreign_bytes = sum(memory.foreign_bytes() for memory in self.groups.memories)
        return max(0, peak_bytes(self.device) - foreign_bytes)

    def new_group(
        self, axes: tuple[str, ...], ranks: tuple[int, ...], transport: str, parent: Group | None = None
    ) -> Group:
        """Make a group of some ranks of this world, with communicators of its own, and return it. Collective.

        All ranks of `parent` call it, each with the ranks of its own group; groups do not overlap. All ranks
        of a group pass the same values. The arguments are not checked. The communicators exist until MPI is
        finalized, so do not make groups repeatedly.

        Args:
            axes: Names of its axes, by which logs and the ledger name it.
            ranks: Ranks of this world, in rising order, with this one among them.
            transport: "nccl", "shared", "mpi" or "gloo"; `choose_transport` returns a name that all ranks can
                use. Other names, also "auto", raise a KeyError. "nccl" is for tensors on GPUs only; those in
                CPU memory then use MPI. "shared" uses shared memory only after `share_memory`, otherwise MPI
                messages. "nccl" and "gloo" need `open_store` before.
            parent: Group that is split, to which all of `ranks` belong; `everyone` if None.
        """
        parent = parent or self.everyone
        with parent.calls.record(Call("new_group")):
            communicator = communicator_of(parent.objects).Split(ranks[0], self.rank)
            assert isinstance(communicator, MPI.Intracomm)
            return self.groups.make(axes, ranks, communicator, transport, self.device)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Let all ranks raise the same error if any rank raises one inside the block.

        Collective at the end of the block. Inside it each rank works alone and must not communicate.
        HpctrainErrors and OSErrors are exchanged. The error that all ranks raise has the exit code of the
        lowest failing rank, and the distinct messages of all ranks (of a UserCodeError only those of that
        rank). Any other exception leaves the block at once, and ends the job.

        Raises:
            HpctrainError: A rank has raised one.
            InputOutputError: A rank has raised an OSError.
        """
        error: HpctrainError | None = None
        try:
            yield
        except (HpctrainError, OSError) as raised:
            error = to_hpctrain_error(raised)
        failure = None
        if error is not None:
            failure = error.exit_code, error.problems, isinstance(error, UserCodeError)
        if self.size == 1:
            failures = [] if failure is None else [failure]
        else:
            with self._agreements.record(Call("agreement")):
                failures = [each for each in self._control.allgather(failure) if each is not None]
        if failures:
            is_user_code = failures[0][2]
            reported = failures[:1] if is_user_code else failures
            self._agreed = combine_errors([each[:2] for each in reported])
            raise self._agreed from error

    def is_agreed(self, error: HpctrainError) -> bool:
        """Return True if `error` is the last error that `agreement` has raised, so that all ranks have it.

        Local.
        """
        return error is self._agreed

    def finish(
        self, code: int = 0, error: HpctrainError | None = None, keep_mpi_after: Collection[int] = ()
    ) -> int:
        """End the work of all ranks in good order, and return the exit code of all ranks. Collective.

        Wait for all ranks, print their error messages on rank 0, close the memory of nodes, and finalize MPI.
        If only this rank has the error and the other ranks do not come within seconds, abort the job. If
        MPI_Finalize of this library is not reliable between nodes, end the processes instead of returning.
        A world that `subworld` or `single_rank_world` made only waits for its ranks and prints messages.

        Args:
            code: Exit code of this rank, if it has no error.
            error: Error of this rank, whose exit code replaces `code`; None without an error.
            keep_mpi_after: Exit codes after which MPI keeps running, for scripts that go on. In a job of
                several ranks, an uncaught exception then still ends all of them. Otherwise they would wait
                for the failed rank when MPI is finalized.

        Returns:
            The code of the lowest rank whose code is not 0 or that has an error; 0 if there is none. It is
            the same on all ranks.
        """
        code = self._await_all(code, error)
        if not self._owns_mpi:
            return code
        leaves_unfinalized = self.nodes > 1 and not finalizes_between_nodes()
        keeps_mpi = code in keep_mpi_after and not leaves_unfinalized
        if not keeps_mpi:
            # Launchers may end the other ranks when one has left, which must not change their exit codes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._control.Barrier()
        if not keeps_mpi or self.size == 1:
            sys.excepthook = sys.__excepthook__
            threading.excepthook = threading.__excepthook__
        if leaves_unfinalized:
            self._leave_unfinalized(code)
        self.groups.close_memories()
        self.groups.close_store()
        if not keeps_mpi:
            finalize_mpi()
        return code

    def _await_all(self, code: int, error: HpctrainError | None) -> int:
        """Wait for all ranks, print their error messages, and return the exit code of all. Collective."""
        problems = () if error is None else tuple(error.problems)
        code = code if error is None else error.exit_code
        self.ledger.activity = "ending"
        self._agreements.enter(Call("end"))  # a hang report names the ranks that do not reach this call
        arrived = self._control.Ibarrier()
        is_common = error is None or self.is_agreed(error)
        deadline = None if is_common else time.monotonic() + GRACE_SECONDS
        pause = 1e-5
        while not arrived.Test():
            if deadline is not None and time.monotonic() > deadline:
                print_problems(problems)
                self.abort(code)
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        outcomes = self._control.allgather((code, problems))
        failed = [outcome for outcome in outcomes if outcome[0] != 0 or outcome[1]]
        if failed:
            code = failed[0][0]
            if self.rank == 0:
                print_problems(combine_errors(failed).problems)
        flush_output()
        return code

    def _leave_unfinalized(self, code: int) -> NoReturn:
        """End all ranks, which have nothing left to do, with this exit code and without finalizing MPI."""
        flush_output()
        time.sleep(SECONDS_FOR_OUTPUT)
        if self.rank == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI would print a message
            self.communicator.Abort(code)
        time.sleep(GRACE_SECONDS)
        os._exit(code)

    def abort(self, code: int = EXIT_INTERNAL) -> NoReturn:
        """End all processes of the job at once with this exit code. Local: any rank, any thread.

        It does not return. stdout and stderr of this rank are flushed. Nothing else is saved or closed.
        """
        flush_output()
        if self._marker is not None:
            self._marker.remove()
        if MPI.COMM_WORLD.size > 1:  # with one rank MPI would only print messages
            self.communicator.Abort(code)
        os._exit(code)

    def abort_with(self, error: BaseException) -> NoReturn:
        """Print an error that this rank did not expect, and abort the job. Local: any rank, any thread.

        The exit code is that of an HpctrainError, 130 after an interrupt, and otherwise 70. Errors other than
        these and lack of memory are printed with their traceback.
        """
        rank = f"hpctrain: rank {self.rank} of {self.size} on {self.hostname}"
        code = EXIT_INTERNAL
        if isinstance(error, HpctrainError):
            print_problems(error.problems)
            code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            print_error(f"{rank}: interrupted")
            code = EXIT_INTERRUPTED
        elif is_out_of_memory(error):
            print_problems([self._describe_out_of_memory(error)])
        else:
            text = "".join(traceback.format_exception(error))
            print_error(f"{rank}: uncaught exception, ending the job\n{text}".removesuffix("\n"))
        self.abort(code)

    def _describe_out_of_memory(self, error: BaseException) -> str:
        used, where = used_bytes(self.device), "" if on_host(self.device) else f" on {self.device}"
        plan = f" (planned: {format_bytes(self.planned_bytes)})" if self.planned_bytes else ""
        why = " ".join(str(error).split()) or type(error).__name__
        return (
            f"rank {self.rank} of {self.size} on {self.hostname} ran out of memory: it used "
            f"{format_bytes(used)}{where}{plan}, and an allocation failed ({why[:300]}); start fewer ranks "
            "per node, or follow the advice of `hpctrain plan`"
        )

    def _on_exception(
        self, _kind: type[BaseException], error: BaseException, _traceback: TracebackType | None
    ) -> None:
        self.abort_with(error)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            self.abort_with(arguments.exc_value)
