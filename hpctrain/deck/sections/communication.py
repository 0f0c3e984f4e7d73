"""The section [communication], what ranks send each other and when, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from hpctrain.deck.key import Bytes, LinkText, Section, key, table
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import Conflicts, HasEffectWith, Relations
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.deck.sections.server import ServerTable
from hpctrain.units import Link, parse_link

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class _CompressionKeys(Section):
    """Keys of every gradient compression."""

    between: Literal["ranks", "nodes"] = key(
        "Scope of the compression; nodes: exact sums within a node, compression only between nodes.", "ranks"
    )


class RoundedTable(_CompressionKeys):
    """Gradients are rounded to a smaller format before they are sent."""

    error_feedback: bool = key("Add rounding errors to the gradients of the next step.", True)


class SignTable(_CompressionKeys):
    """Compression to the signs of gradients, with a scale for each block."""

    error_feedback: bool = key(
        "Add the compression error to the gradients of the next step; false: a majority vote of signs.", True
    )


class OneBitTable(_CompressionKeys):
    """1-bit Adam (arXiv 2102.02888): signs of the momentum are sent, with error feedback."""


class TopKTable(_CompressionKeys):
    """The elements of largest magnitude are sent (arXiv 1712.01887); the others are added later."""

    ratio: float = key("Share of the elements of each parameter that a rank sends.", 0.01, gt=0, le=1)


class PowerSgdTable(_CompressionKeys):
    """A matrix is sent as two factors of low rank (arXiv 1905.13727)."""

    rank: int = key("Number of columns of each factor.", 4, ge=1)
    error_feedback: bool = key("Add the compression error to the gradients of the next step.", True)


CompressionTable = RoundedTable | SignTable | OneBitTable | TopKTable | PowerSgdTable


class Communication(Section):
    """Transports, compression of gradients, and parameter servers."""

    transport: Literal["auto", "shared", "mpi", "gloo", "nccl"] = key(
        "shared: node memory, MPI between nodes; gloo: torch's, on CPUs; nccl: GPUs; auto: nccl or shared.",
        "auto",
    )
    half_sums: Literal["native", "fp32"] = key(
        "Sums of 16-bit floats over nccl and gloo: native: by the library; fp32: in rank order, in fp32.",
        "native",
    )
    bucket_bytes: Bytes = key(
        "Approximate size of the buckets in which gradients are synchronized.", 25_000_000, unit="bytes", ge=1
    )
    check: bool = key(
        "Debugging: ranks compare each collective call before they make it, and report a mismatch.", False
    )
    emulate: LinkText | None = key(
        "Emulation of a slow network between the ranks of one machine, for experiments: '100 Mbit/s, 20 ms'.",
        None,
        unit="bit/s",
        derived="none",
    )
    ranks_per_node: int | None = key(
        "Emulation of several nodes on one machine, for experiments: number of ranks of each emulated node.",
        None,
        unit="ranks",
        derived="the nodes of the machine",
        ge=1,
    )
    compress: Literal["none", "bf16", "int8", "sign", "onebit", "topk", "powersgd"] = key(
        "Compression of gradient sums (layout.zero 0 or 1); its keys are in the table of its name.", "none"
    )
    warmup: int = key(
        "First steps, in which gradients are summed exactly over all data ranks, across replicas too.",
        0,
        unit="steps",
        ge=0,
    )
    bf16: RoundedTable | None = table("Keys of compression to bfloat16.", selected_by="compress")
    int8: RoundedTable | None = table("Keys of compression to 8 bits.", selected_by="compress")
    sign: SignTable | None = table("Keys of compression to signs.", selected_by="compress")
    onebit: OneBitTable | None = table("Keys of 1-bit Adam.", selected_by="compress")
    topk: TopKTable | None = table("Keys of compression to the largest elements.", selected_by="compress")
    powersgd: PowerSgdTable | None = table("Keys of PowerSGD.", selected_by="compress")
    server: ServerTable | None = table(
        "Parameter servers: some ranks own the parameters, the others compute gradients.",
        derived="none: all ranks train together",
    )

    @property
    def compression(self) -> CompressionTable | None:
        """The table of the compression of gradients; None if sums are exact."""
        return cast("CompressionTable | None", self.selected_table("compress"))

    @property
    def compresses_between_nodes(self) -> bool:
        """True if sums are exact within a node and compressed between nodes; False without compression."""
        return self.compression is not None and self.compression.between == "nodes"

    @property
    def requested_transport(self) -> str:
        """Transport of tensors that the deck requests: "auto", "shared", "mpi", "gloo" or "nccl".

        It is the value of `transport`, but "mpi" if the deck emulates links of ranks, not of nodes.
        """
        return self.transport if self.emulate is None or self.ranks_per_node else "mpi"

    @property
    def link(self) -> Link | None:
        """Emulated link of each rank, as bytes per second and latency in seconds; None without emulation.

        The key `emulate` describes it. If the key `ranks_per_node` is set, too, `emulate` describes the link
        of an emulated node: each of the node's ranks has an even share of the bandwidth, and the same
        latency.
        """
        if self.emulate is None:
            return None
        link = parse_link(self.emulate)
        return link._replace(bytes_per_second=link.bytes_per_second / (self.ranks_per_node or 1))


_COMPRESS, _SERVER = "communication.compress", "communication.server.mode"

RELATIONS: Relations = (
    Conflicts("communication.transport", "run.device", ("nccl",), ("cpu",), because="it connects GPUs"),
    Conflicts(
        "communication.transport",
        "run.device",
        ("shared",),
        ("cuda", "xpu"),
        because="it moves tensors in CPU memory only",
    ),
    Conflicts(
        "communication.ranks_per_node",
        "communication.transport",
        None,
        ("nccl",),
        because="emulation delays messages between hosts only",
    ),
    HasEffectWith("communication.half_sums", "communication.transport", ("auto", "nccl", "gloo")),
    Conflicts(_COMPRESS, _SERVER, because="gradients are sent to servers uncompressed"),
    Conflicts(_COMPRESS, "model.module", because="only gradients of built-in models are compressed"),
    Conflicts(
        "communication.warmup",
        _COMPRESS,
        (0,),
        ("onebit",),
        because="exact steps at the start determine the step size of each element for the rest of the run",
        hint="use a tenth of run.steps or more",
    ),
    *(
        Conflicts(
            f"communication.{name}.between",
            "layout.local_steps.replicas",
            because="sums are compressed within each replica",
        )
        for name in Communication.choices()["compress"]
    ),
    Conflicts(
        "communication.server", "model.module", because="parameter servers support built-in models only"
    ),
)


def communication_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the keys `emulate` and `warmup` that no relation in RELATIONS describes.

    These are an emulated network with a transport that it cannot delay, and exact first steps if all steps
    are exact.
    """
    keys = deck.communication
    delayed = {"auto", "mpi", "shared"} if keys.ranks_per_node else {"auto", "mpi"}
    if keys.emulate is not None and keys.transport not in delayed:
        sentence = (
            f'conflicts with communication.transport = "{keys.transport}": it delays messages '
            "between hosts only"
        )
        others = ("communication.transport",)
        yield DeckProblem("communication.emulate", f'{sentence} (use "mpi")', others)
    form = keys.compression
    is_exact = form is None or (isinstance(form, TopKTable) and form.ratio == 1)
    if keys.warmup and is_exact and not has_outer_model(deck):
        why = "communication.topk.ratio = 1" if form else f'{_COMPRESS} = "{keys.compress}"'
        sentence = f"has no effect with {why} (leave it out)"
        yield DeckProblem("communication.warmup", sentence, (_COMPRESS,), no_effect=True)
