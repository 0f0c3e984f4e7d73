"""The section [checkpoint]."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Bytes, Section, key
from hpctrain.deck.relations import Conflicts, HasEffectWith, Relations


class CheckpointSection(Section):
    """Checkpoints that a run writes."""

    every: int = key("Steps between checkpoints; 0: only at the end.", 0, unit="steps", ge=0)
    keep: int = key("Number of newest valid checkpoints that are kept.", 2, ge=1)
    keep_every: int = key(
        "Checkpoints of steps that are multiples of this number are never deleted; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    keep_best: str | None = key(
        'Evaluation set, such as "validation", whose checkpoint of lowest loss is kept and linked as "best".',
        None,
        derived="none",
        min_length=1,
    )
    memory_every: int = key(
        "Steps between copies of the state in memory, from which a run recovers without the disk; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    mode: Literal["collective", "background"] = key(
        "Whether training waits while a checkpoint is written, or goes on.", "collective"
    )
    buffer: Bytes = key(
        "Memory of each rank for the data being saved; in background mode, for tensors that training "
        "changes.",
        256 << 20,
        unit="bytes",
        ge=1000,
    )
    mirror: bool = key(
        "Whether each rank's state is copied to the memory of a neighbor node, to recover if a node is lost.",
        False,
    )
    mirror_every: int = key("Steps between two updates of that copy.", 10, unit="steps", ge=1)


RELATIONS: Relations = (
    HasEffectWith("checkpoint.mirror_every", "checkpoint.mirror", (True,)),
    Conflicts(
        "checkpoint.mode", "communication.server.mode", because="servers write checkpoints while workers wait"
    ),
    Conflicts("checkpoint.memory_every", "communication.server.mode", because="no rank has the whole state"),
    Conflicts("checkpoint.mirror", "communication.server.mode", because="workers make steps independently"),
)
