"""Rates of a machine, from which the seconds of a step follow. They are in a file or published.

A matrix product has `peak efficiency / (1 + saturation (1/m + 1/n + 1/k))` FLOP/s, since small ones cannot
use the whole processor. `hpctrain calibrate` writes a file with the rates of this machine.

A file may have several kinds of node: `[machine]` with `nodes`, and for each further kind a table
`[[machine.others]]` with its `name`, its `nodes` and the rates that differ (`plan/time/node_kinds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from hpctrain.deck.schema import Deck
from hpctrain.deck.toml import MAX_DECK_BYTES, TomlError, parse_toml
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import read_text
from hpctrain.parallel.kernels.matmul_kernels import Pass
from hpctrain.parallel.operations import ElementwiseKind
from hpctrain.parallel.vocabulary import CHUNK_ROWS, even_chunk
from hpctrain.plan.time.node_kinds import complete_kinds, kind_problems
from hpctrain.text import counted, either, nearest

PASSES: Mapping[ElementwiseKind, tuple[float, float]] = {
    "norm": (2, 3),
    "add": (3, 1),
    "activation": (2, 3),
    "gate": (3, 5),
    "rotation": (2, 2),
    "loss": (4, 2),
    "lookup": (2, 3),
}
"""Number of reads and writes of memory for each output element, forward and backward."""

Direction = Literal["forward", "backward"]
Location = Literal["device", "host", "disk"]
"""Memory in which tensors are stored."""

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


Pair = Annotated[tuple[float, float], Field(strict=False)]


class _RatesTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


ProductPass = Literal[Pass, "logits_input_gradient", "logits_weight_gradient"]
"""Pass of a matrix product, or of the product with the output table."""


class Efficiency(_RatesTable):
    """Efficiency of matrix products.

    Attributes:
        efficiency: Share of the peak that the largest products reach.
        saturation: Loss of small products, as in the formula of this module.
    """

    efficiency: float = Field(gt=0)
    saturation: float = Field(ge=0)


class ProductRates(Efficiency):
    """Rates of matrix products in one format.

    Attributes:
        peak: FLOP/s at the peak.
        passes: Efficiency by pass, if it was measured.
    """

    peak: float = Field(ge=1, le=1e30)
    passes: Mapping[ProductPass, Efficiency] = Field(default_factory=dict)

    def seconds(self, m: float, n: float, k: float, kind: ProductPass = "forward") -> float:
        """Return the seconds of a product [m, k] by [k, n]."""
        efficiency = self.passes.get(kind, self)
        return (
            2
            * (m * n * k + efficiency.saturation * (n * k + m * k + m * n))
            / (self.peak * efficiency.efficiency)
        )


class AttentionRates(_RatesTable):
    """Rates of the core of attention.

    Without `forward` and `backward`, attention consists of products and of passes over the matrix of scores.

    Attributes:
        forward: FLOP/s forward. The causal mask is not subtracted.
        backward: FLOP/s backward.
        passes: Number of passes over the scores, forward and backward.
        features: Further seconds for each feature of a query, forward and backward, which matter in short
            sequences.
    """

    forward: float | None = Field(None, gt=0)
    backward: float | None = Field(None, gt=0)
    passes: tuple[float, float] | None = Field(None, strict=False)
    features: Pair = (0.0, 0.0)

    @model_validator(mode="after")
    def _require_both_rates(self) -> AttentionRates:
        rates = {"forward": self.forward, "backward": self.backward}
        missing = [name for name, rate in rates.items() if rate is None]
        if len(missing) == 1 or (missing and self.passes is None):
            raise ValueError(
                f"requires {' and '.join(missing)}, the FLOP/s of attention (`hpctrain calibrate` "
                "measures it)"
            )
        return self


class FormatRates(_RatesTable):
    """Rates that differ in a format from those of the machine.

    Attributes:
        attention: Rates of attention.
        elementwise: Seconds per element, forward and backward, by kind of operation.
        optimizer: Elements per second of the optimizer.
    """

    attention: AttentionRates | None = None
    elementwise: Mapping[ElementwiseKind, Pair] = Field(default_factory=dict)
    optimizer: float | None = Field(None, gt=0)


_NO_FORMAT = FormatRates()


class LinkRates(_RatesTable):
    """Link between ranks.

    Attributes:
        bandwidth: Bytes per second of a rank in each direction.
        latency: Seconds of an empty message.
    """

    bandwidth: float = Field(ge=1, le=1e30)
    latency: float = Field(ge=0)


class HostRates(_RatesTable):
    """Rates of the host of a GPU.

    Attributes:
        bandwidth: Bytes per second between the GPU of a rank and its host.
        memory_bandwidth: Bytes per second of host memory for a rank.
    """

    bandwidth: float = Field(ge=1, le=1e30)
    memory_bandwidth: float = Field(ge=1, le=1e30)


class CollectiveRates(_RatesTable):
    """Measured seconds of a collective operation.

    Attributes:
        ranks: Number of ranks.
        together: Number of them on each node; None for all.
        bytes: Sizes in ascending order.
        seconds: Seconds for each size.
    """

    ranks: int = Field(ge=2)
    together: int | None = Field(None, ge=1)
    bytes: tuple[PositiveFloat, ...] = Field(min_length=1, strict=False)
    seconds: tuple[PositiveFloat, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _check_sizes(self) -> CollectiveRates:
        if len(self.bytes) != len(self.seconds):
            raise ValueError("must have the same number of bytes and seconds")
        if list(self.bytes) != sorted(set(self.bytes)):
            raise ValueError("must have bytes in ascending order")
        return self


class MachineRates(_RatesTable):
    """Rates of one kind of ranks, nodes and network, and properties of their software.

    Attributes:
        name: Name of the machine.
        source: Origin of the rates.
        nodes: Number of nodes; None for as many as ranks need.
        ranks_per_node: Number of ranks per node.
        memory: Bytes of memory for a rank.
        memory_bandwidth: Bytes per second of memory for a rank.
        prepared_product: Bytes that a CPU's library keeps for each prepared matrix product.
        launch: Minimum seconds of an operation.
        fixed: Seconds of a step that are not predicted otherwise.
        optimizer: Elements per second that AdamW updates.
        products: Rates of matrix products by format.
        attention: Rates of attention.
        elementwise: Seconds per element, forward and backward, by kind of operation.
        formats: Rates that differ by format.
        logits: Number of logits that the output layer computes at a time; None for all.
        inside: Link inside nodes.
        between: Link between nodes.
        host: Host of the GPU; None on CPUs.
        disk: Bytes per second that a rank reads from its files and writes to them.
        collectives: Measured operations inside nodes.
        crossing: Measured operations between nodes.
        gradients: Default format of gradient reductions, as in precision.gradients.
        overlap: Share of their speed that gradient reductions have during the backward pass.
        layer_overlap: Share of tensor-parallel reductions that overlaps with products.
        waits: Wait for the slowest rank in each layer, as a share of the computation.
        messages: "blocking" if both stages wait for a message between them.
        split_messages: True if each tensor rank sends a part of the message to the next stage.
        shared_memory: True if ranks of a node share memory, as on CPUs.
        gpu: True if ranks compute on GPUs.
        date: Date of the measurement.
        processor: Name of the processor or GPU.
        ranks: Number of ranks of the measurement.
        spread: 10th and 90th percentile of the measurements by kind, relative to their median.
        others: Further kinds of node. Ranks fill the nodes of this kind first.
    """

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    nodes: int | None = Field(None, ge=1)
    ranks_per_node: int = Field(ge=1)
    memory: float = Field(ge=1, le=1e18)
    memory_bandwidth: float = Field(ge=1, le=1e30)
    prepared_product: float | None = Field(None, ge=0, le=1e12)
    launch: float = Field(0.0, ge=0)
    fixed: float = Field(0.0, ge=0)
    optimizer: float | None = Field(None, gt=0)
    products: Mapping[str, ProductRates]
    attention: AttentionRates
    elementwise: Mapping[ElementwiseKind, Pair] = Field(default_factory=dict)
    formats: Mapping[str, FormatRates] = Field(default_factory=dict)
    logits: float | None = Field(None, gt=0)
    inside: LinkRates | None = None
    between: LinkRates | None = None
    host: HostRates | None = None
    disk: float | None = Field(None, gt=0)
    collectives: Mapping[Operation, CollectiveRates] = Field(default_factory=dict)
    crossing: Mapping[Operation, Annotated[tuple[CollectiveRates, ...], Field(strict=False)]] = Field(
        default_factory=dict
    )
    gradients: Literal["fp32", "compute"] = "fp32"
    overlap: float = Field(0.0, ge=0, le=1)
    layer_overlap: float = Field(0.0, ge=0, le=1)
    waits: float = Field(0.0, ge=0, le=1)
    messages: Literal["blocking", "overlapped"] = "overlapped"
    split_messages: bool = False
    shared_memory: bool = False
    gpu: bool = False
    date: str | None = None
    processor: str | None = None
    ranks: int | None = Field(None, ge=1)
    spread: Mapping[str, Pair] = Field(default_factory=dict)
    others: tuple[MachineRates, ...] = Field((), strict=False)

    @property
    def kinds(self) -> tuple[MachineRates, ...]:
        """Kinds of node, in the order in which ranks fill them."""
        return (self, *self.others)

    @property
    def memories(self) -> tuple[tuple[str, int, float], ...]:
        """Name, number of nodes, and bytes for each rank of each kind of node; () if there is one kind."""
        result = ((kind.name, kind.nodes or 0, kind.memory) for kind in self.kinds)
        return tuple(result) if self.others else ()

    def fill_deck(self, deck: Deck) -> Deck:
        """Return the deck with the properties of this machine for keys that it does not set."""
        section, most = deck.machine, max(kind.memory for kind in self.kinds)
        ranks_per_node = section.known_ranks_per_node or self.ranks_per_node
        result = {"ranks_per_node": ranks_per_node, "memory": section.memory or int(most * ranks_per_node)}
        result |= {"gpu_memory": section.gpu_memory or int(self.memory)}
        is_set = "precision.gradients" in deck.sources.places
        gradients = deck.precision.gradients if is_set else self.gradients
        uses_mpi = deck.communication.transport == "auto" and not self.shared_memory
        communication = {"transport": "mpi"} if uses_mpi else {}
        if self.prepared_product is not None and "machine.prepared_product" not in deck.sources.places:
            result |= {"prepared_product": int(self.prepared_product)}
        device = "cuda" if self.gpu and deck.run.device == "auto" else deck.run.device
        return deck.with_keys(
            run={"device": device},
            machine=result,
            precision={"gradients": gradients},
            communication=communication,
        )

    def products_of(self, form: str) -> ProductRates:
        """Return the rates of matrix products in a format.

        Raises:
            HpctrainError: They are missing.
        """
        result = self.products.get(form)
        if result is None:
            raise HpctrainError(
                f"{self.name}: machine.products.{form} is missing: the keys peak (FLOP/s), efficiency "
                "(share of the peak of large products) and saturation; the file has "
                f"{either(self.products)} (`hpctrain calibrate` measures them)"
            )
        return result

    def host_for(self, key: str) -> HostRates:
        """Return the host of the GPU, which a key of the deck requires.

        Raises:
            HpctrainError: It is missing.
        """
        if self.host is None:
            raise HpctrainError(
                f"{self.name}: machine.host is missing, which {key} = host requires: the keys bandwidth "
                "(bytes/s between the device of a rank and its host) and memory_bandwidth (bytes/s of the "
                "host's memory)"
            )
        return self.host

    def disk_for(self, key: str) -> float:
        """Return the bytes per second of the disk, which a key of the deck requires.

        Raises:
            HpctrainError: They are missing.
        """
        if self.disk is None:
            raise HpctrainError(
                f"{self.name}: machine.disk is missing, which {key} = disk requires: bytes/s that a rank "
                "reads from its files and writes to them"
            )
        return self.disk

    def offload_bandwidth(self, location: Location, key: str) -> float:
        """Return the bytes per second to and from the memory that a key of the deck requires.

        Raises:
            HpctrainError: They are missing.
        """
        if location == "host":
            return self.host_for(key).bandwidth
        disk = self.disk_for(key)
        return disk if self.host is None else min(disk, self.host.bandwidth)

    def link(self, crosses: bool) -> LinkRates:
        """Return the link between nodes if `crosses`, or else that inside nodes.

        Raises:
            HpctrainError: It is missing.
        """
        result = self.between if crosses else self.inside
        if result is None:
            name, where = ("between", "two nodes") if crosses else ("inside", "two ranks of a node")
            on_one_node = (
                f"; its nodes have {counted(self.ranks_per_node, 'rank')} each (if more share a node, use "
                "--ranks-per-node R, or machine.ranks_per_node in the deck)"
            )
            raise HpctrainError(
                f"{self.name}: machine.{name} is missing: the keys bandwidth (bytes/s) and latency "
                f"(seconds) of a link (`hpctrain calibrate` measures them on {where}){on_one_node * crosses}"
            )
        return result

    def attention_of(self, form: str) -> AttentionRates:
        """Return the rates of attention in a format."""
        return self.formats.get(form, _NO_FORMAT).attention or self.attention

    def optimizer_of(self, form: str) -> float | None:
        """Return the elements per second of the optimizer, for parameters in a format; None if unknown."""
        return self.formats.get(form, _NO_FORMAT).optimizer or self.optimizer

    def elementwise_seconds(
        self, kind: ElementwiseKind, direction: Direction, count: float, itemsize: int, form: str = ""
    ) -> float:
        """Return the seconds of an elementwise operation on `count` elements of a format."""
        backward = direction == "backward"
        measured = self.formats.get(form, _NO_FORMAT).elementwise.get(kind) or self.elementwise.get(kind)
        if measured is not None:
            return self.launch + count * measured[backward]
        return self.launch + count * PASSES[kind][backward] * itemsize / self.memory_bandwidth

    def logits_at_once(self, tokens: float, outputs: float) -> float:
        """Return the number of `tokens` for which the output layer computes `outputs` logits at a time."""
        if self.logits is None:
            return tokens
        return even_chunk(max(1, int(tokens)), max(CHUNK_ROWS, int(self.logits // outputs)))


@dataclass(frozen=True)
class GroupPlacement:
    """Placement of the ranks of a group on nodes.

    Attributes:
        size: Number of ranks.
        ranks_per_node: Number of ranks of the group on each node.
    """

    size: int
    ranks_per_node: int

    @staticmethod
    def of(size: int, stride: int, ranks_per_node: int) -> GroupPlacement:
        """Return the placement of ranks that are `stride` apart in the order of ranks."""
        together = max(1, min(size, ranks_per_node // stride))
        while size % together:
            together -= 1
        return GroupPlacement(size, together)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.size // self.ranks_per_node


LINK_PASSES: Mapping[Operation, float] = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
}
"""Number of times that the tensor, without a rank's own part, passes the link of a rank."""


