"""Training state that torch.distributed.checkpoint saves and loads with gloo."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.host.device import on_host


class TorchCheckpoint:
    """State as tensors for torch.distributed.checkpoint.

    If every rank holds all complete tensors, these are stored, each by one of the ranks. Otherwise the rows
    of each tensor are divided equally over all ranks, so that a rank holds as many bytes as in hpctrain.

    Attributes:
        state: Tensors to save, by the name of their dataset.
        read_state: Tensors to load.
    """

    def __init__(self, world: World, entries: Sequence[TensorRange], loaded: Collection[str]) -> None:
        """Create the tensors. Collective, after `start_gloo`.

        Args:
            world: All ranks.
            entries: Ranges of tensors that this rank saves.
            loaded: Names of the datasets that any rank loads.
        """
        datasets: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        descriptions = [(entry.dataset, entry.shape, entry.values.dtype) for entry in entries]
        for rows in world.everyone.all_gather_object(descriptions):
            datasets |= {name: (shape, dtype) for name, shape, dtype in rows}
        complete = {entry.dataset: entry for entry in entries if _is_complete(entry)}
        self.state: dict[str, Tensor] = {}
        if all(world.everyone.all_gather_object(complete.keys() == datasets.keys())):
            for name, entry in complete.items():
                assert isinstance(entry.values, Tensor)
                self.state[name] = entry.values.view(entry.shape)
        else:
            mesh = init_device_mesh("cpu", (world.size,))
            for name, (shape, dtype) in sorted(datasets.items()):
                first, last = (-(-shape[0] // world.size) * n for n in (world.rank, world.rank + 1))
                rows = max(0, min(last, shape[0]) - first)
                local = torch.ones((rows, *shape[1:]), dtype=dtype)
                stride = torch.empty(shape, device="meta").stride()
                self.state[name] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
                )
        self.read_state = {name: self.state[name] for name in sorted(loaded)}
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)

    @property
    def read_bytes(self) -> int:
        """Number of bytes that this rank reads."""
        return sum(
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
            for tensor in self.read_state.values()
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an empty folder, and flush it to the disk. Collective."""
        save(self.state, storage_writer=FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        """Read a checkpoint into the tensors. Collective."""
        load(self.read_state, storage_reader=FileSystemReader(folder))


def _is_complete(entry: TensorRange) -> bool:
    """Return True if this rank holds the complete tensor in host memory."""
    return (
        isinstance(entry.values, Tensor)
        and on_host(entry.values.device)
        and entry.values.numel() == entry.shard.elements
        and entry.shard.local == entry.shard.shape
    )
