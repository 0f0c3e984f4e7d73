"""Names of tensors in Hugging Face's `transformers` and here, and the order of their elements.

Names, layers and tensors of this project are called native. A Hugging Face layer may hold several native
layers, and a native tensor may hold several Hugging Face tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.exchange.hugging_face.expert_order import ExpertOrder, GateOrder

Index = tuple[int, ...]

ROUTER_BIAS = "router/bias"
"""Kind of the bias for choosing experts, which is a state and not a parameter."""


@dataclass(frozen=True)
class NameRule:
    """Hugging Face layer that holds one or several native layers.

    Weights are `<name>.weight`, biases `<name>.bias`. In names, {} is the number of the block.

    Attributes:
        hf_name: Name of the Hugging Face layer.
        native_names: Names of the native layers, which are concatenated along dim 0.
        transposed: True if weights in the file are [in, out].
        interleaved: True if native layers are interleaved per head: the rows of one head of each layer, then
            those of the next head.
    """

    hf_name: str
    native_names: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class StackRule:
    """Hugging Face layers that are stacked in one native weight.

    Attributes:
        hf_names: Names of the layers of one expert. The first {} is the number of the block, the second one
            that of the expert.
        native_name: Name of the native layer, whose weight is [experts, ...], or [experts, layers, ...] if an
            expert has several layers.
    """

    hf_names: tuple[str, ...]
    native_name: str


@dataclass(frozen=True)
class HeadRule:
    """Native vector with the features of all heads, which is a matrix or several vectors in the file.

    Attributes:
        hf_name: Name of a layer whose weight is [heads, features]. With a second {}, the number of the head,
            each head has a layer with a vector.
        native_name: Name of the native layer.
    """

    hf_name: str
    native_name: str


@dataclass(frozen=True)
class PackedRule:
    """Hugging Face tensor that holds a native tensor of all experts in another order.

    Attributes:
        hf_name: Name of the tensor without its suffix; {} is the number of the block.
        native_name: Name of the native layer.
        gates: Order of the rows of gate and up in the file.
        transposed: True if matrices in the file are [in, out].
        suffixes: Suffix of the name, for weights and biases.
    """

    hf_name: str
    native_name: str
    gates: GateOrder
    transposed: bool
    suffixes: Mapping[str, str]


Rule = NameRule | StackRule | HeadRule | PackedRule


class LayerOrders(Protocol):
    """Order of the rows of an architecture's layers in files of `transformers`."""

    @property
    def head_size(self) -> int:
        """Number of features of a head of queries and keys."""

    def order(self, layer: str, layers: int, number: int) -> RowOrder | None:
        """Return the order of the rows of a native layer in the file; None if it is the same.

        Args:
            layer: Name of the native layer.
            layers: Number of native layers that are interleaved per head in the Hugging Face layer.
            number: Number of the native layer among these.
        """


