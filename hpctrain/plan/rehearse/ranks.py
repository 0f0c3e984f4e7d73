"""The programmes of all ranks of a deck: one for ranks that are alike, told of the first of them.

Ranks of stages with layers of the same kinds, with the same neighbours on their nodes, are taken to be alike;
of each kind of stage ranks at other places along every axis are asked too, and where one of them does other
things, every rank along that axis is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

import numpy as np
import torch

from hpctrain.comm.device import device_named
from hpctrain.comm.mesh import AXES, coordinates, expert_sizes, rank_count
from hpctrain.comm.topology import neighbours
from hpctrain.deck.schema import Deck
from hpctrain.engine.place import placed_by_flops
from hpctrain.engine.sizes import axis_sizes, micro_batches
from hpctrain.engine.stage import TrainedStage
from hpctrain.model.build import bare_model
from hpctrain.model.part import blocks_of
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.noted import How
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import spans_of
from hpctrain.plan.rehearse.programme import Job, Membership, Numbers, Programme
from hpctrain.plan.rehearse.record import Named, membership
from hpctrain.plan.rehearse.step import RankStep
from hpctrain.plan.traffic import plain, steady

Progress = Callable[[str], None]

ASKED_MICRO_BATCHES = 2
"""Of steps that are compared from place to place."""


@dataclass
class RankProgrammes:
    """What makes the programmes of `ranks` ranks of a deck, whose nodes have `ranks_per_node` each."""

    deck: Deck
    ranks: int
    vocabulary: int
    ranks_per_node: int
    sizes: dict[str, int] = field(init=False)
    schedule: Schedule = field(init=False)
    split: tuple[int, ...] = field(init=False)
    _steps: dict[tuple[object, int], RankStep] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.deck = steady(self.deck)
        self.sizes = axis_sizes(self.deck, self.ranks)
        self.shape = ModelShape.of(self.deck, self.vocabulary)
        placement = placed_by_flops(self.deck, self.shape, self.sizes["data"])
        self.schedule = placement.schedule_of(micro_batches(self.deck, self.sizes["data"]))
        self.split = placement.split

    @property
    def of_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return rank_count(self.sizes) // self.schedule.stage_count

    @cached_property
    def kinds(self) -> list[object]:
        """Of each stage what its layers are; stages of the same kind do the same in an action."""
        layers = [layer.kind for layer in blocks_of(bare_model(self.shape))]
        found: list[object] = []
        for number in range(self.schedule.stage_count):
            spans = spans_of(self.schedule, self.split, number)
            ends = number in {0, self.schedule.stage_count - 1} or bool(self.deck.model.frozen)
            parts = tuple((*layers[s.first : s.last], s.embeds, s.predicts) for s in spans)
            found.append((ends and number, parts))
        return found

    def job(self, progress: Progress = lambda _: None) -> Job:
        """All ranks, as far as they are alike from one programme."""
        nodes = self._node_looks()
        axes = self._telling_axes(nodes, progress)
        stages = np.arange(self.ranks) // self.of_stage
        looks = np.stack([stages, nodes, self._places(self._alike_along(axes, progress))], axis=1)
        if axes and not self._last_is_alike(looks):
            each = {axis: np.arange(self.sizes[axis]) for axis in axes}
            looks = np.stack([stages, nodes, self._places(each)], axis=1)
        _, firsts, programme_of = np.unique(looks, axis=0, return_index=True, return_inverse=True)
        programmes = []
        for number, first in enumerate(firsts.tolist(), 1):
            progress(f"programme {number} of {len(firsts)}")
            stage, place = divmod(first, self.of_stage)
            look = self.kinds[stage], int(nodes[first]), int(looks[first, 2])
            programmes.append(self.programme(stage, place, look))
        return Job(programmes, programme_of.reshape(-1), self.groups(), self.place)

    def every_job(self) -> Job:
        """All ranks, each told by itself."""
        programmes = [
            self.programme(*divmod(rank, self.of_stage), ("rank", rank)) for rank in range(self.ranks)
        ]
        return Job(programmes, np.arange(self.ranks), self.groups(), self.place)

    def programme(self, stage: int, place: int, look: object) -> Programme:
        """That of the rank at a place of a stage, of which ranks with that look do the same in an action."""
        return self._step(stage, place, look).programme(self.schedule, stage, self._noted)

    def groups(self) -> dict[str, Membership]:
        """All groups that were met so far, by name; as the meshes of single ranks tell them."""
        found: dict[str, Membership] = {"agreements": membership("agreements", self.sizes)}
        for step in self._steps.values():
            for named in step.recorder.groups.values():
                if named.name not in found:
                    found[named.name] = membership(named.name, self.sizes)
                told = found[named.name].of(named.ranks[named.rank])
                assert tuple(told.tolist()) == named.ranks, named
        return found

    def place(self, rank: int) -> str:
        """A rank and its coordinates in words."""
        along = coordinates(self.sizes, rank)
        sizes = {**expert_sizes(self.sizes), **self.sizes}
        there = ", ".join(f"{axis} {number}" for axis, number in along.items() if sizes[axis] > 1)
        return f"rank {rank}" + (f" ({there})" if there else "")

    @cached_property
    def _noted(self) -> Mapping[How, int]:
        """Numbers that all ranks together note: those of every stage, where each has its own."""
        of_kind = {kind: self._first_step(kind).noted() for kind in self.kinds}
        return {how: sum(of_kind[kind][how] for kind in self.kinds) for how in get_args(How)}

    def stage_of(self, number: int) -> TrainedStage:
        """What the first rank of a stage holds, or one of a stage with layers of the same kinds."""
        return self._first_step(self.kinds[number]).stage

    @property
    def device(self) -> torch.device:
        """What a run computes on."""
        return device_named(self.deck.run.device)

    def _first_step(self, kind: object) -> RankStep:
        """Of the first rank of the first stage of a kind."""
        return self._step(self.kinds.index(kind), 0, kind)

    def _node_looks(self) -> Numbers:
        """Of each rank a number for how nodes cut its groups [ranks]."""
        looks = [np.zeros(self.ranks, dtype=np.int64)]
        names = {each.name for kind in set(self.kinds) for each in self._named(kind)}
        for name in sorted(names):
            groups = membership(name, self.sizes)
            cut = [neighbours((row // self.ranks_per_node).tolist()) for row in groups.rows]
            looks.append(np.where(groups.row_of < 0, -1, np.array(cut)[groups.row_of]))
        return np.unique(np.stack(looks, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def _named(self, kind: object) -> list[Named]:
        return list(self._first_step(kind).recorder.groups.values())

    def _telling_axes(self, nodes: Numbers, progress: Progress) -> list[str]:
        """Axes along which ranks of a stage do not all do the same: asked are one in the middle and the last
        one, of every kind of stage.
        """
        found: dict[str, None] = {}
        strides = self._strides
        for number, kind in enumerate(dict.fromkeys(self.kinds), 1):
            progress(f"kind {number} of stages")
            stage = self.kinds.index(kind)
            first, few = stage * self.of_stage, plain(self.schedule, ASKED_MICRO_BATCHES)
            usual = self._first_step(kind).programme(few, stage, self._noted)
            for axis, stride in strides.items():
                for coordinate in sorted({self.sizes[axis] // 2, self.sizes[axis] - 1} - {0}):
                    place = coordinate * stride
                    if axis in found or nodes[first + place] != nodes[first]:
                        continue
                    other = self._step(stage, place, (kind, "asked"))
                    if other.programme(few, stage, self._noted) != usual:
                        found[axis] = None
        return list(found)

    @property
    def _strides(self) -> dict[str, int]:
        """How far neighbours along an axis are from each other."""
        context = self.sizes["tensor"]
        return {"tensor": 1, "context": context, "data": context * self.sizes["context"]}

    def _alike_along(self, axes: Sequence[str], progress: Progress) -> dict[str, Numbers]:
        """For each coordinate along these axes a number, the same of those that do the same in every kind of
        stage, where they come first along all other axes.
        """
        few, found = plain(self.schedule, ASKED_MICRO_BATCHES), {}
        for axis in axes:
            known: list[dict[Programme, int]] = [{} for _ in self.kinds]
            alike: dict[tuple[int, ...], int] = {}
            numbers = []
            for coordinate in range(self.sizes[axis]):
                progress(f"{axis} {coordinate} of {self.sizes[axis]}")
                told = []
                for kind in dict.fromkeys(self.kinds):
                    stage = self.kinds.index(kind)
                    asked = self._new_step(stage, coordinate * self._strides[axis])
                    programme = asked.programme(few, stage, self._noted)
                    told.append(known[stage].setdefault(programme, len(known[stage])))
                numbers.append(alike.setdefault(tuple(told), len(alike)))
            found[axis] = np.array(numbers)
        return found

    def _last_is_alike(self, looks: Numbers) -> bool:
        """Whether the last rank of the first stage of every kind, which comes last along all axes, does what
        the first rank does that looks like it.
        """
        few = plain(self.schedule, ASKED_MICRO_BATCHES)
        for kind in dict.fromkeys(self.kinds):
            stage = self.kinds.index(kind)
            last = (stage + 1) * self.of_stage - 1
            first = int(np.flatnonzero((looks == looks[last]).all(axis=1))[0])
            places = (self.of_stage - 1, first - stage * self.of_stage)
            one, other = (self._new_step(stage, each).programme(few, stage, self._noted) for each in places)
            if one != other:
                return False
        return True

    def _places(self, numbers: Mapping[str, Numbers]) -> Numbers:
        """Of each rank a number for what its coordinates along some axes have for numbers [ranks]."""
        lattice = np.indices([self.sizes[axis] for axis in AXES]).reshape(len(AXES), -1)
        places = np.zeros(self.ranks, dtype=np.int64)
        for axis, of_coordinates in numbers.items():
            places = places * self.sizes[axis] + of_coordinates[lattice[AXES.index(axis)]]
        return places

    def _step(self, stage: int, place: int, look: object) -> RankStep:
        if (look, place) not in self._steps:
            self._steps[look, place] = self._new_step(stage, place)
        return self._steps[look, place]

    def _new_step(self, stage: int, place: int) -> RankStep:
        return RankStep(
            self.deck,
            self.shape,
            self.sizes,
            self.schedule,
            self.split,
            stage,
            place,
            self.ranks_per_node,
        )
