"""Nodes of the tree of layouts, and counts of rejected layouts."""

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
from hpctrain.plan.time.stage_nodes import StageNodes

_NO_SECONDS = PartSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RejectedLayouts:
    """Counts of layouts that were rejected.

    Attributes:
        impossible: Number of layouts that are not supported, by key of the deck.
        reasons: First reason for each of these keys.
        counts: Number of complete layouts that were visited ("layouts"), that did not fit by their lower
            bound ("memory"), and by their plan ("memory plan").
    """

    impossible: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def reject(self, problems: Sequence[DeckProblem], deck: Deck) -> bool:
        """Count a layout that has problems. Return True if it has any."""
        if problems:
            first = problems[0]
            self.impossible[first.key] += 1
            self.reasons.setdefault(first.key, f"{first.key} = {deck.value(first.key)}: {first.sentence}")
        return bool(problems)


@dataclass(frozen=True)
class LayerSplitNode:
    """Node whose split of layers over tensor, context and expert ranks is known.

    Attributes:
        bound: Lower bound of the seconds of all layouts below.
        least: Lower bound of the bytes of a mean rank.
        deck: Deck with the split.
        at: Sizes of the layout.
        seconds_by_kind: Seconds of each kind of layer, for each kind of node of the machine.
        activations: Bytes of one micro-batch in the layers.
        needs: Lower bound of the bytes of a rank, by number of stages. It has only numbers of stages that may
            fit.
        layers: Layers of the model.
    """

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    seconds_by_kind: tuple[Mapping[LayerSizes, LayerSeconds], ...]
    activations: ModelActivations
    needs: Mapping[int, float]
    layers: tuple[LayerSizes, ...]

    @cached_property
    def _group_seconds(self) -> dict[tuple[int, ...], tuple[list[PartSeconds], list[float]]]:
        return {}

    def seconds_on(self, nodes: StageNodes, group: int) -> tuple[list[PartSeconds], list[float]]:
        """Return the seconds of the layers before each layer, and of each layer, on a group of nodes."""
        key = nodes.numbers[group]
        if key not in self._group_seconds:
            seconds = (
                self.seconds_by_kind[key[0]] if len(key) == 1 else nodes.seconds_by_layer(self.layers, group)
            )
            total = {layer: each.total for layer, each in seconds.items()}
            self._group_seconds[key] = _prefix(self.layers, seconds), [total[layer] for layer in self.layers]
        return self._group_seconds[key]


@dataclass(frozen=True)
class StageCountNode:
    """Node whose number of stages is known, too.

    Attributes:
        bound: Lower bound of the seconds of all layouts below.
        least: Lower bound of the bytes of a rank.
        deck: Deck with the split and the number of stages.
        at: Sizes of the layout.
        parent: Node above.
        nodes: Kinds of node of the stages.
    """

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    parent: LayerSplitNode
    nodes: StageNodes


@dataclass(frozen=True)
class LayoutNode:
    """Leaf of the tree, a complete layout.

    Attributes:
        bound: Lower bound of its seconds; their sum once `causes` is known.
        least: Lower bound of the bytes of a rank.
        deck: Deck with the layout.
        at: Sizes of the layout.
        split: Number of blocks of each part.
        causes: Seconds of a step by cause; None if they were not computed yet.
        by_flops: Layout with the blocks split by FLOPs, as in a run; None if it is this one.
    """

    bound: float
    least: float
    deck: Deck
    at: LayoutSizes
    split: tuple[int, ...]
    causes: Mapping[str, float] | None = None
    by_flops: LayoutNode | None = None


Node = LayerSplitNode | StageCountNode | LayoutNode


def pass_totals(passes: LayerSeconds) -> PartSeconds:
    """Return the seconds of each pass through a layer, summed over causes."""
    return PartSeconds(
        *(sum(each.values()) for each in (passes.forward, passes.input_gradient, passes.weight_gradient))
    )


def _prefix(layers: Sequence[LayerSizes], seconds: Mapping[LayerSizes, LayerSeconds]) -> list[PartSeconds]:
    """Return the seconds of the layers before each layer."""
    layer_seconds = {layer: pass_totals(passes) for layer, passes in seconds.items()}
    return list(accumulate((layer_seconds[layer] for layer in layers), _plus, initial=_NO_SECONDS))


def _plus(one: PartSeconds, other: PartSeconds) -> PartSeconds:
    return PartSeconds(*(a + b for a, b in zip(one, other, strict=True)))