@dataclass(frozen=True)
class HeadOrder:
    """Order of the features of a head in files of `transformers`.

    Here the two halves of a head are rotated, and unrotated features are at the end of both halves. Files
    have all rotated features first, as two halves or as neighboring pairs.

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
        """True if queries and keys have another order in the file than here."""
        return self.interleaved or self.rotated < self.head_size

    @property
    def features(self) -> tuple[int, ...]:
        """Feature of a head in the file, for each feature of a query or key here."""
        half, pairs = self.head_size // 2, self.rotated // 2
        if self.interleaved:
            first, second = range(0, self.rotated, 2), range(1, self.rotated, 2)
        else:
            first, second = range(pairs), range(pairs, self.rotated)
        rest = half - pairs + self.rotated
        return (*first, *range(self.rotated, rest), *second, *range(rest, self.head_size))

    def order(self, layer: str, layers: int, number: int) -> RowOrder | None:
        """Return the order of the rows of a native layer, as `LayerOrders` describes."""
        rotated = layer.rpartition(".")[2] in _ROTATED
        if layers == 1 and not (rotated and self.changes):
            return None
        features = self.features if rotated else tuple(range(self.head_size))
        start = number * self.head_size if layers > 1 else 0
        return RowOrder(tuple(start + each for each in features), layers * self.head_size)


@dataclass(frozen=True)
class LatentOrder:
    """Order of the rows of latent attention in files of `transformers`.

    In a query of the file unrotated features come first, then rotated ones as neighboring pairs. Here the two
    halves of a head are rotated, and unrotated features are at the end of both halves. In the file keys and
    values are interleaved per head.

    Attributes:
        head_size: Features of a query.
        rotated: Number of features that are rotated.
        value_size: Features of a value.
    """

    head_size: int
    rotated: int
    value_size: int

    def order(self, layer: str, layers: int, number: int) -> RowOrder | None:  # noqa: ARG002
        """Return the order of the rows of a native layer, as `LayerOrders` describes."""
        unrotated = self.head_size - self.rotated
        first, second = range(0, self.rotated, 2), range(1, self.rotated, 2)
        match layer.rpartition(".")[2]:
            case "query" | "query_up":
                rotated = [[unrotated + each for each in half] for half in (first, second)]
                middle = unrotated // 2
                features = (*rotated[0], *range(middle), *rotated[1], *range(middle, unrotated))
                return RowOrder(features, self.head_size)
            case "shared_key":
                return RowOrder((*first, *second), self.rotated)
            case "key_up":
                return RowOrder(tuple(range(unrotated)), unrotated + self.value_size)
            case "value_up":
                unit = unrotated + self.value_size
                return RowOrder(tuple(range(unrotated, unit)), unit)
            case _:
                return None


@dataclass(frozen=True)
class RowOrder:
    """Rows of a native tensor in a Hugging Face tensor.

    Attributes:
        features: Row of a head in the file, for each row of a head here.
        unit: Number of rows of a head in the file.
    """

    features: tuple[int, ...]
    unit: int

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the row in the file of each of `count` native rows from `first` on."""
        head, feature = np.divmod(np.arange(first, first + count), len(self.features))
        return np.asarray(head * self.unit + np.asarray(self.features, np.int64)[feature])


@dataclass(frozen=True)
class TensorPart:
    """Part of a Hugging Face tensor that holds a native tensor or a piece of one.

    Attributes:
        dataset: Dataset of the native tensor, "/model/<name>".
        shape: Shape of the native tensor or of its piece.
        first: First row of the part in the Hugging Face tensor, after transposition to [out, in].
        index: Leading index of the piece in the native tensor; () for the complete tensor.
        order: Order of the rows in the file, from `first` on; None if it is the same.
        start: First element of the piece in a native vector that is several Hugging Face tensors; None for
            other tensors.
        expert_order: Order of the elements in a tensor of all experts; None for other tensors.
    """

    dataset: str
    shape: Index
    first: int = 0
    index: Index = ()
    order: RowOrder | None = None
    start: int | None = None
    expert_order: ExpertOrder | None = None

    def rows(self, first: int, count: int) -> slice | NDArray[np.int64]:
        """Return the rows in the Hugging Face tensor of `count` native rows from `first` on."""
        if self.order is None:
            return slice(self.first + first, self.first + first + count)
        return self.first + self.order.rows(first, count)


@dataclass(frozen=True)
class Counterpart:
    """Hugging Face tensor, and the native tensors that it holds.

    Attributes:
        name: Name of the Hugging Face tensor.
        shape: Its shape in the file.
        transposed: True if the file has [in, out].
        parts: Native tensors that it holds, or pieces of these.
        flattened: True if it is a matrix whose rows form one native vector.
    """

    name: str
    shape: Index
    transposed: bool
    parts: tuple[TensorPart, ...]
    flattened: bool = False


def counterparts(
    rules: Sequence[Rule], shapes: Mapping[str, Index], heads: LayerOrders | None = None
) -> list[Counterpart]:
    """Return the Hugging Face tensors that hold the native tensors, each once, in native order.

    Args:
        rules: Name rules of the architecture.
        shapes: Global shapes of the native tensors by dataset.
        heads: Order of the features of heads; None if it is the same.
    """
    by_layer = {layer: rule for rule in rules for layer in _layers(rule)}
    tensors: dict[str, Counterpart] = {}
    for dataset, shape in shapes.items():
        layer, block, kind = _split_name(dataset)
        new: Iterable[Counterpart]
        match by_layer[layer]:
            case PackedRule() as rule:
                new = [_packed(rule, block, kind, dataset, shape)]
            case StackRule() as rule:
                new = _stacked(rule, block, kind, dataset, shape)
            case HeadRule() as rule:
                assert heads is not None, rule
                new = _of_heads(rule, block, kind, TensorPart(dataset, shape), heads)
            case NameRule() as rule:
                new = [_concatenated(rule, block, kind, dataset, shapes, heads)]
        for each in new:
            tensors.setdefault(each.name, each)
    return list(tensors.values())


