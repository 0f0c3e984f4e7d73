"""Python programs that start without loading again what they all load.

A server imports what every verb of hpctrain imports, and forks for each request: the copy takes over
arguments, environment, folder and standard streams, and is from there on a process like any other, whose exit
code or signal comes back. `tests/ask.py` asks for one, alone or as a rank under mpirun; a rank starts so in a
tenth of a second, not in three. Signals are handed on. Not for programs that depend on what is imported when;
those that depend on how Python ends have to ask for its own end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple

ASK = Path(__file__).with_name("ask.py")
MOST = 1 << 20
"""Bytes that are taken at a time."""
OWN_END, QUICK_END = "own-end", "quick-end"
LOADED = ("hpctrain.cli.main", "hpctrain.cli.run", "hpctrain.train.run")
FOREIGN = (
    *("torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)
"""What modules that users bring load as soon as one is built on torch's device "meta": four seconds of it."""


class Server:
    """The server as tests see it: started by the first who wants its command, ended by `close`.

    Of the modules to load besides, those that are not installed are left out.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._folder = Path(tempfile.mkdtemp(prefix="hpctrain-warm-"))
        self._process: subprocess.Popen[bytes] | None = None

    def command(self, environment: dict[str, str], own_end: bool = False) -> list[str]:
        """What stands for `python`; with `own_end` the program ends as the interpreter does by itself."""
        address = self._folder / "server"
        if self._process is None:
            serve = [sys.executable, __file__, str(address), *LOADED, *self._modules]
            self._process = subprocess.Popen(
                serve, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            said: IO[bytes] | None = self._process.stdout
            assert said is not None
            assert said.readline() == b"ready\n"
        return [sys.executable, "-I", "-S", str(ASK), str(address), OWN_END if own_end else QUICK_END]

    def close(self) -> None:
        """End it, and whatever it has started."""
        if self._process is not None:
            self._process.communicate()
        (self._folder / "server").unlink(missing_ok=True)
        self._folder.rmdir()


class Request(NamedTuple):
    """What is to be run: as `python ARGUMENTS...` in a folder, with an environment."""

    end: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    processors: list[int]


def serve(address: str, modules: Sequence[str]) -> Request:
    """Answer requests until standard input ends. Returns in the copies alone, with what they are to run."""
    import gc
    import select
    import weakref

    for module in modules:
        with suppress(ModuleNotFoundError):
            import_module(module)
    gc.freeze()  # what no copy looks at stays shared
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its operators apart one by one
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listener, woken, *clients.values()], [], [])
        if woken in ready:  # first, or whoever ends meanwhile would be missed
            os.read(woken, MOST)
        for pid, client in list(clients.items()):
            if client in ready or 0 in ready:  # whoever asked is gone
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    continue
                with suppress(OSError):  # as above
                    client.sendall(f"{status}\n".encode())
            client.close()
            del clients[pid]
        if 0 in ready:
            sys.exit()
        if listener in ready:
            client, _ = listener.accept()
            words, streams, _, _ = socket.recv_fds(client, MOST, 3)
            while not words.endswith(b"\n") and (more := client.recv(MOST)):
                words += more
            pid = os.fork() if words.endswith(b"\n") else -1
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own, stream in enumerate(streams):
                    os.dup2(stream, own)
                for number in (
                    *streams,
                    woken,
                    wakes,
                    *(s.detach() for s in (listener, client, *clients.values())),
                ):
                    os.close(number)
                os.setpgrp()  # not a session: Linux schedules by those, and ranks would yield to nobody
                return Request(*json.loads(words))
            for stream in streams:
                os.close(stream)
            if pid > 0:
                clients[pid] = client
                with suppress(OSError):  # as above
                    client.sendall(f"{pid}\n".encode())
            else:
                client.close()


def become(request: Request) -> None:
    """Run what was asked for, as the main program of this process."""
    import runpy

    os.chdir(request.folder)
    os.sched_setaffinity(0, request.processors)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.orig_argv = [sys.executable, *request.arguments]
    match request.arguments:
        case ["-c", program, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = ["-m", *rest], request.folder
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


def leave() -> None:
    """End as the interpreter does, without taking apart what is loaded: that takes half a second.

    To be called in the `finally` of the main program, with what it raised under way.
    """
    import atexit
    import threading

    code = 0
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    request = serve(sys.argv[1], sys.argv[2:])
    if request.end == OWN_END:
        become(request)
    else:
        try:
            become(request)
        finally:
            leave()
