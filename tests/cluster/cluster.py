"""A Slurm cluster of virtual nodes on one machine, for the tests of this folder.

Every machine of the cluster is a set of Linux namespaces of its own: network, hostname, mounts, processes and
System V shared memory. `head` runs munged and slurmctld and holds the bridge; each node has a link to it, its
own /tmp and /dev/shm and one slurmd. Nothing of it is visible outside: the host's network and configuration
stay as they are, and a machine ends, with all that runs on it, when its first process does.
The machines share the file system but for these folders; `Cluster.folder` is the disk that all nodes see.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.files import user_cache

ROOT = Path(__file__).resolve().parents[2]
HEAD = "head"
ADDRESSES = {HEAD: "10.77.0.254", "n1": "10.77.0.1", "n2": "10.77.0.2"}
NODES = tuple(name for name in ADDRESSES if name != HEAD)
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "mpirun"]
PROGRAMS += ["ip", "tc", "unshare", "nsenter", "setpriv", "mount"]
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost=head({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=4
SlurmctldTimeout=5
MessageTimeout=3
TCPTimeout=2
KillWait=2
UnkillableStepTimeout=20
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why no cluster can be made here, or None."""
    if sys.platform != "linux":
        return "needs Linux's namespaces"
    if os.geteuid() != 0:
        return "needs root, to make network and mount namespaces"
    absent = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if absent:
        return f"needs {', '.join(absent)} (on Debian: apt-get install slurm-wlm munge iproute2 util-linux)"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"needs namespaces, which this machine refuses: {tried.stderr.strip()}"
    return None


def search_path() -> str:
    """$PATH with the folders of system programs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str | Callable[[], str], every: float = 0.4
) -> None:
    """Return once `condition()` holds.

    Args:
        condition: Function that is called every `every` seconds. A question to Slurm costs the ranks a few
            hundredths of a second.
        seconds: Longest time to wait.
        what: Text of the failure, or a function that returns it and is called when the time is over.
        every: Seconds between two calls.

    Raises:
        AssertionError: The condition does not hold after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds} s for {what if isinstance(what, str) else what()}")
        time.sleep(every)


class Machine:
    """One set of namespaces, alive as long as its first process."""

    def __init__(self, name: str) -> None:
        """Make the namespaces; they end with `end`, or when this process dies in whatever way."""
        self.name = name
        waits = "echo; sleep infinity & wait $!"  # bash, as the first process, buries the orphans too
        command = [
            "unshare",
            *NAMESPACES,
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
        ]
        self.keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command, "bash", "-c", waits],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # some versions of unshare complain when they are ended
            env={"PATH": search_path()},
        )
        assert self.keeper.stdout is not None
        assert self.keeper.stdout.readline() == b"\n", f"the namespaces of {name} could not be made"
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
        self.first = int(children[0])
        self.enter = ["nsenter", "--target", str(self.first), *NAMESPACES]

    def end(self) -> None:
        """Kill every process of the machine at once, as a loss of power would."""
        if self.keeper.poll() is None:
            os.kill(self.first, signal.SIGKILL)
        self.keeper.wait()
        assert self.keeper.stdout is not None
        self.keeper.stdout.close()