def _split_name(dataset: str) -> tuple[str, str, str]:
    """Split the name of a native tensor: layer as rules name it, number of its block, and "weight" or "bias".

    The number is "" outside blocks. The last one is "" for a bias for choosing experts, which is a layer of
    its own.
    """
    if dataset.startswith(f"/{ROUTER_BIAS}/"):
        layer, kind = dataset.removeprefix("/").removesuffix(".weight"), ""
    else:
        layer, _, kind = dataset.removeprefix("/model/").rpartition(".")
    match = re.fullmatch(r"(.*)\bblocks\.(\d+)\.(.*)", layer)
    return (f"{match[1]}blocks.{{}}.{match[3]}", match[2], kind) if match else (layer, "", kind)


def _concatenated(
    rule: NameRule,
    block: str,
    kind: str,
    dataset: str,
    shapes: Mapping[str, Index],
    heads: LayerOrders | None,
) -> Counterpart:
    """Return the Hugging Face tensor that holds a native tensor and those that are concatenated with it."""
    parts, rows = [], 0
    for number, native_name in enumerate(rule.native_names):
        name = f"/model/{native_name.format(block)}.{kind}" if kind else dataset
        layers = len(rule.native_names) if rule.interleaved else 1
        order = None if heads is None else heads.order(native_name, layers, number)
        parts.append(TensorPart(name, shapes[name], 0 if rule.interleaved else rows, order=order))
        rows += shapes[name][0]
    shape = (rows, *parts[0].shape[1:])
    transposed = rule.transposed and len(shape) == 2
    hf_name = rule.hf_name.format(block) + (f".{kind}" if kind else "")
    return Counterpart(hf_name, shape[::-1] if transposed else shape, transposed, tuple(parts))


def _packed(rule: PackedRule, block: str, kind: str, dataset: str, shape: Index) -> Counterpart:
    """Return the Hugging Face tensor of all experts that holds a native one."""
    order = ExpertOrder(shape, rule.gates, rule.transposed, kind == "weight")
    part = TensorPart(dataset, shape, expert_order=order)
    return Counterpart(rule.hf_name.format(block) + rule.suffixes[kind], order.file_shape, False, (part,))


_ROTATED = ("query", "key", "query_norm", "key_norm")
"""Layers of attention whose outputs are rotated."""


def _layers(rule: Rule) -> tuple[str, ...]:
    """Return the native layers of a rule."""
    return rule.native_names if isinstance(rule, NameRule) else (rule.native_name,)


def _of_heads(
    rule: HeadRule, block: str, kind: str, part: TensorPart, heads: LayerOrders
) -> Iterator[Counterpart]:
    """Yield the Hugging Face tensors of a native vector with the features of all heads."""
    size, order = heads.head_size, heads.order(rule.native_name, 1, 0)
    count = part.shape[0] // size
    if rule.hf_name.count("{}") == 1:
        parts = (replace(part, order=order),)
        yield Counterpart(f"{rule.hf_name.format(block)}.{kind}", (count, size), False, parts, flattened=True)
        return
    for head in range(count):
        head_part = replace(part, shape=(size,), order=order, start=head * size)
        yield Counterpart(f"{rule.hf_name.format(block, head)}.{kind}", (size,), False, (head_part,))


def _stacked(rule: StackRule, block: str, kind: str, dataset: str, shape: Index) -> Iterator[Counterpart]:
    """Yield the Hugging Face tensors of single experts that a native tensor stacks."""
    has_layers = len(rule.hf_names) > 1
    inner = shape[2 if has_layers else 1 :]
    for expert, (layer, name) in product(range(shape[0]), enumerate(rule.hf_names)):
        index = (expert, layer) if has_layers else (expert,)
        part = TensorPart(dataset, inner, index=index)
        yield Counterpart(f"{name.format(block, expert)}.{kind}", inner, False, (part,))
