"""How a schedule's stages hold a model: the parts that each has, and what these have of parameters."""

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
    """Parameters of a stage's rank: of experts, and of all else; of these those of blocks, and of the blocks
    that are gathered at once; and of tables that have a second gradient.
    """

    experts: float
    others: float
    blocks: float = 0.0
    gathered: float = 0.0
    apart: float = 0.0


@dataclass(frozen=True)
class PartForm:
    """The blocks of a part, how many of which are alike and which of them are neighbours, and what embeds or
    predicts there.
    """

    blocks: tuple[LayerSizes, ...]
    alike: tuple[tuple[LayerSizes, int], ...]
    pairs: tuple[tuple[LayerSizes, LayerSizes], ...]
    first: LayerSizes | None
    last: LayerSizes | None

    @staticmethod
    def of(layers: Sequence[LayerSizes]) -> PartForm:
        """Of a part with these layers."""
        blocks = tuple(layer for layer in layers if layer.is_block)
        ends = {layer.is_last: layer for layer in layers if not layer.is_block}
        pairs = {(id(one), id(other)): (one, other) for one, other in pairwise(blocks)}
        return PartForm(blocks, _alike(blocks), tuple(pairs.values()), ends.get(False), ends.get(True))

    def gathered(self, at: LayoutSizes) -> float:
        """Elements of the block, and of the next one, that are there whole at once."""
        found = [layer.elements(at)[1] for layer, _ in self.alike]
        for pair in self.pairs:
            sizes = [layer.elements(at) for layer in pair]
            if not any(experts for experts, _ in sizes):
                found.append(sum(others for _, others in sizes))
        return max(found, default=0.0)


def _alike(layers: Sequence[LayerSizes]) -> tuple[tuple[LayerSizes, int], ...]:
    counted = Counter(map(id, layers))  # layers that are alike are one object
    by_id = {id(layer): layer for layer in layers}
    return tuple((by_id[each], count) for each, count in counted.items())


@dataclass(frozen=True)
class StageForm:
    """Stages that hold the same layers on nodes as fast: the number of the first, its layers, how many of
    which are alike, the kinds of part that it has by chunk, and the numbers of all.
    """

    number: int
    layers: tuple[LayerSizes, ...]
    alike: tuple[tuple[LayerSizes, int], ...]
    parts: tuple[int, ...]
    numbers: list[int]

    def elements(self, at: LayoutSizes, kinds: Sequence[PartForm]) -> ParameterCounts:
        """Of its parameters on a rank."""
        experts = others = 0.0
        for layer, count in self.alike:
            of_experts, of_others = layer.elements(at)
            experts, others = experts + count * of_experts, others + count * of_others
        tied = sum(count * layer.tied_elements for layer, count in self.alike) / at.tensor
        apart = 0.0
        if tied and len(self.parts) > 1 and any(layer.is_first for layer, _ in self.alike):
            uses = [layer.tied_uses for layer, _ in self.alike if layer.is_last]
            apart = sum(tied / 2 * number for number in uses)
        elif tied and at.pipeline > 1 and any(layer.is_last for layer, _ in self.alike):
            others += tied  # the table that it has of its own
        gathered = max(kinds[part].gathered(at) for part in set(self.parts))
        blocks = sum(count * layer.elements(at)[1] for layer, count in self.alike if layer.is_block)
        return ParameterCounts(experts, others, blocks, gathered, apart)


@dataclass(frozen=True)
class Form:
    """The blocks of each part, its first and last layer, at how many of its ends others are half waited for;
    the kinds of part, and of which each is; and the stages that hold other layers than all those before them,
    or lie on other nodes. `schedule` has the stages and the placement.
    """

    schedule: Schedule
    split: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    ends: tuple[float, ...]
    kinds: tuple[PartForm, ...]
    kind_of: tuple[int, ...]
    stages: tuple[StageForm, ...]
    memo: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was found of it before."""

    def kinds_on(self, stage: int) -> list[int]:
        """The kind of each of a stage's parts, by chunk."""
        return [self.kind_of[self.schedule.part(stage, chunk)] for chunk in range(self.schedule.chunks)]

    @staticmethod
    def of(
        form: Schedule, split: tuple[int, ...], layers: Sequence[LayerSizes], groups: Sequence[int]
    ) -> Form:
        """Of a form of schedule with blocks split so, over stages of these groups of a ground."""
        held, parts, begin = split_layers(layers, split), [], 0
        kinds: dict[object, int] = {}
        examples, kind_of = list[PartForm](), list[int]()
        for part in held:
            parts.append((begin, begin + len(part)))
            begin += len(part)
            key: object = tuple(map(id, part))
            if key not in kinds:
                kinds[key] = len(examples)
                examples.append(PartForm.of(part))
            kind_of.append(kinds[key])
        stages: dict[object, StageForm] = {}
        for stage in range(form.stage_count):
            numbers = [form.part(stage, chunk) for chunk in range(form.chunks)]
            own = tuple(layer for number in numbers for layer in held[number])
            counted = Counter(map(id, own))
            key = groups[stage], frozenset(counted.items())
            if key not in stages:
                of_parts = tuple(kind_of[number] for number in numbers)
                stages[key] = StageForm(stage, own, _alike(own), of_parts, [])
            stages[key].numbers.append(stage)
        homes = [form.stage_and_chunk(part)[0] for part in range(form.parts)]
        ends = tuple(waits_of([float(one != other) for one, other in pairwise(homes)]))
        found = tuple(stages.values())
        return Form(form, split, tuple(parts), ends, tuple(examples), tuple(kind_of), found)
