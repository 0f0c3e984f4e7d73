"""The section [memory], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Bytes, PathText, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.sections.optimizer import UPDATES_MATRICES

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class Memory(Section):
    """Recomputation and offload of activations, parameters and optimizer state."""

    recompute: int | Literal["none", "full", "selective", "sqrt"] = key(
        "Activation recomputation: every block (full), attention (selective), or groups of N or sqrt(L) "
        "blocks.",
        "none",
        unit="blocks",
    )
    activations: Literal["keep", "host", "disk"] = key(
        "Place of saved activations until backward: kept on the device, host memory (GPUs only) or "
        "offload_dir.",
        "keep",
    )
    activation_format: Literal["exact", "bf16", "int8"] = key(
        "Format of saved activations; bf16 and int8 (a scale for every 256 elements) approximate gradients.",
        "exact",
    )
    keep_gathered: int = key(
        "Blocks of each stage whose parameters stay gathered for a whole step (layout.zero = 3).",
        0,
        unit="blocks",
        ge=0,
    )
    accumulate: Literal["whole", "sliced"] = key(
        "Gradient accumulation (zero = 2, 3); sliced: less memory, more communication, different rounding.",
        "whole",
    )
    optimizer: Literal["device", "host", "disk"] = key(
        "Place of master weights and moments; with host (GPUs only) and disk the CPU computes the update.",
        "device",
    )
    parameters: Literal["device", "host", "disk"] = key(
        "Place of each rank's slices of the parameters (layout.zero = 3).", "device"
    )
    offload_dir: PathText | None = key(
        "Folder on a fast disk for all that is offloaded to disk; the files are deleted when the run ends.",
        None,
        derived="<run.dir>/offload",
        min_length=1,
    )
    offload_buffer: Bytes = key(
        "Size of the buffer through which optimizer state is read from and written to the disk.",
        256_000_000,
        unit="bytes",
        ge=4096,
    )


NO_HOST = 'is for GPUs; on the CPU the device is the host ("device" or "disk" would do)'


NO_HOST_ACTIVATIONS = 'is for GPUs; on the CPU they are in host memory anyway ("keep" or "disk" would do)'


def recompute_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a group of recomputed blocks that is longer than the longest part of the model."""
    layout, recompute = deck.layout, deck.memory.recompute
    longest = deck.model.layers - max(0, layout.pipeline * layout.chunks - 2)
    if isinstance(layout.split, tuple):
        longest = max(layout.split, default=1)
    if isinstance(recompute, int) and not 1 <= recompute <= max(1, longest):
        yield DeckProblem(
            "memory.recompute",
            f"must be from 1 to {max(1, longest)} as a number, the blocks of the longest part of the model "
            '("full", "sqrt", "selective" and "none" would do, too)',
            ("model.layers", "layout.pipeline", "layout.chunks", "layout.split"),
        )


def memory_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of offloaded state and activations with other keys."""
    memory = deck.memory
    if memory.parameters != "device" and deck.layout.zero < 3:
        sentence = (
            f"needs layout.zero = 3, which gathers parameters when they are needed, not {deck.layout.zero}"
        )
        yield DeckProblem("memory.parameters", sentence, ("layout.zero",))
    in_blocks = deck.optimizer.name in UPDATES_MATRICES
    for name in ("optimizer", "parameters"):
        if in_blocks and getattr(memory, name) != "device":
            updates = f'{deck.optimizer.name} updates parameters in blocks ("device" would do)'
            sentence = f"is for state that is kept by element, but {updates}"
            yield DeckProblem(f"memory.{name}", sentence, ("optimizer.name",))
    if memory.parameters != "device" and memory.optimizer == "device" and not in_blocks:
        sentence = 'needs memory.optimizer = "host" or "disk": the update is where the parameters are'
        yield DeckProblem("memory.parameters", sentence, ("memory.optimizer",))
    if memory.activations == "host" and deck.run.device == "cpu":
        yield DeckProblem("memory.activations", NO_HOST_ACTIVATIONS, ("run.device",))
    if memory.activation_format == "bf16" and deck.precision.compute != "fp32":
        nothing = f'saves nothing with precision.compute = "{deck.precision.compute}", of 16 bits as well'
        sentence = f'{nothing} ("exact" or "int8" would do)'
        yield DeckProblem("memory.activation_format", sentence, ("precision.compute",))
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) == "host" and deck.run.device == "cpu":
            yield DeckProblem(f"memory.{name}", NO_HOST, ("run.device",))
