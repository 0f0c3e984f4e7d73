"""Child process that loads batches of a user's dataset for a rank. It ends with the rank.

Requests are lines on standard input. Each answer is the descriptor of a file in memory, sent through a
socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import torch

from hpctrain.data.dataset import DatasetSpec, UserDataset
from hpctrain.data.items import Fields
from hpctrain.data.mapped import to_memory
from hpctrain.errors import HpctrainError
from hpctrain.host.process_lifetime import end_descendants_with_parent, ignore_rank_signals


def serve(socket_number: int, parent: int) -> None:
    """Answer requests until the rank ends.

    The first line describes the dataset. Each further line has the numbers and the epochs of the items of a
    batch.

    Args:
        socket_number: Descriptor of the socket for answers.
        parent: Process number of the rank.
    """
    let_children_hear = ignore_rank_signals()
    if not end_descendants_with_parent(parent):
        return
    let_children_hear()
    torch.set_num_threads(1)
    lines, answers = sys.stdin.buffer, socket.socket(fileno=socket_number)
    spec = DatasetSpec.of_json(lines.readline())
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines, requests), daemon=True).start()
    dataset: UserDataset | None = None
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        while True:
            indices, epochs = json.loads(requests.get())
            fields: Fields = {}
            problems: tuple[str, ...] = ()
            try:
                dataset = UserDataset(spec) if dataset is None else dataset
                fields = dataset.batch(indices, epochs)
            except HpctrainError as error:
                problems = error.problems
            file = to_memory(fields, problems)
            try:
                socket.send_fds(answers, [b"x"], [file])
            except OSError:
                return  # the rank has ended
            os.close(file)


def _read(lines: BinaryIO, requests: SimpleQueue[bytes]) -> None:
    """Put requests into a queue, and end this process when standard input is closed."""
    for line in lines:
        requests.put(line)
    os._exit(0)
