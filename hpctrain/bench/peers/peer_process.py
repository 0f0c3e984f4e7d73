"""Process beside each rank in which a peer trains, with its own memory, libraries and environment.

Settings of hpctrain's processes thus do not affect the peer, and its memory is measured separately. The rank
sends requests as lines of JSON, such as to take a step, and sleeps until the peer has answered.
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
from collections.abc import Callable, Mapping, Sequence
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
"""Prefixes of the environment variables that launchers of MPI set for the processes that they start."""

_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without launcher variables, for a program that is not a rank of this job.

    Permissions that the user gave to Open MPI remain.
    """
    permission = "OMPI_ALLOW_"
    return {k: v for k, v in environment.items() if not k.startswith(LAUNCHERS) or k.startswith(permission)}


class PeerEndedError(HpctrainError):
    """Unexpected end of the process of a peer, which wrote its reason to stderr."""

    exit_code = EXIT_INTERNAL


class PeerProcess:
    """Peer of this rank, in a process of its own.

    Its methods raise PeerEndedError if the process has ended.
    """

    def __init__(self, name: str, deck: Deck, world: World, split: Sequence[int]) -> None:
        """Start the process, and connect it with those of the other ranks. Collective.

        Args:
            name: Name of the peer, of TRAINING_PEERS.
            deck: Deck to train.
            world: All ranks.
            split: Number of blocks in each part of hpctrain's pipeline; empty without a pipeline.

        Raises:
            HpctrainError: The peer of a rank cannot start. All ranks raise it.
        """
        from hpctrain.deck.toml_text import deck_text

        self.name = name
        rank_variables = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank}
        self.process = subprocess.Popen(
            module_command("hpctrain.bench.peers.peer_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=without_launcher(os.environ)
            | {key: str(value) for key, value in rank_variables.items()}
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
        """Take one optimizer step. Collective.

        Returns:
            Mean loss of the tokens for which the peer of this rank computed it; None if there are none.
        """
        loss: float | None = self._ask({"do": "step"})["loss"]
        return loss

    def memory(self) -> tuple[int, int]:
        """Return the process's peaks in bytes: of `resident_bytes`, and of `proportional_bytes`."""
        answer = self._ask({"do": "memory"})
        return answer["resident"], answer["own"]

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(_TIMEOUT_S)
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
class _ProcessRank:
    """Rank of this process and number of processes (see `torch_training.PeerRank`)."""

    rank: int
    size: int


def main() -> None:
    """Answer requests on stdin with lines on stdout, to which nothing else is written."""
    with os.fdopen(os.dup(1), "w") as answers, open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        _end_with_parent()

        def reply(answer: Mapping[str, object]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            _serve(reply)
        except HpctrainError as error:
            reply({"problems": error.problems})


def _serve(reply: Callable[[Mapping[str, object]], None]) -> None:
    """Build the peer that the first request describes, and take its steps until stdin is closed."""
    import torch
    import torch.distributed
    from torch._C._distributed_c10d import TCPStore

    from hpctrain.deck.read import parse_deck
    from hpctrain.host.memory import peak_proportional_bytes, peak_rss_bytes

    job = json.loads(sys.stdin.readline())
    deck = parse_deck(job["deck"], includes=False)
    peer_rank, peer = _ProcessRank(job["rank"], job["size"]), TRAINING_PEERS[job["name"]]
    torch.set_num_threads(deck.run.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    module = import_module(f"hpctrain.bench.peers.{peer.module}")
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = None
    if peer_rank.rank == 0:
        store = TCPStore("127.0.0.1", 0, peer_rank.size, True, timeout, wait_for_workers=False)
    reply({"port": store.port if store else 0})
    address = json.loads(sys.stdin.readline())
    if store is None:
        store = TCPStore(address["host"], address["port"], peer_rank.size, False, timeout)
    if peer.axis != "none":
        torch.distributed.init_process_group(
            "gloo", store=store, rank=peer_rank.rank, world_size=peer_rank.size
        )
    step = module.peer(job["name"], deck, peer_rank, job["split"])
    reply({})
    for line in sys.stdin:
        if json.loads(line)["do"] == "step":
            reply({"loss": step()})
        else:
            reply({"resident": peak_rss_bytes(), "own": peak_proportional_bytes()})
    if peer.axis != "none":
        torch.distributed.destroy_process_group()


def _end_with_parent() -> None:
    """Let the system kill this process when the rank has ended, where it can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
