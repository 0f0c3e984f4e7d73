"""Runs of a sweep on this machine: some at a time, each a process of its own, of which one may fail alone."""

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

_NAP = 0.2

Told = Callable[[str], None]


@dataclass(frozen=True)
class SweepSlot:
    """What one run at a time has: its cores, None where it shares all; its GPUs, None where it does so."""

    cores: tuple[int, ...] | None
    gpus: tuple[str, ...] | None


@dataclass
class StopRequest:
    """Whether runs are to stop: once in good order, twice at once."""

    times: int = 0


@dataclass
class _Running:
    variant: SweepVariant
    process: subprocess.Popen[bytes]
    slot: SweepSlot
    asked: int = field(default=0)


def slots_of(
    wanted: int | None, ranks: int, threads: int, cores: Sequence[int], gpus: Sequence[str]
) -> list[SweepSlot]:
    """The slots of a machine for runs of so many ranks: as many as have cores of their own, and GPUs where
    there are any, but one at the least; or as many as are `wanted`, which share cores where these do not
    suffice.
    """
    most = max(1, len(cores) // (ranks * threads))
    if gpus:
        most = min(most, max(1, len(gpus) // ranks))
    count = most if wanted is None else wanted
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
    deck: Path, variants: Sequence[SweepVariant], ranks: int, slots: Sequence[SweepSlot], show: Told
) -> dict[str, int]:
    """Train the variants, each in the next slot that is free, and go on where runs were stopped; their exit
    codes by name, of those that ended. What they say goes to a file beside the folder of each.

    Asked to end (SIGINT, SIGTERM, SIGHUP), it has its runs stop with a checkpoint and starts no other; asked
    again, it ends them. HpctrainError where runs of several ranks cannot be started here.
    """
    words = command(ranks, os.environ)
    waiting, free = list(reversed(variants)), list(slots)
    running: list[_Running] = []
    codes: dict[str, int] = {}
    with heeding() as asked:
        try:
            while running or (waiting and not asked.times):
                while waiting and free and not asked.times:
                    variant, slot = waiting.pop(), free.pop()
                    running.append(_Running(variant, _start(deck, variant, words, slot), slot))
                    number = len(codes) + len(running)
                    show(f"{variant.name}: started ({number} of {len(variants)})")
                time.sleep(_NAP)
                for each in list(running):
                    _ask(each, asked.times)
                    code = each.process.poll()
                    if code is not None:
                        code = _outcome(each, code)
                        running.remove(each)
                        free.append(each.slot)
                        codes[each.variant.name] = code
                        show(f"{each.variant.name}: {_ended(each.variant, code)}")
        finally:
            for each in running:
                _signal(each.process, signal.SIGKILL)
                each.process.wait()
    if waiting:
        show(f"{counted(len(waiting), 'run')} not started; repeat the command to continue")
    return codes


def command(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """The words that start hpctrain on so many ranks of this machine."""
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
    """The file of what a run says."""
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
    with failing_as(f"{output}: cannot be written"), output.open("ab") as stream, _on(slot.cores):
        return subprocess.Popen(
            [*words, "run", *settings, "--resume", "--", str(deck)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what the terminal sends is for this process, which asks them to stop
        )


@contextmanager
def _on(cores: Sequence[int] | None) -> Iterator[None]:
    """What is started meanwhile has these cores."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def _ask(each: _Running, times: int) -> None:
    """Pass on what was asked for since: USR2, which launchers forward, has a run stop with a checkpoint."""
    if times > each.asked:
        each.asked = times
        _signal(each.process, signal.SIGUSR2 if times == 1 else signal.SIGKILL)


def _outcome(each: _Running, code: int) -> int:
    """The exit code; what asks a run to stop ends one that has not come to heed it yet, and loses nothing."""
    early = each.asked == 1 and code in (-signal.SIGUSR2, 128 + signal.SIGUSR2)
    return EXIT_AGAIN if early else code


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _ended(variant: SweepVariant, code: int) -> str:
    if code == EXIT_DONE:
        return "done"
    if code == EXIT_AGAIN:
        return "stopped with a checkpoint"
    why = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"failed with {why}; see {output_of(variant)}"


@contextmanager
def heeding() -> Iterator[StopRequest]:
    """Count what asks this process to end meanwhile, but what its starter lets it ignore, as `nohup` does."""
    asked = StopRequest()

    def heed(_: int, __: FrameType | None) -> None:
        asked.times += 1

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, heed) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
