"""The section [memory], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Bytes, PathText, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Conflicts, OtherThan, Relations, Requires
from hpctrain.deck.sections.optimizer import MATRIX_OPTIMIZERS

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


HOST_REFUSAL = 'requires GPUs; on the CPU the device is the host (use "device" or "disk")'
"""End of a message about memory.optimizer or memory.parameters = "host" on the CPU."""

HOST_ACTIVATIONS_REFUSAL = (
    'requires GPUs; on the CPU activations are already in host memory (use "keep" or "disk")'
)
"""End of a message about memory.activations = "host" on the CPU."""

_OPTIMIZER, _PARAMETERS = "memory.optimizer", "memory.parameters"
_BY_MATRIX = "it updates whole matrices, but offloaded state is updated element by element"
_TOGETHER = "offloaded state is supported only if all ranks train together"
_BUILT_IN = "only activations of built-in models are offloaded or compressed"

RELATIONS: Relations = (
    Conflicts(
        "memory.activations", "run.device", ("host",), ("cpu",), because="on the CPU the device is the host"
    ),
    Conflicts("memory.activations", "model.module", because=_BUILT_IN),
    Conflicts(
        "memory.activation_format",
        "precision.compute",
        ("bf16",),
        OtherThan("fp32"),
        because="activations already have 16 bits",
    ),
    Conflicts("memory.activation_format", "model.module", because=_BUILT_IN),
    Requires("memory.keep_gathered", "layout.zero", (3,)),
    Requires("memory.accumulate", "layout.zero", (2, 3)),
    Conflicts("memory.accumulate", "model.module", because="each micro-batch must use all parameters"),
    Conflicts(_OPTIMIZER, "run.device", ("host",), ("cpu",), because="on the CPU the device is the host"),
    Conflicts(_OPTIMIZER, "optimizer.name", None, MATRIX_OPTIMIZERS, because=_BY_MATRIX),
    Conflicts(_OPTIMIZER, "communication.server.mode", because=_TOGETHER),
    Conflicts(_PARAMETERS, "run.device", ("host",), ("cpu",), because="on the CPU the device is the host"),
    Conflicts(_PARAMETERS, "communication.server.mode", because=_TOGETHER),
    Requires(_PARAMETERS, "layout.zero", (3,), because="only ZeRO-3 gathers parameters when they are needed"),
    (
        Conflicts(_PARAMETERS, "optimizer.name", None, MATRIX_OPTIMIZERS, because=_BY_MATRIX),
        Requires(
            _PARAMETERS,
            _OPTIMIZER,
            ("host", "disk"),
            because="parameters are updated in the place of the optimizer state",
        ),
    ),
)


def recompute_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of recomputed blocks that the model does not have; at most one.

    A module of the user can recompute whole blocks only, which model.blocks has to name.
    """
    layout, recompute = deck.layout, deck.memory.recompute
    if deck.model.module is not None:
        if recompute not in {"none", "full"}:
            sentence = 'is unsupported with model.module, which can recompute whole blocks only (use "full")'
            yield DeckProblem("memory.recompute", sentence, ("model.module",))
        elif recompute == "full" and deck.model.blocks is None:
            sentence = 'requires model.blocks, which names the blocks of a module (such as "layers.*")'
            yield DeckProblem("memory.recompute", sentence, ("model.blocks", "model.module"))
        return
    longest = deck.model.layers - max(0, layout.pipeline * layout.chunks - 2)
    if isinstance(layout.split, tuple):
        longest = max(layout.split, default=1)
    if isinstance(recompute, int) and not 1 <= recompute <= max(1, longest):
        yield DeckProblem(
            "memory.recompute",
            f"must be from 1 to {max(1, longest)}, the number of blocks of the longest part of the model, "
            'or "full", "sqrt", "selective" or "none"',
            ("model.layers", "layout.pipeline", "layout.chunks", "layout.split"),
        )
