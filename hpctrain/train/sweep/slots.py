"""Concurrent runs of a sweep on this machine, each in its own process, so that one may fail alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, HpctrainError, failing_as
from hpctrain.host.commands import module_command, mpirun_command
from hpctrain.host.device import GPU_SELECTORS, visible_gpus
from hpctrain.text import counted
from hpctrain.train.sweep.variants import SweepVariant

_POLL_SECONDS = 0.2

ShowLine = Callable[[str], None]


@dataclass(frozen=True)
class SweepSlot:
    """Cores and GPUs of one run at a time; None if it shares all of them."""

    cores: tuple[int, ...] | None
    gpus: tuple[str, ...] | None


@dataclass
class StopRequest:
    """Number of requests to stop: after one, runs stop with a checkpoint; after two, they are killed."""

    times: int = 0


@dataclass
class _Running:
    variant: SweepVariant
    process: subprocess.Popen[bytes]
    slot: SweepSlot
    requests: int = field(default=0)


def make_slots(
    requested: int | None, ranks: int, threads: int, cores: Sequence[int], gpus: Sequence[str]
) -> list[SweepSlot]:
    """Return the slots of a machine.

    Args:
        requested: Number of slots; None for as many as have separate cores and GPUs, but at least one. Slots
            share cores if there are too few.
        ranks: Number of ranks of a run.
        threads: Number of threads of a rank.
        cores: Cores of the machine.
        gpus: GPUs of the machine.
    """
    most = max(1, len(cores) // (ranks * threads))
    if gpus:
        most = min(most, max(1, len(gpus) // ranks))
    count = most if requested is None else requested
    share, gpu_share = len(cores) // count, len(gpus) // count
    own = share >= ranks * threads
    return [
        SweepSlot(
            tuple(cores[number * share : (number + 1) * share]) if own and count > 1 else None,
            tuple(gpus[number * gpu_share : (number + 1) * gpu_share]) if gpu_share and count > 1 else None,
        )
        for number in range(count)
    ]


def train_all(
    deck: Path, variants: Sequence[SweepVariant], ranks: int, slots: Sequence[SweepSlot], show: ShowLine
) -> dict[str, int]:
    """Train the runs, each in the next free slot. Runs that were stopped resume.

    The output of a run is written to a file beside its folder. After SIGINT, SIGTERM or SIGHUP, runs stop
    with a checkpoint, and no further run starts. After a second signal, they are killed.

    Returns:
        The exit codes of the runs that have ended, by name.

    Raises:
        HpctrainError: Runs of several ranks cannot be started on this machine.
    """
    words = command(ranks, os.environ)
    waiting, free = list(reversed(variants)), list(slots)
    running: list[_Running] = []
    codes: dict[str, int] = {}
    with counting_signals() as requests:
        try:
            while running or (waiting and not requests.times):
                while waiting and free and not requests.times:
                    variant, slot = waiting.pop(), free.pop()
                    running.append(_Running(variant, _start(deck, variant, words, slot), slot))
                    number = len(codes) + len(running)
                    show(f"{variant.name}: started ({number} of {len(variants)})")
                time.sleep(_POLL_SECONDS)
                for each in list(running):
                    _forward_requests(each, requests.times)
                    code = each.process.poll()
                    if code is not None:
                        code = _exit_code(each, code)
                        running.remove(each)
                        free.append(each.slot)
                        codes[each.variant.name] = code
                        show(f"{each.variant.name}: {_end_text(each.variant, code)}")
        finally:
            for each in running:
                _signal(each.process, signal.SIGKILL)
                each.process.wait()
    if waiting:
        show(f"{counted(len(waiting), 'run')} not started; repeat the command to continue")
    return codes


def command(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts hpctrain on so many ranks of this machine."""
    own = module_command()
    if ranks == 1:
        return own
    launcher = mpirun_command(environment)
    if launcher is None:
        raise HpctrainError(
            f"--ranks-each {ranks}: found neither mpirun nor $MPIRUN; write a job with --slurm instead"
        )
    return [*launcher, "-n", str(ranks), *own]


def output_of(variant: SweepVariant) -> Path:
    """Return the file for the output of a run."""
    return variant.folder.with_name(f"{variant.name}.out")


def _start(
    deck: Path, variant: SweepVariant, words: Sequence[str], slot: SweepSlot
) -> subprocess.Popen[bytes]:
    settings = [word for setting in variant.settings for word in ("--set", setting)]
    environment = {"OMP_NUM_THREADS": str(variant.deck.run.threads), **os.environ}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if slot.gpus is not None:
        environment[GPU_SELECTORS[visible_gpus().kind]] = ",".join(slot.gpus)
    output = output_of(variant)
    with failing_as(f"{output}: cannot be written"), output.open("ab") as stream, _bound_to(slot.cores):
        return subprocess.Popen(
            [*words, "run", *settings, "--resume", "--", str(deck)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # signals of the terminal go to this process only
        )


@contextmanager
def _bound_to(cores: Sequence[int] | None) -> Iterator[None]:
    """Start processes on these cores during the block."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def _forward_requests(each: _Running, times: int) -> None:
    """Forward new requests to a run. After USR2, which launchers forward, it stops with a checkpoint."""
    if times > each.requests:
        each.requests = times
        _signal(each.process, signal.SIGUSR2 if times == 1 else signal.SIGKILL)


def _exit_code(each: _Running, code: int) -> int:
    """Return the exit code of a run. If USR2 killed it before it handled signals, it counts as stopped."""
    early = each.requests == 1 and code in (-signal.SIGUSR2, 128 + signal.SIGUSR2)
    return EXIT_AGAIN if early else code


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _end_text(variant: SweepVariant, code: int) -> str:
    if code == EXIT_DONE:
        return "done"
    if code == EXIT_AGAIN:
        return "stopped with a checkpoint"
    why = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"failed with {why}; see {output_of(variant)}"


@contextmanager
def counting_signals() -> Iterator[StopRequest]:
    """Count the signals that ask this process to end, except ignored ones, as after `nohup`."""
    requests = StopRequest()

    def count(_: int, __: FrameType | None) -> None:
        requests.times += 1

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, count) for number in handled}
    try:
        yield requests
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
