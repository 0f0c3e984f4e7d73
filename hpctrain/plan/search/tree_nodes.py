"""The nodes of the tree of layouts, and what became of those that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.plan.search.least_bytes import ModelActivations
from hpctrain.plan.search.least_seconds import PartSeconds
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.stage_nodes import Ground

_NONE = PartSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Fell:
    """What became of other layouts: how many cannot be, and the first reason of each kind; how many whole
    ones were looked at, and what did not fit into memory, by its least need and by its plan.
    """

    impossible: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def cannot_be(self, problems: Sequence[DeckProblem], deck: Deck) -> bool:
        """Whether there are any."""
        if problems:
            first = problems[0]
            self.impossible[first.key] += 1
            self.reasons.setdefault(first.key, f"{first.key} = {deck.value(first.key)}: {first.sentence}")
        return bool(problems)


@dataclass(frozen=True)
class SplitLayers:
    """How layers are split, and what each kind of layer then takes and keeps of a micro-batch. Of every node
    `bound` are seconds that no layout below it undercuts, `least` the bytes of a mean rank that none does.
    """

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    of_kinds: tuple[Mapping[LayerSizes, LayerSeconds], ...]
    """Of the machine's kinds of node, each by itself."""
    kept: ModelActivations
    needs: Mapping[int, float]
    """Bytes of a rank at the least by numbers of stages that may fit."""
    layers: tuple[LayerSizes, ...]

    @cached_property
    def _of_groups(self) -> dict[tuple[int, ...], tuple[list[PartSeconds], list[float]]]:
        return {}

    def on(self, ground: Ground, group: int) -> tuple[list[PartSeconds], list[float]]:
        """Seconds of the layers before each, and of each, on stages of a group."""
        key = ground.numbers[group]
        if key not in self._of_groups:
            seconds = self.of_kinds[key[0]] if len(key) == 1 else ground.layers(self.layers, group)
            total = {layer: each.total for layer, each in seconds.items()}
            self._of_groups[key] = _prefix(self.layers, seconds), [total[layer] for layer in self.layers]
        return self._of_groups[key]


@dataclass(frozen=True)
class Staged:
    """Layers split so over a number of stages."""

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    layers: SplitLayers
    ground: Ground


@dataclass(frozen=True)
class LayoutNode:
    """All of a layout, with its own seconds by cause once they are known: then the bound is their sum. Where
    its blocks are not split as a run does by itself, `usual` is the layout that has them so.
    """

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    split: tuple[int, ...]
    causes: Mapping[str, float] | None = None
    usual: LayoutNode | None = None


Node = SplitLayers | Staged | LayoutNode


def part_of(passes: LayerSeconds) -> PartSeconds:
    """Seconds of a layer, of all causes."""
    return PartSeconds(
        *(sum(each.values()) for each in (passes.forward, passes.input_gradient, passes.weight_gradient))
    )


def _prefix(layers: Sequence[LayerSizes], seconds: Mapping[LayerSizes, LayerSeconds]) -> list[PartSeconds]:
    """Seconds of the layers before each."""
    of_layers = {layer: part_of(passes) for layer, passes in seconds.items()}
    return list(accumulate((of_layers[layer] for layer in layers), _plus, initial=_NONE))


def _plus(one: PartSeconds, other: PartSeconds) -> PartSeconds:
    return PartSeconds(*(a + b for a, b in zip(one, other, strict=True)))
