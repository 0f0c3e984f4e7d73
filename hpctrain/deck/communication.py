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
    compress: Literal["none", "bf16", "int8", "sign", "onebit", "topk", "powersgd"] = key(
        "How data and context ranks sum gradients with layout.zero 0 or 1: exactly, or in fewer bits.",
        "none",
    )
    ratio: float = key("Share of each parameter's elements that a rank sends (topk).", 0.01, gt=0, le=1)
    rank: int = key("Columns of the two factors that a matrix is sent as (powersgd).", 4, ge=1)
    compress_between: Literal["ranks", "nodes"] = key(
        "nodes: sums are exact inside a node, and compressed between nodes alone.", "ranks"
    )
    warmup: int = key("Steps at the start whose sums of gradients are exact.", 0, unit="steps", ge=0)
    error_feedback: bool = key(
        "Whether what compress loses is added to the next gradient; without it, sign is a majority vote.",
        True,
    )
    server: Literal["none", "sync", "async", "stale"] = key(
        "Whether servers own parameters; workers go in step, each as it can, or within a distance.",
        "none",
    )
    server_ranks: int = key("Ranks that serve, the first ones; the others work.", 1, unit="ranks", ge=1)
    staleness: int = key(
        'Steps that the fastest worker may be ahead of the slowest (server = "stale").', 1, unit="steps", ge=0
    )
    staleness_correction: Literal["none", "scale", "compensate"] = key(
        "What is done about stale gradients: the rate over the staleness; or a term for the drift.",
        "none",
    )
    compensation: float = key(
        "Weight of that term: the gradient squared, times how far the parameters have moved.",
        0.04,
        ge=0,
    )
