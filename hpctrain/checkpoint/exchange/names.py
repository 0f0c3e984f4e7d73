"""Names of tensors: ours, and those of Hugging Face's `transformers`, where ours may be fused or stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.exchange.expert_order import ExpertOrder, GateOrder

Index = tuple[int, ...]

ROUTER_BIAS = "router/bias"
"""The kind of the bias of a router's choice: state, not a parameter."""


@dataclass(frozen=True)
class NameRule:
    """A layer of theirs and the layers of ours that it holds, below each other; {} is the block's number.

    Weights are `<name>.weight`, biases `<name>.bias`.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    joint: bool = False
    """True if theirs has the rows of a head of each of ours beside each other."""


@dataclass(frozen=True)
class StackRule:
    """Layers of theirs that are stacked in one weight of ours: for each expert one layer, or several.

    The first {} is the block's number, the second one the expert's. Ours is [experts, ...], or
    [experts, layers, ...] where there are several.
    """

    theirs: tuple[str, ...]
    ours: str


@dataclass(frozen=True)
class HeadRule:
    """A vector of ours with the features of all heads that is a matrix [heads, features] of theirs.

    With a second {}, the number of the head, it is a vector of theirs for each head.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class PackedRule:
    """A tensor of theirs that holds one of ours of all experts, in another order.

    Attributes:
        theirs: Name of the tensor; {} is the number of the block.
        ours: Name of our layer.
        gates: Order of gates and up in it.
        transposed: True if it has inputs before outputs.
        suffixes: What follows the name, for each kind of parameter.
    """

    theirs: str
    ours: str
    gates: GateOrder
    transposed: bool
    suffixes: Mapping[str, str]


Rule = NameRule | StackRule | HeadRule | PackedRule


class LayerOrders(Protocol):
    """Order of the rows of an architecture's layers in files of `transformers`."""

    @property
    def head_size(self) -> int:
        """Number of features of a head of queries and keys."""

    def order(self, layer: str, tensors: int, place: int) -> RowOrder | None:
        """Return the order of the rows of one of our layers in theirs; None if it is ours.

        Args:
            layer: Name of our layer.
            tensors: Number of our layers whose heads are side by side in theirs.
            place: Number of ours among these.
        """


@dataclass(frozen=True)
class HeadOrder:
    """Order of the features of a head in files of `transformers`, which may not be ours.

    We rotate halves of a head, and the features that are not rotated are at the end of both halves. The files
    have all rotated features first, as halves or as neighboring pairs.

    Attributes:
        head_size: Features of a head.
        rotated: Number of features that are rotated.
        interleaved: True if neighbors are rotated together.
    """

    head_size: int
    rotated: int
    interleaved: bool

    @property
    def changes(self) -> bool:
        """True if the order of queries and keys is not ours."""
        return self.interleaved or self.rotated < self.head_size

    @property
    def features(self) -> tuple[int, ...]:
        """Number in the file of each of our features of a query or key."""
        half, pairs = self.head_size // 2, self.rotated // 2
        if self.interleaved:
            first, second = range(0, self.rotated, 2), range(1, self.rotated, 2)
        else:
            first, second = range(pairs), range(pairs, self.rotated)
        rest = half - pairs + self.rotated
        return (*first, *range(self.rotated, rest), *second, *range(rest, self.head_size))

    def order(self, layer: str, tensors: int, place: int) -> RowOrder | None:
        """Return the order of the rows of one of our layers, as in `LayerOrders`."""
        rotated = layer.rpartition(".")[2] in _ROTATED
        if tensors == 1 and not (rotated and self.changes):
            return None
        features = self.features if rotated else tuple(range(self.head_size))
        start = place * self.head_size if tensors > 1 else 0
        return RowOrder(tuple(start + each for each in features), tensors * self.head_size)


