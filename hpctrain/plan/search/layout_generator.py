"""Generation of the layouts of a model whose split and number of stages are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.deck.check import world_problems
from hpctrain.pipeline.v_schedule import LIMITS
from hpctrain.plan.search.in_flight import CompleteGradients, complete_gradients, in_flight_peaks
from hpctrain.plan.search.least_bytes import PartActivations
from hpctrain.plan.search.least_seconds import PartSeconds, least_seconds
from hpctrain.plan.search.memory_needs import NodeNeeds, States
from hpctrain.plan.search.model_partition import ModelPartition
from hpctrain.plan.search.partition_choices import PartitionChoices
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import LayoutNode, RejectedLayouts, StageCountNode
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.stage_nodes import StageNodes

_ROUNDING = 1e-9


class LayoutGenerator:
    """Generates the layouts below a node of the tree, for each schedule and each choice of ZeRO.

    Layouts that are not supported or do not fit are counted in `rejected`.

    Args:
        choices: Values that the search may choose.
        machine: Rates of the machine.
        needs: Memory of the nodes.
        partitions: Distributions of the layers over stages.
        rejected: Counts of rejected layouts.
        limit: Bytes that a rank may use.
    """

    def __init__(
        self,
        choices: SearchSpace,
        machine: MachineRates,
        needs: NodeNeeds,
        partitions: PartitionChoices,
        rejected: RejectedLayouts,
        limit: float,
    ) -> None:
        self._choices, self._machine, self._needs = choices, machine, needs
        self._partitions, self._rejected, self._limit = partitions, rejected, limit
        self._afters: dict[object, float] = {}

    def layouts(self, node: StageCountNode, states: Sequence[States], message: float) -> Iterator[LayoutNode]:
        """Yield the layouts of a node that may fit, in the order of the choices.

        Args:
            node: Node of the tree.
            states: Functions that return the bytes of parameters and their state, one for each choice of
                ZeRO.
            message: Least seconds of a message from a stage to the next one.
        """
        for schedule, chunks in self._choices.of_schedules(node.at.pipeline, node.at.micro_batches):
            by_flops = self._partitions.by_flops(node.deck, schedule, chunks)
            if by_flops is None or not self._partitions.has_schedule(node, schedule, chunks):
                continue
            first, *alternatives = self._partitions.alternatives(by_flops, node.parent, node.nodes)
            known: dict[LayoutSizes, LayoutNode] = {}
            for layout in self._partition_layouts(node, schedule, first, states, message):
                known[layout.at] = layout if first is by_flops else _split(layout)
                yield known[layout.at]
            for partition in alternatives:
                for layout in self._partition_layouts(node, schedule, partition, states, message):
                    if layout.at in known:
                        yield replace(_split(layout), by_flops=known[layout.at])

    def _partition_layouts(
        self,
        node: StageCountNode,
        schedule: str,
        partition: ModelPartition,
        states: Sequence[States],
        message: float,
    ) -> Iterator[LayoutNode]:
        at, nodes = node.at, node.nodes
        zeros = list(self._choices.of_states(at.data_ranks, self._machine))
        needs = zip(zeros, self._least_bytes(node, schedule, partition, states), strict=True)
        fitting = [(zero, least) for zero, least in needs if least <= self._limit]
        self._rejected.counts["layouts"] += len(zeros)
        self._rejected.counts["memory"] += len(zeros) - len(fitting)
        if not fitting:
            return
        blocking = self._machine.messages == "blocking"
        seconds = self._part_seconds(node, partition, message * blocking)
        sent = 0.0 if blocking else message
        span = least_seconds(schedule, at.pipeline, at.micro_batches, seconds, sent)
        backward = [
            max(seconds[part].input_gradient + seconds[part].weight_gradient for part in stage.numbers)
            for stage in partition.stages
        ]
        values: Values = {"layout.schedule": schedule, "layout.chunks": partition.schedule.chunks}
        for zero, least in fitting:
            deck = with_values(node.deck, zero | values)
            if self._rejected.reject(world_problems(deck, self._choices.ranks), deck):
                continue
            group, optimizer_location = deck.layout.zero_group, deck.memory.optimizer
            if group == "node":
                group = at.data_ranks.ranks_per_node
            layout_at = replace(
                at, zero=deck.layout.zero, zero_group=group or 0, optimizer_location=optimizer_location
            )
            bound = span + self._after(nodes, partition, backward, layout_at)
            # The seconds of the layout are summed in another order, so that they may differ by rounding.
            yield LayoutNode(bound * (1 - _ROUNDING), least, deck, layout_at, partition.split)

    def _part_seconds(
        self, node: StageCountNode, partition: ModelPartition, waited: float
    ) -> list[PartSeconds]:
        """Return the seconds of each part. With blocking messages, it waits `waited` seconds for each."""
        stage_of_part = [
            partition.schedule.stage_and_chunk(part)[0] for part in range(partition.schedule.parts)
        ]
        groups = range(len(node.nodes.groups))
        prefixes = [node.parent.seconds_on(node.nodes, group)[0] for group in groups]
        of_parts = [prefixes[node.nodes.of_stage[stage]] for stage in stage_of_part]
        return [
            PartSeconds(
                prefix[last].forward - prefix[first].forward + waited * ends,
                prefix[last].input_gradient - prefix[first].input_gradient + waited * ends,
                prefix[last].weight_gradient - prefix[first].weight_gradient,
            )
            for prefix, (first, last), ends in zip(of_parts, partition.parts, partition.ends, strict=True)
        ]

    def _least_bytes(
        self, node: StageCountNode, schedule: str, partition: ModelPartition, states: Sequence[States]
    ) -> list[float]:
        """Return lower bounds of the bytes of a rank on the node that needs most.

        There is one for each of `states`.
        """
        at, activations, stages = node.at, node.parent.activations, node.at.pipeline
        parts = [activations.part_activations(kind) for kind in partition.kinds]
        chunks, stage_needs = partition.schedule.chunks, self._needs.stages(at, partition)
        activation_bytes = []
        for number, stage_index, kinds, _ in stage_needs:
            stage_parts = [parts[kind] for kind in kinds]
            states_in_flight = in_flight_peaks(schedule, stages, at.micro_batches, chunks, number)
            peak = max(
                activations.peak_bytes(stage_parts, states_in_flight),
                self._limited_schedule_bytes(schedule, at, stage_parts),
            )
            neighbors = (number > 0) + (number < stages - 1)
            layers = partition.stages[stage_index].counts
            activation_bytes.append(peak + activations.temporary_bytes(layers, neighbors))
        least = []
        for state_bytes in self._state_bytes(
            at, partition, states, complete_gradients(schedule, stages, at.micro_batches)
        ):
            both = zip(stage_needs, activation_bytes, strict=True)
            stage_bytes = [state_bytes[stage.stage_index] + size for stage, size in both]
            least.append(self._needs.largest(at, stage_needs, stage_bytes))
        return least

    def _limited_schedule_bytes(
        self, schedule: str, at: LayoutSizes, parts: Sequence[PartActivations]
    ) -> float:
        """Return the bytes that a schedule with a limit of memory may keep; 0 for others.

        A run generates such a schedule from its own times, so it may keep more than the schedule of a plan.
        """
        if schedule not in LIMITS or at.pipeline == 1:
            return 0.0
        micro_batches = min(2 * LIMITS[schedule](at.pipeline), 2 * at.micro_batches)
        return micro_batches * min(part.stored - part.head for part in parts)

    def _state_bytes(
        self,
        at: LayoutSizes,
        partition: ModelPartition,
        states: Sequence[States],
        complete: CompleteGradients,
    ) -> list[list[float]]:
        """Return the bytes of parameters and their state of each stage, for each function of `states`."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor, complete
        if key not in partition.memo:
            elements = [stage.elements(at, partition.kinds) for stage in partition.stages]
            partition.memo[key] = [[states(each, complete) for each in elements] for states in states]
        state_bytes: list[list[float]] = partition.memo[key]
        return state_bytes

    def _after(
        self, nodes: StageNodes, partition: ModelPartition, backward: Sequence[float], at: LayoutSizes
    ) -> float:
        """Return the least seconds of a stage after its backward passes.

        If stages are on different kinds of node, all stages wait for the slowest.
        """

        def of_stages() -> Iterator[float]:
            for stage, hiding in zip(partition.stages, backward, strict=True):
                yield sum(nodes.seconds_after_backward(stage.layers, hiding, at, stage.number).values())

        if not nodes.has_one_kind:
            return max(of_stages())
        ranks = at.tensor, at.context, at.data, at.expert, at.expert_tensor, at.sequence_parallel
        reductions = at.micro_batches if at.zero == 3 or at.sliced else 1
        hiding = tuple(backward) if self._machine.overlap else ()
        # All other values that change the seconds are the same in a tree. Ids of partitions are unique,
        # since `PartitionChoices` keeps the partitions.
        key = id(partition), hiding, ranks, reductions, at.zero, at.zero_group, at.optimizer_location
        if key not in self._afters:
            self._afters[key] = min(of_stages())
        return self._afters[key]


def _split(layout: LayoutNode) -> LayoutNode:
    """Return the layout with its split in the deck."""
    return replace(layout, deck=with_values(layout.deck, {"layout.split": layout.split}))
