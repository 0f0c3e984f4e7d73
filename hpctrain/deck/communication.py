"""The keys of `[communication]`: what ranks send each other, and when."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Bytes, LinkText, Section, key


class Communication(Section):
    """How ranks talk."""

    transport: Literal["auto", "mpi", "nccl"] = key(
        "mpi: through host memory; nccl: between GPUs; auto: by device.", "auto"
    )
    bucket_bytes: Bytes = key(
        "Gradients are synchronized in pieces of about this size.", 25_000_000, unit="bytes", ge=1
    )
    check: bool = key(
        "Whether ranks compare every call before they make it, and name a difference; for finding mistakes.",
        False,
    )
    emulate: LinkText | None = key(
        "Delays that make links between a machine's ranks slow, to try things out: '100 Mbit/s, 20 ms'.",
        None,
        unit="bit/s",
        derived="none",
    )
