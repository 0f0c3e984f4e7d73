"""A peer in a process of its own beside each rank: its memory, its libraries and its environment are its own.

What we set in our processes does not help or hinder it, nor does what it needs take memory of ours. The rank
tells its peer in lines of JSON when to begin a step, and sleeps until it has heard of the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpctrain.bench.peers.training_peers import TRAINING_PEERS
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.host.commands import module_command

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.deck.schema import Deck

LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_", "MPI_LOCAL", "HYDRA_", "MPIEXEC_", "SLURM_", "PALS_")
"""How variables begin by which launchers tell ranks who they are, and what these start who started it."""

_SECONDS = 60.0
_PARENT_DIED = 1  # PR_SET_PDEATHSIG


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of what is no rank; what the user allows Open MPI stays."""
    allowed = "OMPI_ALLOW_"
    return {k: v for k, v in environment.items() if not k.startswith(LAUNCHERS) or k.startswith(allowed)}


class PeerEndedError(HpctrainError):
    """A peer that ended by itself; what it said of the reason is on stderr."""

    exit_code = EXIT_INTERNAL


class PeerProcess:
    """The peer of this rank. Collective, as is `step`; HpctrainError on all ranks where one cannot begin.
    PeerEndedError where its process ends before it is closed.

    `split` are the blocks of each part of our pipeline, empty where there is none.
    """

    def __init__(self, name: str, deck: Deck, world: World, split: Sequence[int]) -> None:
        from hpctrain.deck.toml_text import deck_text

        self.name = name
        place = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank}
        self.process = subprocess.Popen(
            module_command("hpctrain.bench.peers.peer_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=without_launcher(os.environ)
            | {key: str(value) for key, value in place.items()}
            | {"DS_ACCELERATOR": "cpu"}
            | dict(TRAINING_PEERS[name].environment),
        )
        job = {
            "name": name,
            "deck": deck_text(deck),
            "rank": world.rank,
            "size": world.size,
            "split": [*split],
        }
        with world.agreement():
            port = self._ask(job)["port"]
        host, port = world.everyone.broadcast_object((world.hostname, port))
        with world.agreement():
            self._ask({"host": host, "port": port})

    def step(self) -> float | None:
        """One optimizer step; the mean loss of the tokens that this rank's peer computed it of, if of any."""
        loss: float | None = self._ask({"do": "step"})["loss"]
        return loss

    def memory(self) -> tuple[int, int]:
        """Return the process's peaks in bytes: of `resident_bytes`, and of `proportional_bytes`."""
        answer = self._ask({"do": "memory"})
        return answer["resident"], answer["own"]

    def close(self) -> None:
        """End it."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = self.process.wait()
            raise PeerEndedError(f"--against {self.name}: its process ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        if "problems" in answer:
            raise HpctrainError(answer["problems"])
        return answer


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int


def main() -> None:
    """What the process does: lines from stdin are answered on stdout, where nothing else is written."""
    with os.fdopen(os.dup(1), "w") as answers, open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        _end_with_parent()

        def say(answer: Mapping[str, object]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            _serve(say)
        except HpctrainError as error:
            say({"problems": error.problems})


def _serve(say: Any) -> None:
    import torch
    import torch.distributed
    from torch._C._distributed_c10d import TCPStore

    from hpctrain.deck.read import parse_deck
    from hpctrain.host.memory import peak_proportional_bytes, peak_rss_bytes

    job = json.loads(sys.stdin.readline())
    deck = parse_deck(job["deck"], includes=False)
    place, peer = _Place(job["rank"], job["size"]), TRAINING_PEERS[job["name"]]
    torch.set_num_threads(deck.run.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    module = import_module(f"hpctrain.bench.peers.{peer.module}")
    waiting = timedelta(seconds=_SECONDS)
    store = None
    if place.rank == 0:
        store = TCPStore("127.0.0.1", 0, place.size, True, waiting, wait_for_workers=False)
    say({"port": store.port if store else 0})
    there = json.loads(sys.stdin.readline())
    if store is None:
        store = TCPStore(there["host"], there["port"], place.size, False, waiting)
    if peer.axis != "none":
        torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    step = module.peer(job["name"], deck, place, job["split"])
    say({})
    for line in sys.stdin:
        if json.loads(line)["do"] == "step":
            say({"loss": step()})
        else:
            say({"resident": peak_rss_bytes(), "own": peak_proportional_bytes()})
    if peer.axis != "none":
        torch.distributed.destroy_process_group()


def _end_with_parent() -> None:
    """Where the system can, end as soon as the rank has ended, however it did; others may wait for it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


if __name__ == "__main__":
    main()
