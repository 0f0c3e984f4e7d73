"""Recomputation and offloading of activations: settings, memory, and their description for the log."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.memory import HOST_ACTIVATIONS_REFUSAL
from hpctrain.engine.layer_flops import model_flops
from hpctrain.engine.offload_settings import open_scratch
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.memory.activation_store import ActivationStore
from hpctrain.memory.offload_store import DiskOffloadStore, HostOffloadStore
from hpctrain.memory.recompute import Recompute
from hpctrain.memory.saved_bytes import PartBytes, part_bytes
from hpctrain.memory.scratch import ScratchFiles
from hpctrain.model.architecture import Architecture
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.model.shape import Recomputed
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import peak_activations
from hpctrain.units import format_bytes, format_count


def make_saved_policy(deck: Deck, world: World) -> SavedPolicy:
    """Return what layers save for the backward pass. Local.

    `open_activation_store` adds the memory of offloaded activations.

    Raises:
        HpctrainError: The device does not support it.
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


def describe_recompute(
    deck: Deck, architecture: Architecture, models: Sequence[ModelPart], schedule: Schedule, stage: int
) -> list[str]:
    """Return lines for the log about recomputation and offloaded activations of this rank."""
    memory, lines = deck.memory, []
    device, alive = parameter_list(models[0])[0].device, peak_activations(schedule)[stage]

    def bytes_of_parts(recompute: Recomputed) -> list[PartBytes]:
        return part_bytes(deck, models, not on_host(device), recompute)

    def saved(recompute: Recomputed) -> int:
        return int(alive * sum(part.total_bytes for part in bytes_of_parts(recompute)))

    now = saved(memory.recompute)
    if memory.recompute != "none":
        flops = model_flops(architecture)
        extra = flops.recomputed_flops_per_token(memory.recompute)
        tokens = deck.batch.global_size * deck.batch.sequence
        saved_text = ""
        if not any(part.unknown_reason for part in bytes_of_parts(memory.recompute)):
            instead = f"instead of {format_bytes(saved('none'))}"
            saved_text = f"; this rank keeps {format_bytes(now)} of activations {instead}"
        lines.append(
            f"recomputation ({memory.recompute}): {100 * extra / flops.flops_per_token:.1f}% more FLOPs, "
            f"{format_count(extra * tokens)} per step, not counted in MFU{saved_text}"
        )
    if memory.activations != "keep":
        location = "a file" if memory.activations == "disk" else "host memory"
        form = "" if memory.activation_format == "exact" else f" as {memory.activation_format}"
        lines.append(
            f"activations (at most {format_bytes(now)} before compression) are kept in {location}{form}"
        )
    elif memory.activation_format != "exact":
        lines.append(f"activations are kept as {memory.activation_format}: gradients are approximate")
    return lines
