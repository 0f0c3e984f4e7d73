"""Where a run's optimizer state and parameters live: on the device, in host memory, or in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.memory import HOST_REFUSAL
from hpctrain.engine.rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.host.device import choose_device, empty_host_tensor, on_host, visible_gpus
from hpctrain.memory.offload_folder import check_disk_space
from hpctrain.memory.scratch import Flat, ScratchFile, ScratchFiles, ScratchTensor
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.offload import CopyStreams, MemoryLocation, OffloadedOptimizer
from hpctrain.optim.optimizer import Agreement, Optimizer, ResidentOptimizer
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class OffloadSettings:
    """What makes the memory of what does not live on the device, None where it does.

    `scratch` holds the files; `introduction` says what is where, for the log.
    """

    optimizer: Store | None = None
    parameters: Store | None = None
    scratch: ScratchFiles | None = None
    introduction: str = ""


def open_offload(deck: Deck, world: World, sizes: Mapping[str, int]) -> OffloadSettings:
    """The stores of a deck, for `sizes` bytes of this rank's "optimizer" state and "parameters"; collective.

    HpctrainError on all ranks where what the deck asks for cannot be.
    """
    where = {"optimizer": deck.memory.optimizer, "parameters": deck.memory.parameters}
    with world.agreement():
        refused = [key for key in where if where[key] == "host" and on_host(world.device)]
        if refused:
            raise HpctrainError([deck.problem(f"memory.{key}", HOST_REFUSAL) for key in refused])
    on_disk = [key for key in where if where[key] == "disk"]
    scratch = open_scratch(deck, world, sum(sizes[key] for key in on_disk)) if on_disk else None
    stores: dict[str, Store] = {key: host_store for key in where if where[key] == "host"}
    if scratch is not None:
        stores |= {key: file_store(scratch, key) for key in on_disk}
    words = {"optimizer": "optimizer state", "disk": str(offload_folder(deck)), "host": "host memory"}
    said = [
        f"{words.get(key, key)} ({format_bytes(sizes[key])} per rank) in {words[where[key]]}"
        for key in where
        if key in stores
    ]
    return OffloadSettings(stores.get("optimizer"), stores.get("parameters"), scratch, ", ".join(said))


def offload_folder(deck: Deck) -> Path:
    """The folder of a run's files in place of memory."""
    return Path(deck.memory.offload_dir or f"{deck.run.dir}/offload")


def open_scratch(deck: Deck, world: World, need: int) -> ScratchFiles:
    """This rank's files in the deck's offload folder, for `need` bytes; collective.

    HpctrainError on all ranks where the folder cannot be written to or has no room for all ranks of a node.
    """
    needs = world.everyone.all_gather_object((world.node, need))
    of_node = sum(bytes_ for node, bytes_ in needs if node == world.node)
    folder = offload_folder(deck)
    with world.agreement():
        if world.local_rank == 0:
            check_disk_space(folder, of_node)
    with world.agreement():
        return ScratchFiles(folder, world.rank)


def file_store(scratch: ScratchFiles, name: str) -> Store:
    """Makes zeros in files of that name, numbered."""
    numbers = count()

    def make(length: int, dtype: torch.dtype) -> Flat:
        file = scratch.file(f"{name}-{next(numbers)}", length * dtype.itemsize)
        return ScratchTensor(file, 0, length, dtype)

    return make


def host_store(length: int, dtype: torch.dtype) -> Flat:
    """Makes zeros in host memory that a GPU reads and writes directly."""
    return empty_host_tensor((length,), dtype, choose_device("auto", 0, visible_gpus())).zero_()


def planned_offload(deck: Deck) -> OffloadSettings:
    """Stores of state alone, which has no memory: of the host, or of files that are not there."""

    def make(length: int, dtype: torch.dtype) -> Flat:
        if deck.memory.optimizer == "host":
            return torch.empty(1, dtype=dtype, device="cpu").expand(length)
        file = ScratchFile(Path("planned"), length * dtype.itemsize, ThreadPoolExecutor(1), -1)
        return ScratchTensor(file, 0, length, dtype)

    return OffloadSettings(None if deck.memory.optimizer == "device" else make)


def make_optimizer(
    deck: Deck, buckets: Sequence[Bucket], store: Store | None, device: torch.device, agreement: Agreement
) -> Optimizer:
    """The deck's optimizer, with its state where `store` makes it or, without one, on the device.

    `device` is the run's, where a plan's buckets are not.
    """
    rule, memory = RULES[deck.optimizer.name](deck), deck.memory
    if store is None and isinstance(rule, MatrixRules):
        return MatrixOptimizer(rule, buckets)
    assert not isinstance(rule, MatrixRules)  # the check of the deck refuses it
    if store is None:
        return ResidentOptimizer(rule, buckets)
    streams = None if on_host(device) else CopyStreams()
    computing: MemoryLocation = "gpu" if streams else "host"
    location = computing if memory.parameters == "device" else memory.parameters
    return OffloadedOptimizer(rule, buckets, store, memory.offload_buffer, agreement, location, streams)