def collective_seconds(
    machine: MachineRates, operation: Operation, size: float, group: GroupPlacement
) -> float:
    """Return the seconds of a collective operation.

    Measured operations are interpolated. Otherwise the pieces pass the link of each rank once, twice for an
    all-reduce. Between nodes, the ranks of a node use their links together
    (`comm/transports/hierarchical.py`).

    Args:
        machine: Rates of the machine.
        operation: The operation.
        size: Bytes of the global tensor, which are the payload of a rank.
        group: Placement of the ranks.
    """
    if group.size == 1 or size <= 0:
        return 0.0
    rounds = max(1, (group.size - 1).bit_length())
    factor = LINK_PASSES[operation]
    if group.nodes == 1:
        measured = machine.collectives.get(operation)
        if measured is not None:
            scale = (group.size - 1) / group.size * measured.ranks / (measured.ranks - 1)
            return _interpolate(measured, size) * scale
        link = machine.link(crosses=False)
        return factor * size * (group.size - 1) / group.size / link.bandwidth + rounds * link.latency
    measured = _nearest(machine.crossing.get(operation, ()), group)
    if measured is not None:
        scale = (group.size - 1) / group.size * measured.ranks / (measured.ranks - 1)
        return _interpolate(measured, size) * scale
    between = machine.link(crosses=True)
    bandwidth = between.bandwidth * group.ranks_per_node
    if group.ranks_per_node > 1:
        bandwidth = min(bandwidth, machine.link(crosses=False).bandwidth)
    return factor * size * (group.size - 1) / group.size / bandwidth + rounds * between.latency


