"""The section [communication], what ranks send each other and when, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from hpctrain.deck.key import Bytes, LinkText, Section, key, table
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.sections.local_steps import in_replicas
from hpctrain.deck.sections.optimizer import SgdTable
from hpctrain.deck.sections.server import ServerTable
from hpctrain.deck.sources import toml_value
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

    transport: Literal["auto", "shared", "mpi", "nccl"] = key(
        "shared: node memory, MPI between nodes; nccl: GPUs; auto: nccl if each rank has a GPU, shared "
        "on CPUs.",
        "auto",
    )
    bucket_bytes: Bytes = key(
        "Approximate size of the buckets in which gradients are synchronized.", 25_000_000, unit="bytes", ge=1
    )
    check: bool = key(
        "Debugging: ranks compare each collective call before they make it, and report a mismatch.",
        False,
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
        "Compression of gradient sums (layout.zero 0 or 1); its keys are in the table of its name.",
        "none",
    )
    warmup: int = key(
        "First steps, in which gradients are summed exactly over all data ranks, across replicas too.",
        0,
        unit="steps",
        ge=0,
    )
    bf16: RoundedTable | None = table("Keys of gradient sums in bfloat16.", chosen_by="compress")
    int8: RoundedTable | None = table("Keys of gradient sums in 8 bits.", chosen_by="compress")
    sign: SignTable | None = table("Keys of gradient sums of signs.", chosen_by="compress")
    onebit: OneBitTable | None = table("Keys of 1-bit Adam.", chosen_by="compress")
    topk: TopKTable | None = table("Keys of gradient sums of the largest elements.", chosen_by="compress")
    powersgd: PowerSgdTable | None = table("Keys of PowerSGD.", chosen_by="compress")
    server: ServerTable | None = table(
        "Parameter servers: some ranks own the parameters, the others compute gradients.",
        derived="none: all ranks train together",
    )

    @property
    def compression(self) -> CompressionTable | None:
        """The table of the compression of gradients; None if sums are exact."""
        return cast("CompressionTable | None", self.selected("compress"))

    @property
    def compresses_between_nodes(self) -> bool:
        """True if sums are exact within a node and compressed between nodes."""
        return self.compression is not None and self.compression.between == "nodes"

    @property
    def wished_transport(self) -> str:
        """Requested transport of tensors; "mpi" if a link between ranks is emulated."""
        return self.transport if self.emulate is None or self.ranks_per_node else "mpi"

    @property
    def link(self) -> Link | None:
        """Emulated link of each rank: an even share of that of its node; None without emulation."""
        if self.emulate is None:
            return None
        link = parse_link(self.emulate)
        return link._replace(bytes_per_second=link.bytes_per_second / (self.ranks_per_node or 1))


_COMPRESS = ("communication.compress",)


def compression_problems(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the gradient compression of a deck."""
    problems = list(_warmup(deck))
    if deck.communication.compression is not None:
        problems += [*_layout(deck), *_momentum(deck)]
    return problems


def _warmup(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of exact first steps in a run in which all steps are exact."""
    form = deck.communication.compression
    is_exact = form is None or (isinstance(form, TopKTable) and form.ratio == 1)
    if deck.communication.warmup and is_exact and not in_replicas(deck):
        why = "communication.topk.ratio = 1" if form else _form(deck)
        yield DeckProblem(
            "communication.warmup", f"has no effect with {why} (leave it out)", _COMPRESS, no_effect=True
        )


def _form(deck: Deck) -> str:
    return f"communication.compress = {toml_value(deck.communication.compress)}"


def _layout(deck: Deck) -> Iterator[DeckProblem]:
    layout = deck.layout
    if layout.zero > 1:
        sentence = (
            f"shards gradients, but {_form(deck)} needs complete gradients on each rank to keep what it "
            "does not send (0 or 1 would do)"
        )
        yield DeckProblem("layout.zero", sentence, _COMPRESS)
    elif layout.zero_group is not None:
        sentence = f"needs a second, exact sum between groups, which {_form(deck)} excludes (leave it out)"
        yield DeckProblem("layout.zero_group", sentence, (*_COMPRESS, "layout.zero"))


def _momentum(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of an optimizer whose momentum is kept by the compression."""
    keys, optimizer = deck.communication, deck.optimizer
    if keys.compress == "topk" and isinstance(optimizer.rule, SgdTable) and optimizer.rule.nesterov:
        sentence = (
            f"needs the same momentum on all ranks, but with {_form(deck)} each rank has its own until it "
            "sends it (false would do)"
        )
        yield DeckProblem("optimizer.sgd.nesterov", sentence, _COMPRESS)
    if keys.compress != "onebit":
        return
    if optimizer.name != "adamw":
        sentence = (
            f'must be "adamw" with {_form(deck)}, which sends the momentum of Adam in one bit per element'
        )
        yield DeckProblem("optimizer.name", sentence, _COMPRESS)
    if not keys.warmup:
        sentence = (
            f"must be 1 or more with {_form(deck)}: exact steps at the start determine the "
            "step size of each element for the rest of the run (a tenth of run.steps or more would do)"
        )
        yield DeckProblem("communication.warmup", sentence, _COMPRESS)
