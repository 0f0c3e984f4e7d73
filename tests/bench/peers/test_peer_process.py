"""A peer in a process of its own: its environment, and its end, however that comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.bench.peers.peer_process import PeerEndedError, PeerProcess, without_launcher
from hpctrain.comm.world import World
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from tests.engines import LLAMA, small_deck


def test_it_is_no_rank() -> None:
    environment = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "MALLOC_ARENA_MAX": "2"}
    assert list(without_launcher(environment)) == ["PATH", "OMPI_ALLOW_RUN_AS_ROOT", "MALLOC_ARENA_MAX"]


def test_what_it_cannot_begin_is_told_by_the_rank(world: World) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(HpctrainError, match="requires a mixture of experts"):
        PeerProcess("transformers-eager", small_deck(*LLAMA), world.single_rank_world(), ())


def test_it_has_its_environment_and_its_end_is_an_error(world: World) -> None:
    peer = PeerProcess("ddp-kept", small_deck("model.dropout=0"), world.single_rank_world(), ())
    assert peer.step() > 0
    variables = Path(f"/proc/{peer.process.pid}/environ").read_text().split("\0")
    assert {"MALLOC_MMAP_MAX_=0", "RANK=0", "WORLD_SIZE=1"} <= {*variables}
    assert "MALLOC_MMAP_MAX_" not in os.environ
    peer.process.kill()
    with pytest.raises(PeerEndedError, match="ddp-kept: its process ended with exit code -9") as caught:
        peer.step()
    assert caught.value.exit_code == EXIT_INTERNAL
    peer.close()


def test_it_ends_with_its_rank() -> None:
    program = (
        "import subprocess, sys, time; "
        "from hpctrain.bench.peers.peer_process import _end_with_parent as end; "
        "import os; pid = os.fork(); "
        "print(os.getpid(), flush=True) if not pid and end() is None else None; time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("it outlived its rank")
