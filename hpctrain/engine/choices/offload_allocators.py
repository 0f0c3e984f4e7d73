"""Memory of offloaded optimizer state and parameters: in host memory or in files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.memory import HOST_REFUSAL
from hpctrain.errors import HpctrainError
from hpctrain.host.device import choose_device, on_host, visible_gpus
from hpctrain.host.streams import empty_host_tensor
from hpctrain.memory.offload_folder import check_disk_space
from hpctrain.memory.scratch import Flat, ScratchFile, ScratchFiles, ScratchTensor
from hpctrain.sharding.bucket import FlatAllocator
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class OffloadAllocators:
    """Functions that allocate memory outside the device: in host memory or in files.

    `open_offload` returns them for a deck. Buckets allocate their parameters and optimizers their state by
    them.

    Attributes:
        optimizer: Allocates optimizer state; None if it is on the device.
        parameters: Allocates parameters; None if they are on the device.
        scratch: Files of this rank, if there are any.
        description: Description for the log.
    """

    optimizer: FlatAllocator | None = None
    parameters: FlatAllocator | None = None
    scratch: ScratchFiles | None = None
    description: str = ""


def open_offload(deck: Deck, world: World, sizes: Mapping[str, int]) -> OffloadAllocators:
    """Return the functions that allocate what a deck offloads. Collective over all ranks.

    Args:
        deck: The deck.
        world: All ranks.
        sizes: Bytes of this rank's "optimizer" state and "parameters".

    Raises:
        HpctrainError: On all ranks if the device does not support it, or if files have no space.
    """
    location = {"optimizer": deck.memory.optimizer, "parameters": deck.memory.parameters}
    with world.agreement():
        refused = [key for key in location if location[key] == "host" and on_host(world.device)]
        if refused:
            raise HpctrainError([deck.problem(f"memory.{key}", HOST_REFUSAL) for key in refused])
    on_disk = [key for key in location if location[key] == "disk"]
    scratch = open_scratch(deck, world, sum(sizes[key] for key in on_disk)) if on_disk else None
    allocators: dict[str, FlatAllocator] = {
        key: host_allocator for key in location if location[key] == "host"
    }
    if scratch is not None:
        allocators |= {key: file_allocator(scratch, key) for key in on_disk}
    words = {"optimizer": "optimizer state", "disk": str(offload_folder(deck)), "host": "host memory"}
    lines = [
        f"{words.get(key, key)} ({format_bytes(sizes[key])} per rank) in {words[location[key]]}"
        for key in location
        if key in allocators
    ]
    return OffloadAllocators(
        allocators.get("optimizer"), allocators.get("parameters"), scratch, ", ".join(lines)
    )


def offload_folder(deck: Deck) -> Path:
    """Return the folder of the files of offloaded tensors."""
    return Path(deck.memory.offload_dir or f"{deck.run.dir}/offload")


def open_scratch(deck: Deck, world: World, need: int) -> ScratchFiles:
    """Open this rank's files in the deck's offload folder. Collective over all ranks.

    Args:
        deck: The deck.
        world: All ranks.
        need: Bytes that this rank needs.

    Raises:
        HpctrainError: On all ranks if the folder of one node is not writable or too small for its ranks.
    """
    needs = world.everyone.all_gather_object((world.node, need))
    of_node = sum(bytes_ for node, bytes_ in needs if node == world.node)
    folder = offload_folder(deck)
    with world.agreement():
        if world.local_rank == 0:
            check_disk_space(folder, of_node)
    with world.agreement():
        return ScratchFiles(folder, world.rank)


def file_allocator(scratch: ScratchFiles, name: str) -> FlatAllocator:
    """Return a function that makes flat tensors of zeros in new files, whose names start with `name`."""
    numbers = count()

    def make(length: int, dtype: torch.dtype) -> Flat:
        file = scratch.file(f"{name}-{next(numbers)}", length * dtype.itemsize)
        return ScratchTensor(file, 0, length, dtype)

    return make


def host_allocator(length: int, dtype: torch.dtype) -> Flat:
    """Return a flat tensor of zeros in host memory that a GPU reads and writes directly. Local."""
    return empty_host_tensor((length,), dtype, choose_device("auto", 0, visible_gpus())).zero_()


def planned_offload(deck: Deck) -> OffloadAllocators:
    """Return the allocators of a plan, whose optimizer state has sizes, but no memory or files. Local."""

    def make(length: int, dtype: torch.dtype) -> Flat:
        if deck.memory.optimizer == "host":
            return torch.empty(1, dtype=dtype, device="cpu").expand(length)
        file = ScratchFile(Path("planned"), length * dtype.itemsize, ThreadPoolExecutor(1), -1)
        return ScratchTensor(file, 0, length, dtype)

    return OffloadAllocators(None if deck.memory.optimizer == "device" else make)
