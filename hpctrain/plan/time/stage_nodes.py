"""On which kinds of node the stages of a pipeline lie, and what follows from it for their seconds.

Ranks fill nodes in order, and stages are made of ranks that follow each other. Ranks of a stage wait for each
other in every layer, so one that lies on several kinds of node goes by the slowest in each pass; what is sent
between kinds, by the slower link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import HpctrainError
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, layer_seconds
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import LinkRates, MachineRates
from hpctrain.plan.time.reduction_seconds import after_backward

_NOT_TIMED = ("name", "source", "nodes", "memory", "others", "date", "processor", "ranks", "spread")


class StageNodes:
    """The kinds of node under a pipeline's stages: `of_stage` has the number of each one's `groups`, and a
    group the kinds that stages of it lie on, alone or together, `numbers` their places in the machine. Kinds
    that are as fast are one.

    HpctrainError where a machine has fewer nodes than the ranks need.
    """

    def __init__(self, machine: MachineRates, at: LayoutSizes) -> None:
        self.at = at
        self.groups: list[tuple[MachineRates, ...]] = [(machine,)]
        self.numbers: list[tuple[int, ...]] = [(0,)]
        self.of_stage = [0] * at.pipeline
        self._joined: dict[tuple[int, int], tuple[MachineRates, ...]] = {}
        if not machine.others:
            return
        found, ends = dict[tuple[int, ...], int](), list[int]()
        for _, ranks in ranks_of_kinds(machine, at.pipeline * at.stage_ranks, at.ranks_per_node):
            ends.append(ranks + (ends[-1] if ends else 0))
        alike = _alike(machine.kinds)
        begins = [0, *ends[:-1]]
        for stage in range(at.pipeline):
            first, last = stage * at.stage_ranks, (stage + 1) * at.stage_ranks
            under = [kind for kind, begin in enumerate(begins) if begin < last and first < ends[kind]]
            kinds = tuple(dict.fromkeys(alike[kind] for kind in under))
            self.of_stage[stage] = found.setdefault(kinds, len(found))
        self.numbers = list(found)
        self.groups = [_together([machine.kinds[kind] for kind in kinds]) for kinds in found]

    @property
    def is_one(self) -> bool:
        """Whether all ranks lie on nodes of one kind."""
        return len(self.groups) == 1 and len(self.groups[0]) == 1

    def layers(self, layers: Sequence[LayerSizes], group: int) -> dict[LayerSizes, LayerSeconds]:
        """Seconds of the passes of each of some layers, on stages of a group."""
        found = {}
        for layer in dict.fromkeys(layers):
            every = [layer_seconds(layer, self.at, kind) for kind in self.groups[group]]
            found[layer] = LayerSeconds(
                max((each.forward for each in every), key=_total),
                max((each.input_gradient for each in every), key=_total),
                max((each.weight_gradient for each in every), key=_total),
            )
        return found

    def links(self, one: int, other: int) -> tuple[MachineRates, ...]:
        """The kinds that two stages lie on, with links as slow as those of the slowest."""
        key = self.of_stage[one], self.of_stage[other]
        if key not in self._joined:
            kinds = {id(kind): kind for group in key for kind in self.groups[group]}
            self._joined[key] = _together(list(kinds.values()))
        return self._joined[key]

    def after(
        self, held: Sequence[LayerSizes], backward: float, at: LayoutSizes, stage: int
    ) -> dict[str, float]:
        """As `after_backward`, of the kind that takes longest, for a stage of what may be another ZeRO."""
        ends = () if self.is_one else self.links(0, -1)
        group = self.groups[self.of_stage[stage]]
        return max((after_backward(held, backward, at, kind, ends) for kind in group), key=_total)


def ranks_of_kinds(machine: MachineRates, ranks: int, ranks_per_node: int) -> list[tuple[MachineRates, int]]:
    """How many of so many ranks lie on nodes of each kind, none of those that are not reached.

    HpctrainError where there are fewer nodes than they need.
    """
    if not machine.others and machine.nodes is None:
        return [(machine, ranks)]
    left, found = ranks, list[tuple[MachineRates, int]]()
    for kind in machine.kinds:
        here = min(left, (kind.nodes or 0) * ranks_per_node)
        found.append((kind, here))
        left -= here
    if left:
        nodes = sum(kind.nodes or 0 for kind in machine.kinds)
        of_kinds = ", ".join(f"{kind.nodes} of {kind.name}" for kind in machine.kinds)
        needed = f"{ranks} ranks with {ranks_per_node} per node require {-(-ranks // ranks_per_node)}"
        shown = f" ({of_kinds})" if machine.others else ""
        raise HpctrainError(f"{machine.name}: has {nodes} nodes{shown}, but {needed}")
    return found


def _alike(kinds: Sequence[MachineRates]) -> list[int]:
    """Of each kind, the first that takes as long for everything."""
    rates = [kind.model_dump(exclude=set(_NOT_TIMED)) for kind in kinds]
    return [rates.index(each) for each in rates]


def _together(kinds: Sequence[MachineRates]) -> tuple[MachineRates, ...]:
    """These, each with the slowest of their links between nodes."""
    if len(kinds) == 1:
        return tuple(kinds)
    between = _slowest([kind.between for kind in kinds])
    return tuple(kind.model_copy(update={"between": between, "others": ()}) for kind in kinds)


def _slowest(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """As slow as each of them; None where one is not known."""
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return None
    bandwidths, latencies = [link.bandwidth for link in known], [link.latency for link in known]
    return LinkRates(bandwidth=min(bandwidths), latency=max(latencies))


def _total(causes: Mapping[str, float]) -> float:
    return sum(causes.values())
