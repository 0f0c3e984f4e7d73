"""Recomputation and offloading of activations: settings, memory, and their description for the log."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hpctrain.comm.world import World
from hpctrain.costs.part_bytes import part_bytes
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.memory import HOST_ACTIVATIONS_REFUSAL
from hpctrain.engine.choices.offload_allocators import open_scratch
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.memory.activation_store import ActivationStore
from hpctrain.memory.offload_store import DiskOffloadStore, HostOffloadStore
from hpctrain.memory.recompute import Recompute
from hpctrain.memory.scratch import ScratchFiles
from hpctrain.model.part import ModelPart
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import peak_activations


def make_saved_policy(deck: Deck, world: World) -> SavedPolicy:
    """Return the policy of what layers save for the backward pass, by section [memory] of the deck. Local.

    Layers are built with it. `open_activation_store` later adds the memory of offloaded activations.

    Raises:
        HpctrainError: The deck offloads activations to host memory, but the run computes on CPUs.
    """
    memory = deck.memory
    if memory.activations == "host" and on_host(world.device):
        raise HpctrainError(deck.problem("memory.activations", HOST_ACTIVATIONS_REFUSAL))
    plain = memory.activations == "keep" and memory.activation_format == "exact"
    if plain and memory.recompute == "none":
        return SavedPolicy()
    store = None if plain else ActivationStore(memory.activation_format)
    return Recompute(memory.recompute, store, world.ledger.recomputing)


def open_activation_store(
    deck: Deck,
    world: World,
    saved_policy: SavedPolicy,
    models: Sequence[ModelPart],
    schedule: Schedule,
    stage: int,
) -> ScratchFiles | None:
    """Make the memory of offloaded activations, and return its files if it has any. Collective.

    Args:
        deck: The deck.
        world: All ranks of the engine.
        saved_policy: Result of `make_saved_policy`.
        models: Model parts of this rank's stage.
        schedule: Pipeline schedule.
        stage: Number of this rank's stage.

    Raises:
        HpctrainError: On all ranks if the folder is not writable or too small.
    """
    location = deck.memory.activations
    store = saved_policy.store if isinstance(saved_policy, Recompute) else None
    if location == "keep" or store is None:
        return None
    if location == "host":
        store.offload_store = HostOffloadStore(world.device)
        return None
    parts = part_bytes(deck, models, not on_host(world.device), deck.memory.recompute)
    most = max((part.block_bytes for part in parts), default=0)
    need = ceil(peak_activations(schedule)[stage] * schedule.chunks) * most
    scratch = open_scratch(deck, world, need)
    with world.agreement():
        store.offload_store = DiskOffloadStore(scratch, need, world.device)
    return scratch
