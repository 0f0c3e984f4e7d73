"""The rates of a machine, from which the seconds of a step follow, in a file or published.

Products go at `peak efficiency / (1 + saturation (1/m + 1/n + 1/k))`: small ones keep no processor busy.
`hpctrain calibrate` measures such a file of the machine that it runs on.

A file may have several kinds of node: `[machine]` with `nodes`, and for each other kind a table
`[[machine.others]]` with its `name`, its `nodes` and what it has otherwise (`plan/time/node_kinds.py`).
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
from hpctrain.plan.time.node_kinds import kind_problems, with_others
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
"""How often memory is passed over for an element that comes out, forward and backward."""

Direction = Literal["forward", "backward"]
Home = Literal["device", "host", "disk"]
"""Where something lives."""

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


Pair = Annotated[tuple[float, float], Field(strict=False)]


class _RatesTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


ProductPass = Literal[Pass, "logits_input_gradient", "logits_weight_gradient"]
"""A pass of a matrix, or of the table that logits are computed by."""


class Efficiency(_RatesTable):
    """The share of the peak that the largest products reach, and what small ones lose."""

    efficiency: float = Field(gt=0)
    saturation: float = Field(ge=0)


class ProductRates(Efficiency):
    """Of one format: FLOP/s at the peak, how much of it products reach, and where that was measured how much
    those of a pass do.
    """

    peak: float = Field(ge=1, le=1e30)
    passes: Mapping[ProductPass, Efficiency] = Field(default_factory=dict)

    def seconds(self, m: float, n: float, k: float, kind: ProductPass = "forward") -> float:
        """Of one product [m, k] by [k, n]."""
        of = self.passes.get(kind, self)
        return 2 * (m * n * k + of.saturation * (n * k + m * k + m * n)) / (self.peak * of.efficiency)


class AttentionRates(_RatesTable):
    """FLOP/s of the core of attention, forward and backward, the causal mask not subtracted; none where it is
    products and passes over the matrix of scores, `passes` of them forward, and backward. `features` are
    seconds of each feature of a query beside, forward and backward: short sequences have more of them.
    """

    forward: float | None = Field(None, gt=0)
    backward: float | None = Field(None, gt=0)
    passes: tuple[float, float] | None = Field(None, strict=False)
    features: Pair = (0.0, 0.0)

    @model_validator(mode="after")
    def _whole(self) -> AttentionRates:
        rates = {"forward": self.forward, "backward": self.backward}
        lacking = [name for name, rate in rates.items() if rate is None]
        if len(lacking) == 1 or (lacking and self.passes is None):
            raise ValueError(
                f"requires {' and '.join(lacking)}, the FLOP/s of attention (`hpctrain calibrate` "
                "measures it)"
            )
        return self


class FormatRates(_RatesTable):
    """What takes another time in a format than in that of the machine's own figures."""

    attention: AttentionRates | None = None
    elementwise: Mapping[ElementwiseKind, Pair] = Field(default_factory=dict)
    optimizer: float | None = Field(None, gt=0)


_NO_FORMAT = FormatRates()


class LinkRates(_RatesTable):
    """Between ranks: bytes a second that each has in either direction, and seconds of a message of none."""

    bandwidth: float = Field(ge=1, le=1e30)
    latency: float = Field(ge=0)


class Host(_RatesTable):
    """The host of a device that computes: bytes a second that a rank moves to it, or from it, and those that
    its processor passes over for a rank.
    """

    bandwidth: float = Field(ge=1, le=1e30)
    memory_bandwidth: float = Field(ge=1, le=1e30)


