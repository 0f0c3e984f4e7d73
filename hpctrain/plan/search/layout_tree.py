"""Tree of layouts: split of the layers, number of stages, schedule, and ZeRO.

Each node has a lower bound of the seconds of all layouts below it, which becomes tighter towards the leaves.
The seconds of a layout are those of `plan/time/step_plan.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from hpctrain.deck.check import world_problems
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.layout import layout_problems
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import Simulation, StageTimes, simulate
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.search.coarse_bounds import CoarseMemoryBounds
from hpctrain.plan.search.layout_generator import LayoutGenerator
from hpctrain.plan.search.least_bytes import ActivationBounds, ModelActivations
from hpctrain.plan.search.least_seconds import KNOWN
from hpctrain.plan.search.memory_needs import NodeNeeds, States
from hpctrain.plan.search.partition_choices import NO_ZERO, PartitionChoices
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import (
    LayerSplitNode,
    LayoutNode,
    Node,
    RejectedLayouts,
    StageCountNode,
    pass_totals,
)
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.stage_nodes import StageNodes, ranks_of_kinds
from hpctrain.plan.time.step_plan import boundary_seconds, step_seconds

_NEUTRAL: Values = NO_ZERO | {
    "layout.data": None,
    "layout.pipeline": 1,
    "layout.schedule": "1f1b",
    "layout.chunks": 1,
    "layout.split": None,
    "layout.local_steps": None,
}
"""Values of the keys of a layout that do not concern layers. Every model supports them."""


class LayoutTree:
    """Tree of the layouts of a deck.

    Args:
        choices: Values that the search may choose.
        machine: Rates of the machine.
        budget: Memory of the nodes.
        limit: Bytes that a rank may use, as the mean over a node of the kind with most memory.
    """

    def __init__(
        self, choices: SearchSpace, machine: MachineRates, budget: MemoryBudget, limit: float
    ) -> None:
        self.choices, self.machine, self.budget = choices, machine, budget
        self.limit = limit
        deck = choices.deck
        self.shape = ModelShape.of(deck, budget.vocabulary)
        self.layers = layer_sizes(self.shape, tuple(deck.model.frozen))
        self._kinds = Counter(self.layers)
        self.rejected = RejectedLayouts()
        self._per_node = deck.machine.ranks_per_node or machine.ranks_per_node
        self._bytes = ActivationBounds(self.shape, self.layers, self._per_node)
        self.needs = NodeNeeds(deck, budget, self._per_node)
        forms = PartitionChoices(choices, self.shape, self.layers, self.rejected)
        self._coarse = CoarseMemoryBounds(choices, self.needs, self._kinds, forms.by_flops)
        self._generator = LayoutGenerator(choices, machine, self.needs, forms, self.rejected, limit)
        self._schedule = lru_cache(maxsize=16)(_schedule)
        ranks_by_kind = ranks_of_kinds(machine, choices.ranks, self._per_node)
        self._ranks_of_kinds = [ranks for _, ranks in ranks_by_kind]
        self._generated: dict[object, Schedule] = {}
        self._simulated: tuple[Schedule, StageTimes, Simulation] | None = None
        self._cached_state_functions: dict[object, list[States]] = {}

    def roots(self) -> Iterator[LayerSplitNode]:
        """Yield the splits of layers whose micro-batches may fit."""
        deck, ranks = self.choices.deck, self.choices.ranks
        for of_layers in self.choices.of_layers():
            neutral = with_values(deck, of_layers | _NEUTRAL)
            if self.rejected.reject(layout_problems(neutral), neutral):
                continue
            model_ranks = ranks // (neutral.layout.tensor * neutral.layout.context)
            counts = self.choices.of_stages(model_ranks)
            most = max(counts, default=1)
            for of_activations in self.choices.of_activations(self.machine):
                split = with_values(deck, of_layers | of_activations)
                for size in self.choices.of_micro_batches(deck.batch.global_size * most // model_ranks):
                    split_deck = with_values(split, {"batch.micro_size": size})
                    at, activations = (
                        LayoutSizes.of_axes(split_deck, _axes(split_deck), self._per_node),
                        self._bytes.of(split_deck),
                    )
                    needs = {
                        stages: self._coarse_bytes(split_deck, at, activations, stages) for stages in counts
                    }
                    fitting = {stages: least for stages, least in needs.items() if least <= self.limit}
                    if fitting:
                        yield self._split(split_deck, at, activations, fitting)
                        continue
                    self.rejected.counts["memory"] += 1
                    if split_deck.memory.activations == "keep":
                        break  # more sequences keep more

    def _coarse_bytes(self, deck: Deck, at: LayoutSizes, activations: ModelActivations, stages: int) -> float:
        """Return a lower bound of the bytes of a rank for a number of stages.

        The number of stages need not divide the batch.
        """
        data = self.choices.ranks // (at.tensor * at.context * stages)
        passes = max(1, deck.batch.global_size // (at.micro_size * data))
        staged = replace(at, pipeline=stages, data=data, micro_batches=passes)
        by_flops = not self.machine.others or self.choices.is_set("layout.split")
        return self._coarse.least_bytes(
            deck, staged, activations, self._state_functions(staged), by_flops=by_flops
        )

    def _split(
        self, deck: Deck, at: LayoutSizes, activations: ModelActivations, needs: Mapping[int, float]
    ) -> LayerSplitNode:
        seconds_by_kind = tuple(
            {layer: layer_seconds(layer, at, kind) for layer in self._kinds} for kind in self.machine.kinds
        )
        fixed = min(kind.fixed for kind in self.machine.kinds)
        # Micro-batches of a data rank, divided by the number of stages: the same for any number of stages.
        share = deck.batch.global_size * at.tensor * at.context / (self.choices.ranks * at.micro_size)
        bound, least = self._micro(seconds_by_kind) * share + fixed, min(needs.values())
        return LayerSplitNode(bound, least, deck, at, seconds_by_kind, activations, needs, self.layers)

    def _micro(self, seconds_by_kind: Sequence[Mapping[LayerSizes, LayerSeconds]]) -> float:
        """Return a lower bound of the seconds of a micro-batch in all layers, as the mean over stages.

        A rank of kind k takes T_k for all layers, and t_kl for layer l. Stages that take no longer than s do
        all layers, so with their ranks weighted by 1/T: s mean(1/T) >= sum over l of min over k of t_kl/T_k.
        """
        seconds = [
            {layer: sum(pass_totals(passes)) for layer, passes in each.items()} for each in seconds_by_kind
        ]
        totals = [sum(count * each[layer] for layer, count in self._kinds.items()) for each in seconds]
        if len(totals) == 1:
            return totals[0]
        known = zip(seconds, totals, self._ranks_of_kinds, strict=True)
        used = [each for each in known if each[2]]
        work = sum(
            count * min(each[layer] / total for each, total, _ in used)
            for layer, count in self._kinds.items()
        )
        return work / sum(ranks / total for _, total, ranks in used) * self.choices.ranks

    def children(self, node: Node) -> Iterator[Node]:
        """Return the children of a node that is not a leaf."""
        if isinstance(node, LayerSplitNode):
            return self._stages(node)
        assert isinstance(node, StageCountNode)
        return self._generator.layouts(node, self._state_functions(node.at), self._message(node.at))

    def _stages(self, node: LayerSplitNode) -> Iterator[StageCountNode]:
        at, ranks = node.at, self.choices.ranks // (node.at.tensor * node.at.context)
        batch = node.deck.batch.global_size
        for stages, needed in node.needs.items():
            data = ranks // stages
            deck_data = self.choices.deck.layout.data
            deck = with_values(node.deck, {"layout.pipeline": stages})
            checked = with_values(deck, NO_ZERO)
            if (deck_data is not None and deck_data != data) or self.rejected.reject(
                world_problems(checked, self.choices.ranks), checked
            ):
                continue
            staged = replace(at, pipeline=stages, data=data, micro_batches=batch // (at.micro_size * data))
            message = self._message(staged)
            message_seconds = 2 * message * (stages - 1) / stages * (self.machine.messages == "blocking")
            bound = node.bound + message_seconds * staged.micro_batches
            nodes = StageNodes(self.machine, staged)
            least = needed
            if self.machine.others and nodes.has_one_kind:
                least = self._coarse.least_bytes(
                    deck, staged, node.activations, self._state_functions(staged), by_flops=True
                )
                if least > self.limit:
                    self.rejected.counts["memory"] += 1
                    continue
            yield StageCountNode(bound, least, deck, staged, node, nodes)

    def _state_functions(self, at: LayoutSizes) -> list[States]:
        """Return the functions for the bytes of parameters and their state, one for each choice of ZeRO."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor
        if key not in self._cached_state_functions:
            of_states = self.choices.of_states(at.data_ranks, self.machine)
            self._cached_state_functions[key] = [self.needs.state_function(at, each) for each in of_states]
        return self._cached_state_functions[key]

    def _message(self, at: LayoutSizes) -> float:
        """Return the least seconds of a message from a stage to the next one."""
        if at.pipeline == 1:
            return 0.0
        # Only links between consecutive stages are used, since the rates of other links may be missing.
        crossings = {at.crosses(stage, stage + 1) for stage in range(at.pipeline - 1)}
        hidden, kinds = self.layers[0].hidden, self.machine.kinds
        return min(boundary_seconds(hidden, at, kind, crosses) for kind in kinds for crosses in crossings)

    def _order(self, layout: LayoutNode) -> object:
        """Return a key of the order of a generated schedule; None for schedules with a closed form."""
        name, at = layout.deck.layout.schedule, layout.at
        if at.pipeline == 1 or name in KNOWN:
            return None
        return name, at.pipeline, at.micro_batches, layout.split, at.recompute

    def schedule(self, layout: LayoutNode) -> Schedule:
        """Return the schedule of a layout."""
        keys, at, order = layout.deck.layout, layout.at, self._order(layout)
        if order is not None:
            if order not in self._generated:
                placement = place_by_flops(layout.deck, self.shape, at.data)
                self._generated[order] = placement.schedule_of(at.micro_batches)
            return self._generated[order]
        return self._schedule(keys.schedule, at.pipeline, at.micro_batches, keys.chunks)

    def seconds(self, layout: LayoutNode) -> Mapping[str, float]:
        """Return the seconds of a step of a layout, by cause."""
        schedule = self.schedule(layout)
        return step_seconds(self.layers, layout.at, schedule, layout.split, self.machine, self._simulate)

    def _simulate(self, schedule: Schedule, times: StageTimes) -> Simulation:
        """Return `simulate` of a schedule.

        Layouts that differ only after the backward passes share the result.
        """
        last = self._simulated
        if last is None or last[0] is not schedule or last[1] != times:
            last = self._simulated = schedule, times, simulate(schedule, times)
        return last[2]

    def memory(self, layout: LayoutNode) -> MemoryPlan:
        """Return the memory plan of a layout."""
        return self.budget.plan_split(layout.deck, self.schedule(layout), layout.split)


def _schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    if stages == 1:
        return accumulation(micro_batches)
    return generate_schedule(name, stages, micro_batches, chunks if name == "interleaved" else None)


def _axes(deck: Deck) -> Mapping[str, int]:
    """Return the number of ranks along each axis, for one data rank and one stage."""
    layout = deck.layout
    sizes = {"tensor": layout.tensor, "context": layout.context, "data": 1, "pipeline": 1}
    return sizes | (
        {"expert": layout.expert, "expert_tensor": layout.expert_tensor} if deck.model.experts else {}
    )