def _nearest(measured: Sequence[CollectiveRates], group: GroupPlacement) -> CollectiveRates | None:
    """Return the operation that was measured with as many ranks per node, or the next fewer."""
    fitting = [each for each in measured if (each.together or 1) <= group.ranks_per_node]
    return max(fitting, key=lambda each: each.together or 1, default=None)


def gather_seconds(machine: MachineRates, size: float, group: GroupPlacement) -> float:
    """Return the seconds in which ranks gather parameters of `size` bytes.

    If ranks of a node share memory, they only wait for each other.
    """
    if machine.shared_memory and group.nodes == 1:
        return collective_seconds(machine, "all_gather", 1.0, group)
    return collective_seconds(machine, "all_gather", size, group)


def message_seconds(machine: MachineRates, size: float, crosses: bool) -> float:
    """Return the seconds of a message of `size` bytes to a rank of the next stage."""
    link = machine.link(crosses)
    return size / link.bandwidth + link.latency


def _interpolate(measured: CollectiveRates, size: float) -> float:
    """Return the seconds of a size, interpolated; beyond the largest measured size in proportion."""
    sizes, seconds = measured.bytes, measured.seconds
    if size <= sizes[0]:
        return seconds[0]
    for number in range(1, len(sizes)):
        if size <= sizes[number]:
            share = (size - sizes[number - 1]) / (sizes[number] - sizes[number - 1])
            return seconds[number - 1] + share * (seconds[number] - seconds[number - 1])
    return seconds[-1] * size / sizes[-1]


