"""Process groups of torch: failed operations, groups that nobody uses any more, and their number.

Tests of comm/transports/process_group.py.
"""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.gloo import GlooTransport
from hpctrain.comm.transports.nccl import NcclTransport
from hpctrain.comm.transports.process_group import STREAMS, GroupStore, _node_address
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.setting import TransportSetting
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


@pytest.mark.parametrize("has_gpu", [True, False])
def test_more_process_groups_than_streams_are_a_warning(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    store, user = GroupStore(HashStore(), 0), SimpleUser()
    for _ in range(STREAMS):
        store.keep(object(), user)
    assert caplog.messages == []
    for _ in range(3):
        store.keep(object(), user)
    assert len(caplog.messages) == has_gpu
    assert not has_gpu or caplog.messages[0].startswith("this rank has more than 32 process groups")


class SimpleUser:
    """User of process groups."""


def test_communicators_and_channels_are_destroyed_with_their_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end when the next group is made, after the GPU is idle; the others end with the store."""
    ends: list[str] = []

    class Backend:
        """Process group that records its end."""

        def __init__(self, *arguments: Any) -> None:
            self.name = str(arguments[3])

        def abort(self) -> None:
            ends.append(f"abort {self.name}")

        def shutdown(self) -> None:
            ends.append(f"shutdown {self.name}")

    def make() -> NcclTransport:
        return NcclTransport(setting, True, Backend)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: ends.append("synchronize"))
    communicator: Any = SimpleNamespace(rank=0, size=2, bcast=lambda value: value)
    store, cpu = GroupStore(HashStore(), 0), torch.device("cpu")
    setting = TransportSetting(communicator, ("pipeline",), cpu, [0, 0], ReductionScratch(), None, store)
    first = make()
    assert ends == []
    del first
    second = make()
    names = [f"{prefix}pipeline 0.{{}}" for prefix in ("", "channel 0 to 1 of ", "channel 1 to 0 of ")]
    assert ends[0] == "synchronize"
    assert sorted(ends[1:]) == sorted(f"abort {name.format(0)}" for name in names)
    ends.clear()
    store.close()
    assert ends == [f"shutdown {name.format(1)}" for name in names]
    assert second.size == 2


@pytest.mark.parametrize(
    ("addresses", "address"),
    [
        ({"node": "10.0.0.7"}, "node"),
        ({"node": "127.0.1.1"}, "10.9.9.9"),
        ({}, "10.9.9.9"),
    ],
    ids=["in a network", "loopback only", "unknown name"],
)
def test_the_address_of_a_node_is_one_that_others_reach(
    addresses: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is reached by the host name, or by the address of this node if the name does not resolve."""

    def resolve(name: str) -> str:
        if name not in addresses:
            raise socket.gaierror("Name or service not known")
        return addresses[name]

    class Probe(SimpleUser):
        """Socket whose own address is that of the network."""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            """Do nothing."""

        def connect(self, _: tuple[str, int]) -> None:
            """Do nothing."""

        def getsockname(self) -> tuple[str, int]:
            return "10.9.9.9", 40000

    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "socket", lambda *_: Probe())
    assert _node_address() == address


def test_a_node_without_a_network_gives_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "gethostbyname", fail)
    monkeypatch.setattr(socket, "socket", fail)
    assert _node_address() == "node"


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