@dataclass(frozen=True)
class LatentOrder:
    """Order of the rows of latent attention in files of `transformers`.

    In a query the features that are not rotated come first, then those that are, as neighboring pairs. We
    rotate halves, and the features that are not rotated are at the end of both halves. A head of keys is
    followed by its values.

    Attributes:
        head_size: Features of a query.
        rotated: Number of features that are rotated.
        value_size: Features of a value.
    """

    head_size: int
    rotated: int
    value_size: int

    def order(self, layer: str, tensors: int, place: int) -> RowOrder | None:  # noqa: ARG002
        """Return the order of the rows of one of our layers, as in `LayerOrders`."""
        plain = self.head_size - self.rotated
        first, second = range(0, self.rotated, 2), range(1, self.rotated, 2)
        match layer.rpartition(".")[2]:
            case "query" | "query_up":
                turned = [[plain + each for each in half] for half in (first, second)]
                features = (*turned[0], *range(plain // 2), *turned[1], *range(plain // 2, plain))
                return RowOrder(features, self.head_size)
            case "shared_key":
                return RowOrder((*first, *second), self.rotated)
            case "key_up":
                return RowOrder(tuple(range(plain)), plain + self.value_size)
            case "value_up":
                return RowOrder(tuple(range(plain, plain + self.value_size)), plain + self.value_size)
            case _:
                return None


@dataclass(frozen=True)
class RowOrder:
    """Rows of one of our tensors in one of theirs.

    Attributes:
        features: Number among their rows of a head of each of our rows of a head.
        unit: Number of their rows of a head.
    """

    features: tuple[int, ...]
    unit: int

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Return their rows of `count` of our rows from `first` on."""
        head, feature = np.divmod(np.arange(first, first + count), len(self.features))
        return np.asarray(head * self.unit + np.asarray(self.features, np.int64)[feature])


@dataclass(frozen=True)
class TensorPart:
    """One of our tensors, or the piece of it at the leading `index`, of `shape`, within one of theirs: rows
    `first` to `first + shape[0]` in our orientation. `dataset` names ours: "/model/<name>". The piece of a
    vector that is several of theirs has its elements from `start` on.
    """

    dataset: str
    shape: Index
    first: int = 0
    index: Index = ()
    order: RowOrder | None = None
    """Order of our rows in theirs, from `first` on; None if it is ours."""
    start: int | None = None
    expert_order: ExpertOrder | None = None
    """Order of our elements in theirs; None for what the other fields say."""

    def rows(self, first: int, count: int) -> slice | NDArray[np.int64]:
        """Return the rows in theirs of `count` of our rows from `first` on."""
        if self.order is None:
            return slice(self.first + first, self.first + first + count)
        return self.first + self.order.rows(first, count)


@dataclass(frozen=True)
class Counterpart:
    """One tensor of theirs, of `shape` in the file, and ours of which it is made.

    A matrix that is `flattened` is a vector of ours.
    """

    name: str
    shape: Index
    transposed: bool
    parts: tuple[TensorPart, ...]
    flattened: bool = False


def counterparts(
    rules: Sequence[Rule], ours: Mapping[str, Index], heads: LayerOrders | None = None
) -> list[Counterpart]:
    """Return what holds our tensors, in our order, each of theirs once.

    Args:
        rules: Names of the architecture.
        ours: Global shapes by dataset.
        heads: Order of the features of heads; None if it is ours.
    """
    by_layer = {layer: rule for rule in rules for layer in _layers(rule)}
    held: dict[str, Counterpart] = {}
    for dataset in ours:
        if dataset.startswith(f"/{ROUTER_BIAS}/"):
            layer, kind = dataset.removeprefix("/").removesuffix(".weight"), ""
        else:
            layer, _, kind = dataset.removeprefix("/model/").rpartition(".")
        block = re.fullmatch(r"(.*)\bblocks\.(\d+)\.(.*)", layer)
        number = block[2] if block else ""
        rule = by_layer[f"{block[1]}blocks.{{}}.{block[3]}" if block else layer]
        if isinstance(rule, PackedRule):
            expert_order = ExpertOrder(ours[dataset], rule.gates, rule.transposed, kind == "weight")
            name = rule.theirs.format(number) + rule.suffixes[kind]
            part = TensorPart(dataset, ours[dataset], expert_order=expert_order)
            held[name] = Counterpart(name, expert_order.file_shape, False, (part,))
            continue
        if isinstance(rule, StackRule):
            found = _stacked(rule, number, kind, dataset, ours[dataset])
            held.update((each.name, each) for each in found)
            continue
        if isinstance(rule, HeadRule):
            assert heads is not None, rule
            found = _of_heads(rule, number, kind, TensorPart(dataset, ours[dataset]), heads)
            held.update((each.name, each) for each in found)
            continue
        theirs = rule.theirs.format(number) + (f".{kind}" if kind else "")
        if theirs in held:
            continue
        parts, rows = [], 0
        for place, other in enumerate(rule.ours):
            name = f"/model/{other.format(number)}.{kind}" if kind else dataset
            tensors = len(rule.ours) if rule.joint else 1
            order = None if heads is None else heads.order(other, tensors, place)
            parts.append(TensorPart(name, ours[name], 0 if rule.joint else rows, order=order))
            rows += ours[name][0]
        shape = (rows, *parts[0].shape[1:])
        transposed = rule.transposed and len(shape) == 2
        held[theirs] = Counterpart(theirs, shape[::-1] if transposed else shape, transposed, tuple(parts))
    return list(held.values())


_ROTATED = ("query", "key", "query_norm", "key_norm")
"""Layers of attention whose outputs are rotated."""


def _layers(rule: Rule) -> tuple[str, ...]:
    return rule.ours if isinstance(rule, NameRule) else (rule.ours,)


def _of_heads(
    rule: HeadRule, number: str, kind: str, part: TensorPart, heads: LayerOrders
) -> Iterator[Counterpart]:
    """Yield what holds a vector with the features of all heads."""
    size, order = heads.head_size, heads.order(rule.ours, 1, 0)
    count = part.shape[0] // size
    if rule.theirs.count("{}") == 1:
        whole = (replace(part, order=order),)
        yield Counterpart(f"{rule.theirs.format(number)}.{kind}", (count, size), False, whole, flattened=True)
        return
    for head in range(count):
        own = replace(part, shape=(size,), order=order, start=head * size)
        yield Counterpart(f"{rule.theirs.format(number, head)}.{kind}", (size,), False, (own,))


def _stacked(rule: StackRule, number: str, kind: str, dataset: str, shape: Index) -> Iterator[Counterpart]:
    several = len(rule.theirs) > 1
    inner = shape[2 if several else 1 :]
    for expert, (place, name) in product(range(shape[0]), enumerate(rule.theirs)):
        index = (expert, place) if several else (expert,)
        part = TensorPart(dataset, inner, index=index)
        yield Counterpart(f"{name.format(number, expert)}.{kind}", inner, False, (part,))
