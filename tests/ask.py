"""Stands for `python`: has a server of tests/warm.py run a program in this process's stead.

`python -I -S tests/ask.py ADDRESS END ARGUMENTS...` lives as long as `python ARGUMENTS...` would, hands
signals on to it, and ends with its exit code or signal; END is one of those in tests/warm.py. It loads next
to nothing itself. Where the server is not, on another node, it becomes that python.
"""

import json
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)
HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def ask(address: str, end: str, arguments: list[str]) -> int:
    """Have the server run a program with this process's environment, folder, processors and streams; its
    exit status.
    """
    pid, early = 0, []

    def hand_on(number: int, _: object) -> None:
        if pid:
            os.kill(pid, number)
        else:
            early.append(number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes longer to load than all the rest)
    processors = sorted(os.sched_getaffinity(0))
    words = json.dumps([end, arguments, folder, dict(os.environ), processors]).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
        except FileNotFoundError:
            os.execv(sys.executable, [sys.executable, *arguments])
        sent = socket.send_fds(server, [words], STREAMS)
        server.sendall(words[sent:])
        answers = server.makefile()
        pid = int(answers.readline())
        for number in early:
            os.kill(pid, number)
        return int(answers.readline())


if __name__ == "__main__":
    status = ask(sys.argv[1], sys.argv[2], sys.argv[3:])
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))
