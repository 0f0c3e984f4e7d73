"""The keys of `[communication]`: what ranks send each other, and when."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Bytes, LinkText, Section, key
from hpctrain.units import Link, parse_link


class Communication(Section):
    """How ranks talk."""

    transport: Literal["auto", "shared", "mpi", "nccl"] = key(
        "shared: in the memory of a node, mpi between nodes; nccl: between GPUs; auto: by device.", "auto"
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
    ranks_per_node: int | None = key(
        "Ranks of the nodes that a machine is cut into, to try out what several nodes do.",
        None,
        unit="ranks",
        derived="as the machine is",
        ge=1,
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
    warmup: int = key(
        "Steps at the start whose sums of gradients are exact, and over all replicas, too.",
        0,
        unit="steps",
        ge=0,
    )
    error_feedback: bool = key(
        "Whether what compress loses is added to the next gradient; without it, sign is a majority vote.",
        True,
    )
    local_steps: int = key(
        "Steps that each replica makes by itself between two synchronizations (layout.replicas).",
        1,
        unit="steps",
        ge=1,
    )
    outer: Literal["average", "diloco"] = key(
        "What replicas do then: take the mean of their weights, or a Nesterov step towards it.",
        "average",
    )
    outer_learning_rate: float = key("Of that outer step (diloco).", 0.7, gt=0, le=1000)
    outer_momentum: float = key("Of that outer step (diloco).", 0.9, ge=0, lt=1)
    fragments: int = key(
        "Parts of the model, its blocks in turns, that are synchronized in different steps.", 1, ge=1
    )
    delay: int = key(
        "Steps that go on while a synchronization is under way; then it takes effect.",
        0,
        unit="steps",
        ge=0,
    )
    blend: float = key("Share of a replica's own weights that stays at a synchronization.", 0.0, ge=0, le=1)
    outer_format: Literal["fp32", "bf16", "int8", "int4"] = key(
        "How differences of weights travel between replicas; int8, int4 with a scale for every 256.",
        "fp32",
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
        le=1e6,
    )

    @property
    def wished_transport(self) -> str:
        """What tensors are to travel over: a link that is emulated between ranks delays messages."""
        return self.transport if self.emulate is None or self.ranks_per_node else "mpi"

    @property
    def link(self) -> Link | None:
        """That of each rank that is emulated: of an emulated node's an even share."""
        if self.emulate is None:
            return None
        link = parse_link(self.emulate)
        return link._replace(bytes_per_second=link.bytes_per_second / (self.ranks_per_node or 1))