class Cluster:
    """The cluster: `start` it, give it jobs, hurt it, `stop` it. Also a context manager."""

    def __init__(self, folder: Path) -> None:
        """`folder` becomes the shared disk of the nodes; it has to be empty or absent."""
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.hurt: set[str] = set()
        self.environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), search_path()]),
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(user_cache().parent),  # compiled libraries, which all clusters share
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the nodes have fewer cores than they believe
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the machines ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all machines and return when every node is ready for jobs."""
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        hosts = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={ADDRESSES[node]} CPUs=2 RealMemory=4000" for node in NODES
        )
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(address=ADDRESSES[HEAD], folder=self.folder, nodes=nodes)
        )
        self._boot(HEAD)
        self.run("ip", "link", "add", "bridge", "type", "bridge")
        self.run("ip", "address", "add", f"{ADDRESSES[HEAD]}/24", "dev", "bridge")
        self.run("ip", "link", "set", "bridge", "up")
        folder = self.folder / "munge"
        own = [f"--{name}={folder / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self.run("munged", "--force", f"--key-file={key}", *own)
        self.run("slurmctld")
        for node in NODES:
            self._start_node(node)
        self._wait_for_nodes()

    def stop(self) -> None:
        """End every machine with all that runs on it."""
        for name in reversed(list(self.machines)):
            self.machines.pop(name).end()

    def run(
        self,
        *command: str | Path,
        on: str = HEAD,
        check: bool = True,
        cwd: Path | None = None,
        timeout: float = 60,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine (default: the head) and return it completed, with its text."""
        words = [*self.machines[on].enter, f"--wd={cwd or self.folder}", *map(str, command)]
        done = subprocess.run(
            words,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done

    def _boot(self, name: str) -> None:
        """Start a machine: name, loopback, hosts, and folders of its own where machines do not share."""
        self.machines[name] = Machine(name)
        self.run("hostname", name, on=name)
        self.run("ip", "link", "set", "lo", "up", on=name)
        self.run("mount", "--bind", self.folder / "hosts", "/etc/hosts", on=name)
        if name == HEAD:
            return
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm", on=name)
        # The new /tmp must not hide what is shared and happens to lie in the old one.
        self.run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/mnt", on=name)
        for path in {ROOT, self.folder.resolve(), Path(sys.prefix).resolve()}:
            if path.is_relative_to("/tmp"):
                place = Path("/mnt") / path.relative_to("/tmp")
                self.run("mkdir", "-p", place, on=name)
                self.run("mount", "--bind", path, place, on=name)
        self.run("mount", "--move", "/mnt", "/tmp", on=name)

    def _start_node(self, node: str) -> None:
        self._boot(node)
        first = self.machines[node].first
        # `ip` runs in the head's network alone, since it names the node by the host's number of its process.
        network = ["nsenter", f"--net=/proc/{self.machines[HEAD].first}/ns/net"]
        link = ["ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", str(first)]
        self.run(
            "ip", "link", "delete", node, check=False
        )  # an ended machine's goes too, but some time later
        subprocess.run([*network, *link], check=True, env=self.environment)
        # A machine that is started again keeps its network card: the others still know the old one's address.
        card = f"02:00:0a:4d:00:{int(ADDRESSES[node].rpartition('.')[2]):02x}"
        self.run("ip", "link", "set", "eth0", "address", card, on=node)
        self.run("ip", "link", "set", node, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{ADDRESSES[node]}/24", "dev", "eth0", on=node)
        self.run("ip", "link", "set", "eth0", "up", on=node)
        self.run("slurmd", "-N", node, on=node)

    def _wait_for_nodes(self) -> None:
        wait_until(lambda: {self._state(node) for node in NODES} == {"idle"}, 30, "all nodes to be idle")

    # --- harm -----------------------------------------------------------------------------------------

    def drain(self, node: str) -> None:
        """Let no new job start on the node; what runs on it runs on."""
        self.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd and all its processes at once; its link goes with them."""
        self.machines.pop(node).end()

    def cut_link(self, node: str) -> None:
        """Let no packet reach or leave the node; what runs on it runs on."""
        self.hurt.add(node)
        self.run("ip", "link", "set", node, "down")

    def limit_link(self, node: str, rate: str) -> None:
        """Limit what the node may send and receive to `rate` each, such as "100mbit"."""
        self.hurt.add(node)
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        self.run("tc", "qdisc", "replace", "dev", node, *limit)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *limit, on=node)

    def free_link(self, node: str) -> None:
        """Lift the limit of a node's link."""
        self.run("tc", "qdisc", "delete", "dev", node, "root")
        self.run("tc", "qdisc", "delete", "dev", "eth0", "root", on=node)

    def repair(self) -> None:
        """No jobs, no limits, all nodes there and idle: what is not so is started anew."""
        if left := self.jobs():
            self.run("scancel", *map(str, left), check=False)  # they may end by themselves before
        wait_until(lambda: not self.jobs(), 30, "the jobs to be gone")
        for node in NODES:
            if node in self.machines and (node in self.hurt or self._state(node) != "idle"):
                self.machines.pop(node).end()
            if node not in self.machines:
                self._start_node(node)
            if "drain" in self._state(node):
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.hurt.clear()
        self._wait_for_nodes()

    def _state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-o", "%T").stdout.strip()

    def processes(self, node: str, word: str) -> list[int]:
        """The ids, on the node, of its processes with `word` in their command lines."""
        found = []
        for line in self.run("ps", "-eo", "pid=,args=", on=node).stdout.splitlines():
            number, _, command = line.strip().partition(" ")
            if word in command:
                found.append(int(number))
        return found

    # --- jobs -----------------------------------------------------------------------------------------

    def sbatch(
        self, script: Path, *arguments: str, options: Sequence[str] = (), cwd: Path, **environment: str
    ) -> int:
        """Submit a batch script from the folder `cwd`; the number of the job."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        return int(self.run(*command, cwd=cwd, **environment).stdout)

    def jobs(self) -> list[int]:
        """The numbers of all jobs that wait or run."""
        return [int(word) for word in self.run("squeue", "-h", "-o", "%A").stdout.split()]

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` tells of a job, or of NUMBER_TASK of an array: JobState, ExitCode ..."""
        words = self.run("scontrol", "-o", "show", "job", str(number)).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: int | str, seconds: float = 60) -> dict[str, str]:
        """Wait until the job has ended for good, and return what Slurm knows about it."""
        ends = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
        wait_until(
            lambda: self.job(number)["JobState"] in ends,
            seconds,
            lambda: f"job {number} to end: {self.job(number)}",
        )
        return self.job(number)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The steps that the run in this folder has logged; half-written lines are left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
