"""Kinds of node of the stages of a pipeline, and what follows for their seconds.

Ranks fill nodes in order, and the ranks of a stage are consecutive. They wait for each other in every layer.
So each pass of a stage on several kinds of node takes as long as on the slowest of them. Messages between two
kinds take as long as on the slower link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import HpctrainError
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, layer_seconds
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import LinkRates, MachineRates
from hpctrain.plan.time.reduction_seconds import after_backward

_NOT_TIMED = ("name", "source", "nodes", "memory", "others", "date", "processor", "ranks", "spread")
"""Fields of a machine that change no time."""


class StageNodes:
    """Kinds of node of the stages of a pipeline. Kinds that are equally fast count as one.

    Args:
        machine: Rates of the machine.
        at: Sizes of the layout.

    Attributes:
        at: Sizes of the layout.
        groups: Different sets of kinds of node that stages have.
        numbers: Indices in `MachineRates.kinds` of the kinds of each group.
        of_stage: Index in `groups` of each stage.

    Raises:
        HpctrainError: The machine has too few nodes.
    """

    def __init__(self, machine: MachineRates, at: LayoutSizes) -> None:
        self.at = at
        self.groups: list[tuple[MachineRates, ...]] = [(machine,)]
        self.numbers: list[tuple[int, ...]] = [(0,)]
        self.of_stage = [0] * at.pipeline
        self._joined: dict[tuple[int, int], tuple[MachineRates, ...]] = {}
        if not machine.others:
            return
        result, ends = dict[tuple[int, ...], int](), list[int]()
        for _, ranks in ranks_of_kinds(machine, at.pipeline * at.stage_ranks, at.ranks_per_node):
            ends.append(ranks + (ends[-1] if ends else 0))
        first_equal = _equal_kinds(machine.kinds)
        starts = [0, *ends[:-1]]
        for stage in range(at.pipeline):
            first, last = stage * at.stage_ranks, (stage + 1) * at.stage_ranks
            stage_kinds = [kind for kind, begin in enumerate(starts) if begin < last and first < ends[kind]]
            kinds = tuple(dict.fromkeys(first_equal[kind] for kind in stage_kinds))
            self.of_stage[stage] = result.setdefault(kinds, len(result))
        self.numbers = list(result)
        self.groups = [_together([machine.kinds[kind] for kind in kinds]) for kinds in result]

    @property
    def has_one_kind(self) -> bool:
        """True if all ranks are on nodes of one kind."""
        return len(self.groups) == 1 and len(self.groups[0]) == 1

    def seconds_by_layer(self, layers: Sequence[LayerSizes], group: int) -> dict[LayerSizes, LayerSeconds]:
        """Return the seconds of the passes of each layer, on stages of a group."""
        result = {}
        for layer in dict.fromkeys(layers):
            by_kind = [layer_seconds(layer, self.at, kind) for kind in self.groups[group]]
            result[layer] = LayerSeconds(
                max((each.forward for each in by_kind), key=_total),
                max((each.input_gradient for each in by_kind), key=_total),
                max((each.weight_gradient for each in by_kind), key=_total),
            )
        return result

    def links(self, one: int, other: int) -> tuple[MachineRates, ...]:
        """Return the kinds of node of two stages, with the slowest of their links."""
        key = self.of_stage[one], self.of_stage[other]
        if key not in self._joined:
            kinds = {id(kind): kind for group in key for kind in self.groups[group]}
            self._joined[key] = _together(list(kinds.values()))
        return self._joined[key]

    def seconds_after_backward(
        self, stage_layers: Sequence[LayerSizes], backward: float, at: LayoutSizes, stage: int
    ) -> dict[str, float]:
        """Return `after_backward` on the slowest kind of node of a stage.

        Args:
            stage_layers: Layers of the stage.
            backward: Seconds of the last backward pass.
            at: Sizes of the layout, whose ZeRO may differ.
            stage: Number of the stage.
        """
        ends = () if self.has_one_kind else self.links(0, -1)
        group = self.groups[self.of_stage[stage]]
        return max((after_backward(stage_layers, backward, at, kind, ends) for kind in group), key=_total)


def ranks_of_kinds(machine: MachineRates, ranks: int, ranks_per_node: int) -> list[tuple[MachineRates, int]]:
    """Return the number of ranks on each kind of node. Kinds without ranks have 0.

    Raises:
        HpctrainError: The machine has too few nodes.
    """
    if not machine.others and machine.nodes is None:
        return [(machine, ranks)]
    remaining, result = ranks, list[tuple[MachineRates, int]]()
    for kind in machine.kinds:
        kind_ranks = min(remaining, (kind.nodes or 0) * ranks_per_node)
        result.append((kind, kind_ranks))
        remaining -= kind_ranks
    if remaining:
        nodes = sum(kind.nodes or 0 for kind in machine.kinds)
        kind_counts = ", ".join(f"{kind.nodes} of {kind.name}" for kind in machine.kinds)
        needed = f"{ranks} ranks with {ranks_per_node} per node require {-(-ranks // ranks_per_node)}"
        description = f" ({kind_counts})" if machine.others else ""
        raise HpctrainError(f"{machine.name}: has {nodes} nodes{description}, but {needed}")
    return result


def _equal_kinds(kinds: Sequence[MachineRates]) -> list[int]:
    """Return, for each kind of node, the number of the first kind that is equally fast."""
    rates = [kind.model_dump(exclude=set(_NOT_TIMED)) for kind in kinds]
    return [rates.index(each) for each in rates]


def _together(kinds: Sequence[MachineRates]) -> tuple[MachineRates, ...]:
    """Return kinds of node, each with the slowest of their links between nodes."""
    if len(kinds) == 1:
        return tuple(kinds)
    between = _slowest([kind.between for kind in kinds])
    return tuple(kind.model_copy(update={"between": between, "others": ()}) for kind in kinds)


def _slowest(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """Return a link that is as slow as each of the links; None if one of them is unknown."""
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return None
    bandwidths, latencies = [link.bandwidth for link in known], [link.latency for link in known]
    return LinkRates(bandwidth=min(bandwidths), latency=max(latencies))


def _total(causes: Mapping[str, float]) -> float:
    return sum(causes.values())
