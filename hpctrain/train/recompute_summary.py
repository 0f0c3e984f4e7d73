"""Lines of the log about recomputation and offloaded activations."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.costs.layer_flops import model_flops
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.deck.schema import Deck
from hpctrain.host.device import on_host
from hpctrain.model.architecture import Architecture
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.model.shape import Recomputed
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import peak_activations
from hpctrain.units import format_bytes, format_count


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
