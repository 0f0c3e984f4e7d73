"""Layouts as a tree: how layers are split, over how many stages, in which order and with which ZeRO.

Each node knows seconds that no layout below it undercuts; the nearer to a layout, the closer. A layout's own
seconds are those of `plan/time/step_plan.py`.
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
from hpctrain.plan.search.layout_generator import Leaves
from hpctrain.plan.search.least_bytes import ActivationBounds, ModelActivations
from hpctrain.plan.search.least_seconds import KNOWN
from hpctrain.plan.search.memory_needs import Needs, States
from hpctrain.plan.search.partition_choices import NO_ZERO, SplitForms
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import Fell, LayoutNode, Node, SplitLayers, Staged, part_of
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.stage_nodes import Ground, ranks_of_kinds
from hpctrain.plan.time.step_plan import boundary_seconds, step_seconds

_NEUTRAL: Values = NO_ZERO | {
    "layout.data": None,
    "layout.pipeline": 1,
    "layout.schedule": "1f1b",
    "layout.chunks": 1,
    "layout.split": None,
    "layout.local_steps": None,
}
"""What of a layout layers do not ask for: any model has it."""


class Tree:
    """Of a deck on so many ranks of a machine; a rank may hold `limit` bytes, in the mean over those of a
    node of the kind that has most.
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
        self.fell = Fell()
        self._per_node = deck.machine.ranks_per_node or machine.ranks_per_node
        self._bytes = ActivationBounds(self.shape, self.layers, self._per_node)
        self.needs = Needs(deck, budget, self._per_node)
        forms = SplitForms(choices, self.shape, self.layers, self.fell)
        self._coarse = CoarseMemoryBounds(choices, self.needs, self._kinds, forms.usual)
        self._leaves = Leaves(choices, machine, self.needs, forms, self.fell, limit)
        self._schedule = lru_cache(maxsize=16)(_schedule)
        lying = ranks_of_kinds(machine, choices.ranks, self._per_node)
        self._ranks_of_kinds = [ranks for _, ranks in lying]
        self._placed: dict[object, Schedule] = {}
        self._simulated: tuple[Schedule, StageTimes, Simulation] | None = None
        self._ways_of: dict[object, list[States]] = {}

    def roots(self) -> Iterator[SplitLayers]:
        """Every way to split layers whose micro-batches have demand."""
        deck, ranks = self.choices.deck, self.choices.ranks
        for of_layers in self.choices.of_layers():
            neutral = with_values(deck, of_layers | _NEUTRAL)
            if self.fell.cannot_be(layout_problems(neutral), neutral):
                continue
            of_model = ranks // (neutral.layout.tensor * neutral.layout.context)
            counts = self.choices.of_stages(of_model)
            most = max(counts, default=1)
            for of_kept in self.choices.of_kept(self.machine):
                split = with_values(deck, of_layers | of_kept)
                for size in self.choices.of_micro_batches(deck.batch.global_size * most // of_model):
                    whole = with_values(split, {"batch.micro_size": size})
                    at, kept = LayoutSizes.of_axes(whole, _axes(whole), self._per_node), self._bytes.of(whole)
                    needs = {stages: self._coarsely(whole, at, kept, stages) for stages in counts}
                    fitting = {stages: least for stages, least in needs.items() if least <= self.limit}
                    if fitting:
                        yield self._split(whole, at, kept, fitting)
                        continue
                    self.fell.counts["memory"] += 1
                    if whole.memory.activations == "keep":
                        break  # more sequences keep more

    def _coarsely(self, deck: Deck, at: LayoutSizes, kept: ModelActivations, stages: int) -> float:
        """Bytes at the least with so many stages, whether or not these share the batch."""
        data = self.choices.ranks // (at.tensor * at.context * stages)
        passes = max(1, deck.batch.global_size // (at.micro_size * data))
        staged = replace(at, pipeline=stages, data=data, micro_batches=passes)
        by_flops = not self.machine.others or self.choices.given("layout.split")
        return self._coarse.least_bytes(deck, staged, kept, self._ways(staged), by_flops=by_flops)

    def _split(
        self, deck: Deck, at: LayoutSizes, kept: ModelActivations, needs: Mapping[int, float]
    ) -> SplitLayers:
        of_kinds = tuple(
            {layer: layer_seconds(layer, at, kind) for layer in self._kinds} for kind in self.machine.kinds
        )
        fixed = min(kind.fixed for kind in self.machine.kinds)
        # Micro-batches of a rank over its share of the layers: the same for any number of stages.
        share = deck.batch.global_size * at.tensor * at.context / (self.choices.ranks * at.micro_size)
        bound, least = self._micro(of_kinds) * share + fixed, min(needs.values())
        return SplitLayers(bound, least, deck, at, of_kinds, kept, needs, self.layers)

    def _micro(self, of_kinds: Sequence[Mapping[LayerSizes, LayerSeconds]]) -> float:
        """Seconds of a micro-batch in all layers on one stage, or what they are at the least in the mean over
        stages on several kinds of node.

        A rank of kind k takes T_k for all layers, t_kl for one. Stages that take no longer than s do all
        layers, so with their ranks weighted by 1/T: s mean(1/T) >= sum over l of min over k of t_kl/T_k.
        """
        seconds = [{layer: sum(part_of(passes)) for layer, passes in each.items()} for each in of_kinds]
        totals = [sum(many * each[layer] for layer, many in self._kinds.items()) for each in seconds]
        if len(totals) == 1:
            return totals[0]
        known = zip(seconds, totals, self._ranks_of_kinds, strict=True)
        used = [each for each in known if each[2]]
        work = sum(
            many * min(each[layer] / total for each, total, _ in used) for layer, many in self._kinds.items()
        )
        return work / sum(ranks / total for _, total, ranks in used) * self.choices.ranks

    def children(self, node: Node) -> Iterator[Node]:
        """What a node that is no layout yet can become."""
        if isinstance(node, SplitLayers):
            return self._stages(node)
        assert isinstance(node, Staged)
        return self._leaves.of(node, self._ways(node.at), self._message(node.at))

    def _stages(self, node: SplitLayers) -> Iterator[Staged]:
        at, ranks = node.at, self.choices.ranks // (node.at.tensor * node.at.context)
        batch = node.deck.batch.global_size
        for stages, needed in node.needs.items():
            data = ranks // stages
            asked = self.choices.deck.layout.data
            deck = with_values(node.deck, {"layout.pipeline": stages})
            checked = with_values(deck, NO_ZERO)
            if (asked is not None and asked != data) or self.fell.cannot_be(
                world_problems(checked, self.choices.ranks), checked
            ):
                continue
            staged = replace(at, pipeline=stages, data=data, micro_batches=batch // (at.micro_size * data))
            message = self._message(staged)
            waits = 2 * message * (stages - 1) / stages * (self.machine.messages == "blocking")
            bound = node.bound + waits * staged.micro_batches
            ground = Ground(self.machine, staged)
            least = needed
            if self.machine.others and ground.is_one:
                least = self._coarse.least_bytes(deck, staged, node.kept, self._ways(staged), by_flops=True)
                if least > self.limit:
                    self.fell.counts["memory"] += 1
                    continue
            yield Staged(bound, least, deck, staged, node, ground)

    def _ways(self, at: LayoutSizes) -> list[States]:
        """To keep states."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor
        if key not in self._ways_of:
            of_states = self.choices.of_states(at.data_ranks, self.machine)
            self._ways_of[key] = [self.needs.states_of(at, each) for each in of_states]
        return self._ways_of[key]

    def _message(self, at: LayoutSizes) -> float:
        """Seconds from a stage to the next, at the least."""
        if at.pipeline == 1:
            return 0.0
        # Links that no stage has to its next one are not asked for: they may not be known.
        ways = {at.crosses(stage, stage + 1) for stage in range(at.pipeline - 1)}
        hidden = self.layers[0].hidden
        return min(boundary_seconds(hidden, at, kind, way) for kind in self.machine.kinds for way in ways)

    def _order(self, layout: LayoutNode) -> object:
        """What an order that is looked for depends on; None of one that is known."""
        name, at = layout.deck.layout.schedule, layout.at
        if at.pipeline == 1 or name in KNOWN:
            return None
        return name, at.pipeline, at.micro_batches, layout.split, at.recompute

    def schedule(self, layout: LayoutNode) -> Schedule:
        """That of a layout's step."""
        keys, at, order = layout.deck.layout, layout.at, self._order(layout)
        if order is not None:
            if order not in self._placed:
                placement = place_by_flops(layout.deck, self.shape, at.data)
                self._placed[order] = placement.schedule_of(at.micro_batches)
            return self._placed[order]
        return self._schedule(keys.schedule, at.pipeline, at.micro_batches, keys.chunks)

    def seconds(self, layout: LayoutNode) -> Mapping[str, float]:
        """Of a layout's step, by cause."""
        schedule = self.schedule(layout)
        return step_seconds(self.layers, layout.at, schedule, layout.split, self.machine, self._simulate)

    def _simulate(self, schedule: Schedule, times: StageTimes) -> Simulation:
        """As `simulate`; layouts that differ in what follows backward have one simulation."""
        last = self._simulated
        if last is None or last[0] is not schedule or last[1] != times:
            last = self._simulated = schedule, times, simulate(schedule, times)
        return last[2]

    def memory(self, layout: LayoutNode) -> MemoryPlan:
        """What its ranks hold."""
        return self.budget.plan_split(layout.deck, self.schedule(layout), layout.split)


def _schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    if stages == 1:
        return accumulation(micro_batches)
    return generate_schedule(name, stages, micro_batches, chunks if name == "interleaved" else None)


def _axes(deck: Deck) -> Mapping[str, int]:
    """Ranks along each axis, of one data rank of one stage."""
    layout = deck.layout
    sizes = {"tensor": layout.tensor, "context": layout.context, "data": 1, "pipeline": 1}
    return sizes | (
        {"expert": layout.expert, "expert_tensor": layout.expert_tensor} if deck.model.experts else {}
    )
