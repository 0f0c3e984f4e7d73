"""A process that loads batches of a user's dataset for a rank, with which it ends. It is no rank.

What is asked of it comes through standard input, a line each; answers go through a socket, each a file in
memory.
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
    """Answer until nobody asks any more: after the dataset's name come numbers and epochs of items."""
    let_children_hear = ignore_rank_signals()
    if not end_descendants_with_parent(parent):
        return
    let_children_hear()
    torch.set_num_threads(1)
    lines, answers = sys.stdin.buffer, socket.socket(fileno=socket_number)
    name = DatasetSpec.of_json(lines.readline())
    asked: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines, asked), daemon=True).start()
    dataset: UserDataset | None = None
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        while True:
            indices, epochs = json.loads(asked.get())
            fields: Fields = {}
            problems: tuple[str, ...] = ()
            try:
                dataset = UserDataset(name) if dataset is None else dataset
                fields = dataset.batch(indices, epochs)
            except HpctrainError as error:
                problems = error.problems
            file = to_memory(fields, problems)
            try:
                socket.send_fds(answers, [b"x"], [file])
            except OSError:
                return  # nobody reads it any more
            os.close(file)


def _read(lines: BinaryIO, asked: SimpleQueue[bytes]) -> None:
    """Take what is asked as it comes, and end this process where nobody can ask any more."""
    for line in lines:
        asked.put(line)
    os._exit(0)
