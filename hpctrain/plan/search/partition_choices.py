"""How schedules of a model may hold it: its blocks split as a run does by itself, and by seconds."""

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
from hpctrain.plan.search.model_partition import Form
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import Fell, SplitLayers, Staged
from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.stage_nodes import Ground

LEAST_GAIN = 0.005
"""Of the longest stage, and of a step: for less no split is told."""

NO_ZERO: Values = {
    "layout.zero": 0,
    "layout.zero_group": None,
    "memory.keep_gathered": 0,
    "memory.accumulate": "whole",
}
"""What asks for no stage of ZeRO."""


class SplitForms:
    """Of a deck's model, whose layers are these; what cannot be falls."""

    def __init__(
        self, choices: SearchSpace, shape: ModelShape, layers: Sequence[LayerSizes], fell: Fell
    ) -> None:
        self._choices, self._shape, self._layers, self._fell = choices, shape, layers, fell
        self._usual: dict[object, Form | None] = {}
        self._splits: dict[object, Form] = {}

    def usual(self, deck: Deck, schedule: str, chunks: int) -> Form | None:
        """The parts of the model, as a run has them; None where it cannot have them."""
        key = deck.layout.pipeline, chunks, schedule, deck.memory.recompute
        if key not in self._usual:
            values: Values = {"layout.schedule": schedule, "layout.chunks": chunks}
            plain = with_values(deck, values | NO_ZERO)
            if self._fell.cannot_be(layout_problems(plain), plain):
                self._usual[key] = None
            else:
                form = outline_schedule(plain)
                split = split_by_flops(plain, self._shape, form)
                self._usual[key] = Form.of(form, split, self._layers, [0] * form.stage_count)
        return self._usual[key]

    def tried(self, usual: Form, layers: SplitLayers, ground: Ground) -> list[Form]:
        """What is tried of a form: on several kinds of node blocks split by seconds, on one kind the usual
        split, and then that one too where it makes the longest stage so much shorter.
        """
        form = usual.schedule
        if form.parts == 1 or self._choices.given("layout.split"):
            return [usual]
        if not ground.is_one:
            other = self._by_seconds(form, layers, ground)
            return [usual if other.split == usual.split else other]
        seconds = layers.on(ground, 0)[1]
        longest = (1 - LEAST_GAIN) * _longest(seconds, usual.split, form)
        if longest <= _least_longest(seconds, form.stage_count):
            return [usual]
        other = self._by_seconds(form, layers, ground)
        return [usual, other] if _longest(seconds, other.split, form) < longest else [usual]

    def _by_seconds(self, form: Schedule, layers: SplitLayers, ground: Ground) -> Form:
        times = [layers.on(ground, group)[1] for group in range(len(ground.groups))]
        split = tuple(split_by_stage_times([times[group] for group in ground.of_stage], form))
        key = form.stage_count, form.chunks, form.placement, split, tuple(ground.of_stage)
        if key not in self._splits:
            self._splits[key] = Form.of(form, split, self._layers, ground.of_stage)
        return self._splits[key]

    def is_had(self, node: Staged, schedule: str, chunks: int) -> bool:
        """Whether there is such a schedule: a file has one of some stages, chunks and micro-batches alone."""
        if schedule in SCHEDULE_NAMES:
            return True
        deck = with_values(node.deck, {"layout.schedule": schedule, "layout.chunks": chunks})
        stages = read_schedule_file(deck).stage_count
        if node.at.pipeline == 1 and stages > 1:  # a run would not look into the file
            problem = f"has {stages} stages, expected layout.pipeline = 1"
            return not self._fell.cannot_be([DeckProblem("layout.schedule", problem)], deck)
        try:
            schedule_builder(deck, node.at.data)
        except HpctrainError as error:
            return not self._fell.cannot_be(
                [DeckProblem("layout.schedule", error.problems[0].split(": ", 2)[-1])], deck
            )
        return True


def _longest(seconds: Sequence[float], split: Sequence[int], form: Schedule) -> float:
    """Of the stage that has most."""
    stages = [0.0] * form.stage_count
    for part, held in enumerate(split_layers(seconds, split)):
        stages[form.stage_and_chunk(part)[0]] += sum(held)
    return max(stages)


def _least_longest(seconds: Sequence[float], stages: int) -> float:
    """What no split undercuts: the mean, and as many blocks as some stage has at the least, with an end of
    the model where no stage may have fewer.
    """
    _, *blocks, _ = seconds
    fewest, least = ceil(len(blocks) / stages), min(blocks)
    held = fewest * least
    if len(blocks) == fewest * stages:
        held += min(least, max(seconds[0], seconds[-1]))
    return max(sum(seconds) / stages, held)
