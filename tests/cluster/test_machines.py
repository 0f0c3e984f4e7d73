"""The virtual cluster is one: separate nodes for MPI, with memory and folders of their own, and links."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import HEAD, NODES, ROOT, Cluster, metrics, wait_until

pytestmark = pytest.mark.cluster

PLACES = """
import os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
print(world.allreduce(1), world.rank, socket.gethostname(), node.rank, node.size)
"""


#: The environment of an MPI, and how its launcher starts ranks on the two nodes.
LAUNCH = {
    "openmpi": [
        *(
            ".venv",
            "mpirun.openmpi",
            "--mca",
            "plm_rsh_agent",
            "{agent}",
            "--mca",
            "plm_rsh_no_tree_spawn",
            "1",
        ),
        *("--host", "n1:2,n2:2", "--oversubscribe", "--bind-to", "none"),
    ],
    "mpich": [
        *(".venv-mpich", "mpirun.mpich", "-launcher", "ssh", "-launcher-exec", "{agent}"),
        *("-hosts", "n1:2,n2:2", "-localhost", "head"),
    ],
}


def test_srun_sees_two_nodes_with_two_ranks_each(cluster: Cluster) -> None:
    started = ("srun", "-N", "2", "-n", "4", "--oversubscribe", "--mpi=pmix", "python", "-c", PLACES)
    ranks = cluster.run(*started, SLURM_PMIX_FENCE="ring")
    assert sorted(ranks.stdout.splitlines()) == ["4 0 n1 0 2", "4 1 n1 1 2", "4 2 n2 0 2", "4 3 n2 1 2"]


@pytest.mark.parametrize("mpi", sorted(LAUNCH))
def test_mpirun_without_slurm_trains_on_two_nodes(
    cluster: Cluster, project: Path, alone: Callable[..., Path], mpi: str
) -> None:
    """The launchers' own way from node to node: an agent in the place of ssh, here nsenter."""
    python = ROOT / LAUNCH[mpi][0] / "bin/python"
    if not python.exists():
        pytest.skip(f"no environment with {mpi} (make install MPI={mpi})")
    agent = cluster.folder / "agent"
    cases = "".join(f"{name}) first={cluster.machines[name].first};;\n" for name in NODES)
    agent.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nnode=$1; shift\ncase $node in\n"
        + cases
        + "esac\n"
        'exec nsenter --target $first --mount --uts --ipc --net --pid bash -c "$*"\n'
    )
    agent.chmod(0o755)
    # Started in the head's network, but seeing the host's processes, which the agent names.
    enter = ["nsenter", "--target", str(cluster.machines[HEAD].first), "--net", "--uts"]
    command = [word.format(agent=agent) for word in LAUNCH[mpi][1:]]
    run = ["-m", "hpctrain", "run", "steady.toml", "--set", "run.steps=2"]
    ranks = subprocess.run(
        [*enter, *command, "-n", "4", str(python), *run],
        cwd=project,
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr
    folder = project / "runs/steady"
    assert (
        "4 ranks (pipeline 1 x data 4 x context 1 x tensor 1) on 2 nodes" in (folder / "log.txt").read_text()
    )
    expected = [step["loss"] for step in metrics(alone("steady.toml", "run.steps=2"))]
    assert [step["loss"] for step in metrics(folder)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_nodes_share_no_memory_and_no_temporary_folder(cluster: Cluster, folder: str) -> None:
    cluster.run("touch", f"{folder}/mine", on="n1")
    assert "mine" in cluster.run("ls", folder, on="n1").stdout.split()
    assert "mine" not in cluster.run("ls", folder, on="n2").stdout.split()
    assert not (Path(folder) / "mine").exists()
    cluster.run("rm", f"{folder}/mine", on="n1")


def test_a_limited_link_is_slow(cluster: Cluster) -> None:
    """4 MB through 16 Mbit/s take two seconds at least; the clock is the test's subject here."""
    server = (
        "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept()\nwhile c.recv(1 << 16): pass"
    )
    client = (
        "import socket, time; c = socket.create_connection(('n2', 7000)); c.sendall(bytes(4_000_000));"
        "c.shutdown(socket.SHUT_WR); c.recv(1)"
    )
    cluster.limit_link("n2", "16mbit")
    listener = subprocess.Popen(
        [*cluster.machines["n2"].enter, "python", "-c", server], env=cluster.environment
    )
    try:
        listening = ("python", "-c", "print('1B58' in open('/proc/net/tcp').read())")
        wait_until(lambda: "True" in cluster.run(*listening, on="n2").stdout, 10, "the listener")
        start = time.monotonic()
        cluster.run("python", "-c", client, on="n1")
        assert time.monotonic() - start > 1.8
    finally:
        listener.kill()
        listener.wait()


def test_the_host_keeps_its_network(cluster: Cluster) -> None:
    assert os.uname().nodename not in {"head", *NODES}
    addresses = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    assert "10.77.0." not in addresses
