"""Distribution of the layers of a model over the parts of a pipeline schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import split_layers
from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.step_plan import waits_of


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a rank of a stage.

    Attributes:
        experts: Parameters of experts.
        others: All other parameters.
        blocks: Those of `others` that are in blocks.
        gathered: Those of the blocks that are gathered at the same time.
        second_gradients: Parameters of tables that have a second gradient.
    """

    experts: float
    others: float
    blocks: float = 0.0
    gathered: float = 0.0
    second_gradients: float = 0.0


@dataclass(frozen=True)
class PartLayers:
    """Layers of a part of the model.

    Attributes:
        blocks: Blocks in their order.
        counts: Different blocks and their numbers.
        pairs: Different pairs of consecutive blocks.
        first: The embedding; None if the part has none.
        last: The output layer; None if the part has none.
    """

    blocks: tuple[LayerSizes, ...]
    counts: tuple[tuple[LayerSizes, int], ...]
    pairs: tuple[tuple[LayerSizes, LayerSizes], ...]
    first: LayerSizes | None
    last: LayerSizes | None

    @staticmethod
    def of(layers: Sequence[LayerSizes]) -> PartLayers:
        """Return the part that has these layers."""
        blocks = tuple(layer for layer in layers if layer.is_block)
        ends = {layer.is_last: layer for layer in layers if not layer.is_block}
        pairs = {(id(one), id(other)): (one, other) for one, other in pairwise(blocks)}
        return PartLayers(
            blocks, _count_layers(blocks), tuple(pairs.values()), ends.get(False), ends.get(True)
        )

    def gathered(self, at: LayoutSizes) -> float:
        """Return the largest number of parameters of a block and the next one, gathered together."""
        gathered_elements = [layer.elements(at)[1] for layer, _ in self.counts]
        for pair in self.pairs:
            sizes = [layer.elements(at) for layer in pair]
            if not any(experts for experts, _ in sizes):
                gathered_elements.append(sum(others for _, others in sizes))
        return max(gathered_elements, default=0.0)


def _count_layers(layers: Sequence[LayerSizes]) -> tuple[tuple[LayerSizes, int], ...]:
    """Return different layers and their numbers. Equal layers are the same object."""
    layer_ids = Counter(map(id, layers))
    by_id = {id(layer): layer for layer in layers}
    return tuple((by_id[each], count) for each, count in layer_ids.items())


@dataclass(frozen=True)
class StageLayers:
    """Stages that have the same layers on equally fast nodes.

    Attributes:
        number: Number of the first of these stages.
        layers: Layers of a stage.
        counts: Different layers and their numbers.
        parts: Index in `ModelPartition.kinds` of each part of the stage, by chunk.
        numbers: Numbers of all these stages.
    """

    number: int
    layers: tuple[LayerSizes, ...]
    counts: tuple[tuple[LayerSizes, int], ...]
    parts: tuple[int, ...]
    numbers: list[int]

    def elements(self, at: LayoutSizes, kinds: Sequence[PartLayers]) -> ParameterCounts:
        """Return the numbers of parameters on a rank of the stage."""
        experts = others = 0.0
        for layer, count in self.counts:
            expert_elements, other_elements = layer.elements(at)
            experts, others = experts + count * expert_elements, others + count * other_elements
        tied = sum(count * layer.tied_elements for layer, count in self.counts) / at.tensor
        second_gradients = 0.0
        if tied and len(self.parts) > 1 and any(layer.is_first for layer, _ in self.counts):
            uses = [layer.tied_uses for layer, _ in self.counts if layer.is_last]
            second_gradients = sum(tied / 2 * number for number in uses)
        elif tied and at.pipeline > 1 and any(layer.is_last for layer, _ in self.counts):
            others += tied  # the table that it has of its own
        gathered = max(kinds[part].gathered(at) for part in set(self.parts))
        blocks = sum(count * layer.elements(at)[1] for layer, count in self.counts if layer.is_block)
        return ParameterCounts(experts, others, blocks, gathered, second_gradients)


@dataclass(frozen=True)
class ModelPartition:
    """Model whose layers are distributed over the parts of a schedule.

    Attributes:
        schedule: Schedule with the number of stages and the placement of parts.
        split: Number of blocks of each part.
        parts: Index of the first layer of each part, and of the layer after its last one.
        ends: Number of messages for which each part waits, with a weight of one half.
        kinds: Different parts.
        kind_of: Index in `kinds` of each part.
        stages: Different stages.
        memo: Results of earlier computations.
    """

    schedule: Schedule
    split: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    ends: tuple[float, ...]
    kinds: tuple[PartLayers, ...]
    kind_of: tuple[int, ...]
    stages: tuple[StageLayers, ...]
    memo: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def kinds_on(self, stage: int) -> list[int]:
        """Return the index in `kinds` of each part of a stage, by chunk."""
        return [self.kind_of[self.schedule.part(stage, chunk)] for chunk in range(self.schedule.chunks)]

    @staticmethod
    def of(
        schedule: Schedule, split: tuple[int, ...], layers: Sequence[LayerSizes], groups: Sequence[int]
    ) -> ModelPartition:
        """Distribute layers over the parts of a schedule.

        Args:
            schedule: The schedule.
            split: Number of blocks of each part.
            layers: Layers of the model.
            groups: Group of nodes of each stage. Stages of the same group are equally fast.
        """
        part_layers, parts, begin = split_layers(layers, split), [], 0
        kinds: dict[object, int] = {}
        examples, kind_of = list[PartLayers](), list[int]()
        for part in part_layers:
            parts.append((begin, begin + len(part)))
            begin += len(part)
            key: object = tuple(map(id, part))
            if key not in kinds:
                kinds[key] = len(examples)
                examples.append(PartLayers.of(part))
            kind_of.append(kinds[key])
        stages: dict[object, StageLayers] = {}
        for stage in range(schedule.stage_count):
            numbers = [schedule.part(stage, chunk) for chunk in range(schedule.chunks)]
            stage_layers = tuple(layer for number in numbers for layer in part_layers[number])
            layer_ids = Counter(map(id, stage_layers))
            key = groups[stage], frozenset(layer_ids.items())
            if key not in stages:
                part_kinds = tuple(kind_of[number] for number in numbers)
                stages[key] = StageLayers(stage, stage_layers, _count_layers(stage_layers), part_kinds, [])
            stages[key].numbers.append(stage)
        stage_of_part = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
        ends = tuple(waits_of([float(one != other) for one, other in pairwise(stage_of_part)]))

        return ModelPartition(
            schedule, split, tuple(parts), ends, tuple(examples), tuple(kind_of), tuple(stages.values())
        )
