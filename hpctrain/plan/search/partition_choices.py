"""Choice of the split of blocks over the parts of a schedule: by FLOPs, as in a run, or by seconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hpctrain.costs.balanced_split import split_by_stage_times
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schedules import SCHEDULE_NAMES
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.layout import layout_problems
from hpctrain.engine.layout.layer_placement import split_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.deck_schedule import outline_schedule, read_schedule_file, schedule_builder
from hpctrain.pipeline.split import split_layers
from hpctrain.plan.search.model_partition import ModelPartition
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import LayerSplitNode, RejectedLayouts, StageCountNode
from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.stage_nodes import StageNodes

LEAST_GAIN = 0.005
"""Share of the longest stage and of the step that a split by seconds must save."""

NO_ZERO: Values = {
    "layout.zero": 0,
    "layout.zero_group": None,
    "memory.keep_gathered": 0,
    "memory.accumulate": "whole",
}
"""Values of keys without ZeRO."""


class PartitionChoices:
    """Distributions of the layers of a model over stages. Unsupported schedules are counted in `rejected`.

    Args:
        choices: Values that the search may choose.
        shape: Sizes of the model.
        layers: Layers of the model.
        rejected: Counts of rejected layouts.
    """

    def __init__(
        self, choices: SearchSpace, shape: ModelShape, layers: Sequence[LayerSizes], rejected: RejectedLayouts
    ) -> None:
        self._choices, self._shape, self._layers, self._rejected = choices, shape, layers, rejected
        self._by_flops: dict[object, ModelPartition | None] = {}
        self._splits: dict[object, ModelPartition] = {}

    def by_flops(self, deck: Deck, schedule: str, chunks: int) -> ModelPartition | None:
        """Return the model with its blocks split by FLOPs; None if the schedule is not supported."""
        key = deck.layout.pipeline, chunks, schedule, deck.memory.recompute
        if key not in self._by_flops:
            values: Values = {"layout.schedule": schedule, "layout.chunks": chunks}
            without_zero = with_values(deck, values | NO_ZERO)
            if self._rejected.reject(layout_problems(without_zero), without_zero):
                self._by_flops[key] = None
            else:
                outline = outline_schedule(without_zero)
                split = split_by_flops(without_zero, self._shape, outline)
                self._by_flops[key] = ModelPartition.of(
                    outline, split, self._layers, [0] * outline.stage_count
                )
        return self._by_flops[key]

    def alternatives(
        self, by_flops: ModelPartition, layers: LayerSplitNode, nodes: StageNodes
    ) -> list[ModelPartition]:
        """Return the splits to compare.

        With several kinds of node, it is the split by seconds. Otherwise it is the split by FLOPs, and that
        by seconds if it makes the longest stage clearly shorter.

        Args:
            by_flops: Model split by FLOPs.
            layers: Node of the tree.
            nodes: Kinds of node of the stages.
        """
        schedule = by_flops.schedule
        if schedule.parts == 1 or self._choices.is_set("layout.split"):
            return [by_flops]
        if not nodes.has_one_kind:
            other = self._by_seconds(schedule, layers, nodes)
            return [by_flops if other.split == by_flops.split else other]
        seconds = layers.seconds_on(nodes, 0)[1]
        longest = (1 - LEAST_GAIN) * _longest(seconds, by_flops.split, schedule)
        if longest <= _least_longest(seconds, schedule.stage_count):
            return [by_flops]
        other = self._by_seconds(schedule, layers, nodes)
        return [by_flops, other] if _longest(seconds, other.split, schedule) < longest else [by_flops]

    def _by_seconds(self, schedule: Schedule, layers: LayerSplitNode, nodes: StageNodes) -> ModelPartition:
        times = [layers.seconds_on(nodes, group)[1] for group in range(len(nodes.groups))]
        split = tuple(split_by_stage_times([times[group] for group in nodes.of_stage], schedule))
        key = schedule.stage_count, schedule.chunks, schedule.placement, split, tuple(nodes.of_stage)
        if key not in self._splits:
            self._splits[key] = ModelPartition.of(schedule, split, self._layers, nodes.of_stage)
        return self._splits[key]

    def has_schedule(self, node: StageCountNode, schedule: str, chunks: int) -> bool:
        """Return False if a schedule from a file does not fit the layout."""
        if schedule in SCHEDULE_NAMES:
            return True
        deck = with_values(node.deck, {"layout.schedule": schedule, "layout.chunks": chunks})
        stages = read_schedule_file(deck).stage_count
        if node.at.pipeline == 1 and stages > 1:  # a run would not look into the file
            problem = f"has {stages} stages, expected layout.pipeline = 1"
            return not self._rejected.reject([DeckProblem("layout.schedule", problem)], deck)
        try:
            schedule_builder(deck, node.at.data)
        except HpctrainError as error:
            return not self._rejected.reject(
                [DeckProblem("layout.schedule", error.problems[0].split(": ", 2)[-1])], deck
            )
        return True


def _longest(seconds: Sequence[float], split: Sequence[int], schedule: Schedule) -> float:
    """Return the seconds of the longest stage."""
    stages = [0.0] * schedule.stage_count
    for part, part_seconds in enumerate(split_layers(seconds, split)):
        stages[schedule.stage_and_chunk(part)[0]] += sum(part_seconds)
    return max(stages)


def _least_longest(seconds: Sequence[float], stages: int) -> float:
    """Return a lower bound of the longest stage of any split.

    It is the mean. It is also the smallest number of blocks that some stage must have, with the embedding or
    the output layer if no stage can have fewer blocks.
    """
    _, *blocks, _ = seconds
    fewest, least = ceil(len(blocks) / stages), min(blocks)
    part_seconds = fewest * least
    if len(blocks) == fewest * stages:
        part_seconds += min(least, max(seconds[0], seconds[-1]))
    return max(sum(seconds) / stages, part_seconds)