class Collective(_RatesTable):
    """Seconds of an operation by bytes, the smallest first, as measured among `ranks`, of which so many lie
    `together` on a node: all, where nothing is said.
    """

    ranks: int = Field(ge=2)
    together: int | None = Field(None, ge=1)
    bytes: tuple[PositiveFloat, ...] = Field(min_length=1, strict=False)
    seconds: tuple[PositiveFloat, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _fits(self) -> Collective:
        if len(self.bytes) != len(self.seconds):
            raise ValueError("must have the same number of bytes and seconds")
        if list(self.bytes) != sorted(set(self.bytes)):
            raise ValueError("must have bytes in ascending order")
        return self


class MachineRates(_RatesTable):
    """One kind of rank, of node and of network, with the habits of its software.

    `launch` are the seconds that any operation takes at least, `fixed` those of a step beside all that is
    told. Sums of gradients, by default in the format that `gradients` says, as precision.gradients does, go
    on beside backward at the share `overlap` of their speed, with none after it; what layers sum hides by
    `layer_overlap` behind products; ranks that meet in each layer wait there for the slowest by the share
    `waits` of what they compute. `host` is there where ranks compute on devices with memory of their own;
    `disk` are bytes a second that a rank reads from its files, and writes at the same time. Where
    messages between stages are `blocking`, both sides wait for them; with `split_messages` a stage's tensor
    ranks send a part each. With `shared_memory` ranks of a node see each other's, as on CPUs. `elementwise`
    are seconds of an element, forward and backward; `optimizer` is elements a second that AdamW updates;
    `formats` have what differs by format. The head computes so many `logits` at a time, or all at once.

    Of a machine that was measured, `date` says when, `processor` is that, or the GPU, `ranks` by how many,
    `spread` below what shares of their median one tenth and nine tenths of the measurements of a kind were.

    There are as many `nodes` as ranks need, or so many; ranks lie on these first, then on those of the
    `others`, one kind after the other. `memory` is a rank's. `gpu` is true if ranks compute on GPUs.
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
    host: Host | None = None
    disk: float | None = Field(None, gt=0)
    collectives: Mapping[Operation, Collective] = Field(default_factory=dict)
    crossing: Mapping[Operation, Annotated[tuple[Collective, ...], Field(strict=False)]] = Field(
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
        """Of its nodes, in the order in which ranks fill them."""
        return (self, *self.others)

    @property
    def memories(self) -> tuple[tuple[str, int, float], ...]:
        """Of each kind its name, its nodes and bytes of memory for a rank there; none where there is one."""
        found = ((kind.name, kind.nodes or 0, kind.memory) for kind in self.kinds)
        return tuple(found) if self.others else ()

    def of_deck(self, deck: Deck) -> Deck:
        """The deck, on nodes and by the habits of this machine where it does not say otherwise."""
        told, most = deck.machine, max(kind.memory for kind in self.kinds)
        of_node = told.ranks_per_node or told.gpus_per_node or self.ranks_per_node
        found = {"ranks_per_node": of_node, "memory": told.memory or int(most * of_node)}
        found |= {"gpu_memory": told.gpu_memory or int(self.memory)}
        given = "precision.gradients" in deck.sources.places
        sums = deck.precision.gradients if given else self.gradients
        apart = deck.communication.transport == "auto" and not self.shared_memory
        over = {"transport": "mpi"} if apart else {}
        if self.prepared_product is not None and "machine.prepared_product" not in deck.sources.places:
            found |= {"prepared_product": int(self.prepared_product)}
        device = "cuda" if self.gpu and deck.run.device == "auto" else deck.run.device
        return deck.with_keys(
            run={"device": device}, machine=found, precision={"gradients": sums}, communication=over
        )

    def products_of(self, form: str) -> ProductRates:
        """Those of a format; HpctrainError where they were not measured."""
        found = self.products.get(form)
        if found is None:
            raise HpctrainError(
                f"{self.name}: machine.products.{form} is missing: the keys peak (FLOP/s), efficiency "
                "(share of the peak of large products) and saturation; the file has "
                f"{either(self.products)} (`hpctrain calibrate` measures them)"
            )
        return found

    def host_for(self, key: str) -> Host:
        """That of the device; HpctrainError where it was not measured, and the deck's `key` asks for it."""
        if self.host is None:
            raise HpctrainError(
                f"{self.name}: machine.host is missing, which {key} = host requires: the keys bandwidth "
                "(bytes/s between the device of a rank and its host) and memory_bandwidth (bytes/s of the "
                "host's memory)"
            )
        return self.host

    def disk_for(self, key: str) -> float:
        """Bytes a second; HpctrainError where they were not measured, and the deck's `key` asks for them."""
        if self.disk is None:
            raise HpctrainError(
                f"{self.name}: machine.disk is missing, which {key} = disk requires: bytes/s that a rank "
                "reads from its files and writes to them"
            )
        return self.disk

    def away(self, home: Home, key: str) -> float:
        """Bytes a second to where something lives by the deck's `key`, and back; HpctrainError as above."""
        if home == "host":
            return self.host_for(key).bandwidth
        disk = self.disk_for(key)
        return disk if self.host is None else min(disk, self.host.bandwidth)

    def link(self, crosses: bool) -> LinkRates:
        """That inside a node, or between nodes; HpctrainError where it was not measured."""
        found = self.between if crosses else self.inside
        if found is None:
            name, where = ("between", "two nodes") if crosses else ("inside", "two ranks of a node")
            on_one_node = (
                f"; its nodes have {counted(self.ranks_per_node, 'rank')} each (if more share a node, use "
                "--ranks-per-node R, or machine.ranks_per_node in the deck)"
            )
            raise HpctrainError(
                f"{self.name}: machine.{name} is missing: the keys bandwidth (bytes/s) and latency "
                f"(seconds) of a link (`hpctrain calibrate` measures them on {where}){on_one_node * crosses}"
            )
        return found

    def attention_of(self, form: str) -> AttentionRates:
        """That of a format."""
        return self.formats.get(form, _NO_FORMAT).attention or self.attention

    def optimizer_of(self, form: str) -> float | None:
        """Elements a second of parameters that are stored in a format."""
        return self.formats.get(form, _NO_FORMAT).optimizer or self.optimizer

    def elements(
        self, kind: ElementwiseKind, direction: Direction, count: float, itemsize: int, form: str = ""
    ) -> float:
        """Seconds of what is done to so many elements of a format."""
        backward = direction == "backward"
        measured = self.formats.get(form, _NO_FORMAT).elementwise.get(kind) or self.elementwise.get(kind)
        if measured is not None:
            return self.launch + count * measured[backward]
        return self.launch + count * PASSES[kind][backward] * itemsize / self.memory_bandwidth

    def logits_at_once(self, tokens: float, outputs: float) -> float:
        """Tokens of a chunk of so many, for which the head computes `outputs` logits each."""
        if self.logits is None:
            return tokens
        return even_chunk(max(1, int(tokens)), max(CHUNK_ROWS, int(self.logits // outputs)))


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a group lie: `size` of them, `together` on each of the nodes they are spread over."""

    size: int
    together: int

    @staticmethod
    def of(size: int, stride: int, ranks_per_node: int) -> Sharing:
        """Of ranks that lie `stride` apart in the order of ranks."""
        together = max(1, min(size, ranks_per_node // stride))
        while size % together:
            together -= 1
        return Sharing(size, together)

    @property
    def nodes(self) -> int:
        """Over which they are spread."""
        return self.size // self.together


SENT: Mapping[Operation, float] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How many times what an operation is of, less a rank's own part, passes each rank's link."""


def collective_seconds(machine: MachineRates, operation: Operation, size: float, group: Sharing) -> float:
    """Seconds of an operation of `size` bytes in all: the payload of a rank.

    By what was measured, where it was, inside a node. Else pieces pass each rank's link once, twice for an
    all-reduce; between nodes the ranks that lie together have their links together
    (`comm/transports/hierarchical.py`).
    """
    if group.size == 1 or size <= 0:
        return 0.0
    rounds = max(1, (group.size - 1).bit_length())
    factor = SENT[operation]
    if group.nodes == 1:
        measured = machine.collectives.get(operation)
        if measured is not None:
            scale = (group.size - 1) / group.size * measured.ranks / (measured.ranks - 1)
            return _between(measured, size) * scale
        link = machine.link(crosses=False)
        return factor * size * (group.size - 1) / group.size / link.bandwidth + rounds * link.latency
    measured = _nearest(machine.crossing.get(operation, ()), group)
    if measured is not None:
        scale = (group.size - 1) / group.size * measured.ranks / (measured.ranks - 1)
        return _between(measured, size) * scale
    between = machine.link(crosses=True)
    bandwidth = between.bandwidth * group.together
    if group.together > 1:
        bandwidth = min(bandwidth, machine.link(crosses=False).bandwidth)
    return factor * size * (group.size - 1) / group.size / bandwidth + rounds * between.latency


def _nearest(measured: Sequence[Collective], group: Sharing) -> Collective | None:
    """Of what was measured between nodes that of groups with as many ranks on a node, or the next fewer."""
    fitting = [each for each in measured if (each.together or 1) <= group.together]
    return max(fitting, key=lambda each: each.together or 1, default=None)


def gather_seconds(machine: MachineRates, size: float, group: Sharing) -> float:
    """Seconds in which ranks have parameters of `size` bytes that they cut: where ranks of a node see one and
    the same memory these are there as soon as all have come.
    """
    if machine.shared_memory and group.nodes == 1:
        return collective_seconds(machine, "all_gather", 1.0, group)
    return collective_seconds(machine, "all_gather", size, group)


def message_seconds(machine: MachineRates, size: float, crosses: bool) -> float:
    """Seconds of a message of `size` bytes from a rank to one of the next stage."""
    link = machine.link(crosses)
    return size / link.bandwidth + link.latency


def _between(measured: Collective, size: float) -> float:
    """Seconds of a size, between those that were measured beside it; beyond the last one by its rate."""
    sizes, seconds = measured.bytes, measured.seconds
    if size <= sizes[0]:
        return seconds[0]
    for number in range(1, len(sizes)):
        if size <= sizes[number]:
            share = (size - sizes[number - 1]) / (sizes[number] - sizes[number - 1])
            return seconds[number - 1] + share * (seconds[number] - seconds[number - 1])
    return seconds[-1] * size / sizes[-1]


def preset_names() -> list[str]:
    """Machines of publications that come with hpctrain."""
    folder = resources.files(__package__) / "machines"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def read_machine(name: str) -> MachineRates:
    """The machine of a preset's name, or of a file.

    HpctrainError with every figure that is missing or wrong, InputOutputError where no file can be read.
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
        near = nearest(name, names)
        hint = f'did you mean "{near}"? or ' if near else ""
        raise InputOutputError(f"{name}: cannot be read: {reason} ({hint}{known})") from None
    return parse_machine(text, name)


def parse_machine(text: str, name: str) -> MachineRates:
    """The `[machine]` table of a text. HpctrainError as `read_machine`."""
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
        machine = MachineRates.model_validate(with_others(table))
    except ValidationError as error:
        problems += _figure_problems(error)
    if problems:
        raise HpctrainError([_sentence(name, lines, *each) for each in problems])
    return machine


def _figure_problems(error: ValidationError) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths below [machine] of figures that are missing or wrong, and what they are; what other kinds have
    from the first one is said once.
    """
    seen = set[tuple[tuple[str, ...], str]]()
    for each in error.errors():
        path = tuple(map(str, each["loc"]))
        if each["type"] == "missing":
            sentence = "is missing (`hpctrain calibrate` measures it)"
        elif each["type"] == "extra_forbidden":
            sentence = "unknown key"
        else:
            said = each["msg"].removeprefix("Value error, ")
            sentence = said[:1].lower() + said[1:]
        if path[:1] == ("others",) and (path[2:], sentence) in seen:
            continue
        seen.add((path, sentence))
        yield path, sentence


def _sentence(name: str, lines: Mapping[tuple[str, ...], int], below: tuple[str, ...], said: str) -> str:
    path = ("machine", *below)
    line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    return f"{name}:{line}: {'.'.join(path)}: {said}" if line else f"{name}: {'.'.join(path)}: {said}"
