"""Process groups of torch: what becomes of failed operations, and of groups that nobody uses any more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.gloo import GlooTransport
from hpctrain.comm.world import World

#: The GPU of rank 1 is lost: torch's handle of its second call raises an error, while rank 0 waits.
PROGRAM = """
from types import SimpleNamespace
import torch
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.verb import run_verb

def fail():
    raise RuntimeError("NCCL error: unhandled cuda error\\nLast error:")

def verb(world):
    world.open_store()
    group = Mesh(world, {"data": 2}, "gloo").group("data")
    group.all_reduce(torch.ones(4))
    if world.rank == 1:
        group.host.group = SimpleNamespace(allreduce=lambda _: SimpleNamespace(wait=fail))
    group.all_reduce(torch.ones(4))

run_verb(verb, "cpu")
"""


MISSING = """
import time
from hpctrain.comm.verb import run_verb

def verb(world):
    world.hang.set_limit(2)
    world.open_store()
    if world.rank == 0:
        world.new_group(("data",), (0, 1), "gloo")
    time.sleep(1000)

run_verb(verb, "cpu")
"""


def test_a_rank_that_does_not_make_a_group_is_named(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(MISSING)
    done = launch(2, tmp_path / "program.py", timeout=60.0)
    assert done.returncode == 70, done.stderr
    assert re.search(r"error: rank 1 on \S+ never entered new_group \d+ of world ", done.stderr), done.stderr


def test_a_failed_call_is_a_sentence(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch(2, tmp_path / "program.py", timeout=60.0)
    assert done.returncode == 70, done.stderr
    sentence = (
        "a call of the group data failed (NCCL error: unhandled cuda error); look for the first error of "
    )
    assert done.stderr.count(f"hpctrain: error: {sentence}") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.mpi(min_size=2)
def test_process_groups_end_with_their_users(world: World) -> None:
    world.open_store()
    store = world.groups.store
    assert store is not None
    mesh = Mesh(world, {"data": world.size}, "gloo")
    transport = mesh.group("data").host
    assert isinstance(transport, GlooTransport)
    first, count = transport.group, len(store._connected)
    del mesh, transport
    group = Mesh(world, {"data": world.size}, "gloo").group("data")
    assert first not in store._connected
    assert len(store._connected) == count
    assert group.all_reduce(torch.ones(2)).tolist() == [world.size] * 2


INTERFACE = """
import os
import sys
import torch
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.verb import run_verb

def verb(world):
    os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1 + world.rank]
    world.open_store()
    total = Mesh(world, {"data": 2}, "gloo").group("data").all_reduce(torch.ones(1))
    os.write(1, f"{total.item()}\\n".encode())

run_verb(verb, "cpu")
"""


@pytest.mark.parametrize("other", ["lo", "no-such"])
def test_gloo_uses_the_interface_of_the_environment(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, other: str
) -> None:
    (tmp_path / "program.py").write_text(INTERFACE)
    done = launch(2, tmp_path / "program.py", "lo", other, timeout=60.0)
    if other == "lo":
        assert (done.returncode, done.stdout) == (0, "2.0\n2.0\n"), done.stderr
        return
    assert done.returncode == 2, done.stderr
    sentence = r'transport = "gloo": GLOO_SOCKET_IFNAME=no-such: \S+ has no such network interface; it has '
    assert re.search(sentence, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
