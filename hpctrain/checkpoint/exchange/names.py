"""Names of tensors: ours, and those of Hugging Face's `transformers`, where ours may be fused or stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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


@dataclass(frozen=True)
class StackRule:
    """Layers of theirs that are stacked in one weight of ours: for each expert one layer, or several.

    The first {} is the block's number, the second one the expert's. Ours is [experts, ...], or
    [experts, layers, ...] where there are several.
    """

    theirs: tuple[str, ...]
    ours: str


Rule = NameRule | StackRule


@dataclass(frozen=True)
class TensorPart:
    """One of our tensors, or the piece of it at the leading `index`, of `shape`, within one of theirs: rows
    `first` to `first + shape[0]` in our orientation. `dataset` names ours: "/model/<name>".
    """

    dataset: str
    shape: Index
    first: int = 0
    index: Index = ()


@dataclass(frozen=True)
class Counterpart:
    """One tensor of theirs, of `shape` in the file, and ours of which it is made."""

    name: str
    shape: Index
    transposed: bool
    parts: tuple[TensorPart, ...]


def counterparts(rules: Sequence[Rule], ours: Mapping[str, Index]) -> list[Counterpart]:
    """What holds our tensors, given by dataset with global shapes; the same order, each of theirs once."""
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
        if isinstance(rule, StackRule):
            found = _stacked(rule, number, kind, dataset, ours[dataset])
            held.update((each.name, each) for each in found)
            continue
        theirs = rule.theirs.format(number) + (f".{kind}" if kind else "")
        if theirs in held:
            continue
        parts, rows = [], 0
        for other in rule.ours:
            name = f"/model/{other.format(number)}.{kind}" if kind else dataset
            parts.append(TensorPart(name, ours[name], rows))
            rows += ours[name][0]
        shape = (rows, *parts[0].shape[1:])
        transposed = rule.transposed and len(shape) == 2
        held[theirs] = Counterpart(theirs, shape[::-1] if transposed else shape, transposed, tuple(parts))
    return list(held.values())


def _layers(rule: Rule) -> tuple[str, ...]:
    return (rule.ours,) if isinstance(rule, StackRule) else rule.ours


def _stacked(rule: StackRule, number: str, kind: str, dataset: str, shape: Index) -> Iterator[Counterpart]:
    several = len(rule.theirs) > 1
    inner = shape[2 if several else 1 :]
    for expert, (place, name) in product(range(shape[0]), enumerate(rule.theirs)):
        index = (expert, place) if several else (expert,)
        part = TensorPart(dataset, inner, index=index)
        yield Counterpart(f"{name.format(number, expert)}.{kind}", inner, False, (part,))
