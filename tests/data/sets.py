"""Datasets as users write them, in plain torch and numpy: nothing of ours is in here."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch


class Drawn:
    """Items that draw random numbers of every kind."""

    def __init__(self, count: int = 23, **odd: object) -> None:
        self.count, self.odd = count, odd

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        draws = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        item = {"x": np.array(draws, np.float32) + index, "index": index, "share": 0.5, "on": index % 2 == 0}
        if index == self.odd.get("at", -1):
            return self.wrong(item, self.odd["kind"])
        return item

    def wrong(self, item, kind):
        match kind:
            case "shape":
                return item | {"x": np.zeros((2, 3), np.float32)}
            case "type":
                return item | {"x": np.zeros(3)}
            case "keys":
                return item | {"y": 1}
            case "list":
                return list(item)
            case "text":
                return item | {"x": "some"}
            case "fails":
                raise ValueError("no such picture")
            case "killed":
                os.kill(os.getpid(), 9)
            case "leaves":
                os._exit(7)
            case "starts":
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                Path(self.odd["file"]).write_text(str(child.pid))
        while True:
            pass


class Empty:
    def __len__(self):
        return 0

    def __getitem__(self, index):
        return {"x": 1}


class NoItems:
    def __len__(self):
        return 3


class Place:
    """What a process that loads knows of ranks."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        of_ranks = [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "SLURM_PROCID"))]
        from mpi4py import MPI

        return {"variables": len(of_ranks), "started": MPI.Is_initialized(), "process": os.getpid(),
                "main": sys.modules["__main__"].__dict__.get("World") is not None}  # fmt: skip


class Forks:
    """Items that a process of their own is asked for, which is ended: how it ended."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(index * 0.01)
        child.terminate()
        child.join()
        return {"code": np.int64(child.exitcode)}


def number() -> int:
    return 3


def padded(items):
    """A batch of a collate function that draws."""
    return {"x": torch.stack([torch.as_tensor(item["x"]) for item in items]) + torch.rand(())}


def short(items):
    return {"x": torch.zeros(len(items) + 1)}


def broken(items):
    return {"x": items[0]["nothing"]}


def lonely():
    return {}


class Long:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        if self.length is None:
            raise RuntimeError("not yet")
        return self.length

    def __getitem__(self, index):
        return {"x": 1}


def half():
    return Long(3.5)


def negative():
    return Long(-3)


def unknown():
    return Long(None)


class Unasked:
    def __len__(self):
        return 3

    def __getitem__(self):  # noqa: PLE0302
        return {"x": 1}
