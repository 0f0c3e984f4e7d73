"""Stands for `python`: has a server of tests/warm.py run a program in this process's stead.

`python -I -S tests/ask.py ADDRESS END ARGUMENTS...` lives as long as `python ARGUMENTS...` would, and ends
with its exit code or signal; END is one of those in tests/warm.py. It loads next to nothing itself.
"""

import json
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)


def ask(address: str, end: str, arguments: list[str]) -> int:
    """Have the server run a program with this process's environment, folder and streams; its exit status."""
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes longer to load than all the rest)
    words = json.dumps([end, arguments, folder, dict(os.environ)]).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        sent = socket.send_fds(server, [words], STREAMS)
        server.sendall(words[sent:])
        return int(server.recv(64))


if __name__ == "__main__":
    status = ask(sys.argv[1], sys.argv[2], sys.argv[3:])
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))