def preset_names() -> list[str]:
    """Return the names of the published machines that come with hpctrain."""
    folder = resources.files(__package__) / "machines"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def read_machine(name: str) -> MachineRates:
    """Return the machine of a preset or of a file.

    Raises:
        HpctrainError: Rates are missing or wrong. It has all problems.
        InputOutputError: The file cannot be read.
    """
    names = preset_names()
    known = f"use a file of `hpctrain calibrate`, or {either(names)}"
    if not name.strip():
        raise HpctrainError(f'"{name}": is not a machine ({known})')
    if name in names:
        text = (resources.files(__package__) / "machines" / f"{name}.toml").read_text(encoding="utf-8")
        return parse_machine(text, name)
    try:
        text = read_text(Path(name), MAX_DECK_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text" if isinstance(error, ValueError) else (error.strerror or str(error)).lower()
        suggestion = nearest(name, names)
        hint = f'did you mean "{suggestion}"? or ' if suggestion else ""
        raise InputOutputError(f"{name}: cannot be read: {reason} ({hint}{known})") from None
    return parse_machine(text, name)


def parse_machine(text: str, name: str) -> MachineRates:
    """Return the `[machine]` table of a text.

    Raises:
        HpctrainError: Rates are missing or wrong. It has all problems.
    """
    try:
        values, lines = parse_toml(text)
    except TomlError as error:
        where = f"{name}:{error.line}" if error.line else name
        raise HpctrainError(f"{where}: {error.reason}") from None
    table: Any = values.get("machine")
    if not isinstance(table, dict):
        raise HpctrainError(f"{name}: requires a table [machine] with the rates of a machine")
    problems = list(kind_problems(table))
    try:
        machine = MachineRates.model_validate(complete_kinds(table))
    except ValidationError as error:
        problems += _value_problems(error)
    if problems:
        raise HpctrainError([_sentence(name, lines, *each) for each in problems])
    return machine


def _value_problems(error: ValidationError) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the paths below [machine] and the problems of missing or wrong values.

    Problems of other kinds of node that come from the first kind are listed once.
    """
    reported = set[tuple[tuple[str, ...], str]]()
    for each in error.errors():
        path = tuple(map(str, each["loc"]))
        if each["type"] == "missing":
            sentence = "is missing (`hpctrain calibrate` measures it)"
        elif each["type"] == "extra_forbidden":
            sentence = "unknown key"
        else:
            problem = each["msg"].removeprefix("Value error, ")
            sentence = problem[:1].lower() + problem[1:]
        if path[:1] == ("others",) and (path[2:], sentence) in reported:
            continue
        reported.add((path, sentence))
        yield path, sentence


def _sentence(name: str, lines: Mapping[tuple[str, ...], int], keys: tuple[str, ...], problem: str) -> str:
    path = ("machine", *keys)
    line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    return f"{name}:{line}: {'.'.join(path)}: {problem}" if line else f"{name}: {'.'.join(path)}: {problem}"
