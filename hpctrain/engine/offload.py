"""Where a run's optimizer state and parameters live: on the device, in host memory, or in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from hpctrain.comm.device import choose_device, gpu_count, host_empty, on_host
from hpctrain.comm.world import World
from hpctrain.deck.check import NO_HOST
from hpctrain.deck.schema import Deck, OptimizerSection
from hpctrain.errors import HpctrainError
from hpctrain.memory.offload_folder import check_room
from hpctrain.memory.scratch import Flat, ScratchFiles, ScratchTensor
from hpctrain.model.part import Part
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.offload import OffloadedOptimizer, state_elements
from hpctrain.optim.optimizer import STATE_BYTES, Agreement, Optimizer, ResidentOptimizer, UpdateRule
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.sharding.bucket_layout import bucket_layouts
from hpctrain.sharding.replication import Replications
from hpctrain.units import format_bytes

RULES: Mapping[str, Callable[[OptimizerSection], UpdateRule]] = {
    "adamw": lambda keys: AdamW((keys.beta1, keys.beta2), keys.epsilon, keys.weight_decay)
}
"""What makes each optimizer of a deck, by its name."""


@dataclass(frozen=True)
class Offload:
    """What makes the memory of what does not live on the device, None where it does.

    `scratch` holds the files; `introduction` says what is where, for the log.
    """

    optimizer: Store | None = None
    parameters: Store | None = None
    scratch: ScratchFiles | None = None
    introduction: str = ""


def open_offload(
    deck: Deck, world: World, models: Sequence[Part], replications: Replications, dtype: torch.dtype
) -> Offload:
    """The stores of a deck; collective. HpctrainError on all ranks where what it asks for cannot be."""
    where = {"optimizer": deck.memory.optimizer, "parameters": deck.memory.parameters}
    with world.agreement():
        refused = [key for key in where if where[key] == "host" and on_host(world.device)]
        if refused:
            raise HpctrainError([deck.problem(f"memory.{key}", NO_HOST) for key in refused])
    sizes = dict(zip(where, offloaded_bytes(deck, world.device, models, replications, dtype), strict=True))
    on_disk = [key for key in where if where[key] == "disk"]
    scratch = open_scratch(deck, world, sum(sizes[key] for key in on_disk)) if on_disk else None
    stores: dict[str, Store] = {key: host_store for key in where if where[key] == "host"}
    if scratch is not None:
        stores |= {key: file_store(scratch, key) for key in on_disk}
    words = {"optimizer": "optimizer state", "disk": str(offload_folder(deck)), "host": "host memory"}
    said = [
        f"{words.get(key, key)} ({format_bytes(sizes[key])} a rank) in {words[where[key]]}"
        for key in where
        if key in stores
    ]
    return Offload(stores.get("optimizer"), stores.get("parameters"), scratch, ", ".join(said))


def offloaded_bytes(
    deck: Deck,
    device: torch.device,
    models: Sequence[Part],
    replications: Replications,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Bytes of this rank's optimizer state and of its parameters' slices that do not live on the device.

    From the layout alone; `models` need no memory.
    """
    memory, size = deck.memory, deck.communication.bucket_bytes
    values_on = device if memory.parameters == "device" else torch.device("cpu")
    layouts = (layout for model in models for layout in bucket_layouts(model.units(), replications, size))
    slices = [layout.own.stop - layout.own.start for layout in layouts]
    state = sum(state_elements(make_rule(deck), dtype, values_on, own) for own in slices)
    return (
        STATE_BYTES * state if memory.optimizer != "device" else 0,
        dtype.itemsize * sum(slices) if memory.parameters != "device" else 0,
    )


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
            check_room(folder, of_node)
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
    return host_empty((length,), dtype, choose_device("auto", 0, gpu_count())).zero_()


def make_rule(deck: Deck) -> UpdateRule:
    """How the deck's optimizer updates."""
    return RULES[deck.optimizer.name](deck.optimizer)


def make_optimizer(
    deck: Deck, buckets: Sequence[Bucket], store: Store | None, agreement: Agreement
) -> Optimizer:
    """The deck's optimizer, with its state where `store` makes it or, without one, on the device."""
    if store is None:
        return ResidentOptimizer(make_rule(deck), buckets)
    return OffloadedOptimizer(make_rule(deck), buckets, store, deck.memory.offload_buffer, agreement)
