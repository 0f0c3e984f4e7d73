"""Programmes of all ranks of a deck, one for ranks that make the same calls.

Ranks are taken to make the same calls if their stages have layers of the same kinds, nodes divide their
groups in the same way, they own equal shares of buckets, and `SignatureSearch` finds no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np
import torch

from hpctrain.comm.mesh import coordinates, expert_sizes, rank_count
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.stages.planned_stage import PipelinePosition
from hpctrain.engine.stages.stage import TrainedStage
from hpctrain.host.device import device_kind
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.step_statistics import Reduction
from hpctrain.pipeline.action import Schedule
from hpctrain.plan.rehearse.bucket_shares import BucketShares
from hpctrain.plan.rehearse.call_recorder import NamedGroup, membership
from hpctrain.plan.rehearse.meta_op_cache import MetaOpCache
from hpctrain.plan.rehearse.programme import AUDIT, WAIT, Membership, Numbers, Programme, StepProgrammes
from hpctrain.plan.rehearse.rank_signature import SignatureSearch, folds_of
from hpctrain.plan.rehearse.rank_step import RankStep
from hpctrain.plan.traffic_plan import all_forward_schedule, stage_kinds, without_warmup

Progress = Callable[[str], None]

COMPARED_MICRO_BATCHES = 2
"""Micro-batches of the steps that are compared from place to place."""


@dataclass
class RankProgrammes:
    """Generator of the programmes of the ranks of a deck.

    Attributes:
        deck: Deck of the job.
        ranks: Number of ranks.
        vocabulary: Number of tokens in the vocabulary.
        ranks_per_node: Number of ranks of each node.
        sizes: Size of each axis of the mesh.
        schedule: Pipeline schedule.
        split: Number of layers of each part.
    """

    deck: Deck
    ranks: int
    vocabulary: int
    ranks_per_node: int
    sizes: dict[str, int] = field(init=False)
    schedule: Schedule = field(init=False)
    split: tuple[int, ...] = field(init=False)
    _steps: dict[tuple[object, int], RankStep] = field(init=False, default_factory=dict)
    _cache: MetaOpCache = field(init=False, default_factory=MetaOpCache)

    def __post_init__(self) -> None:
        # Compiled functions cannot run without values. The functions of torch make the same calls.
        self.deck = without_warmup(self.deck).with_keys(machine={"compile": False})
        self.sizes = axis_sizes(self.deck, self.ranks)
        self.shape = ModelShape.of(self.deck, self.vocabulary)
        placement = place_by_flops(self.deck, self.shape, self.sizes["data"])
        self.schedule = placement.schedule_of(micro_batches(self.deck, self.sizes["data"]))
        self.split = placement.split

    @property
    def of_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return rank_count(self.sizes) // self.schedule.stage_count

    @cached_property
    def kinds(self) -> list[object]:
        """Kind of each stage, by its layers. Stages of the same kind make the same calls in an action."""
        return stage_kinds(self.deck, self.shape, self.schedule, self.split)

    def job(self, progress: Progress = lambda _: None) -> StepProgrammes:
        """Return the programmes of all ranks, generated once for ranks that make the same calls."""
        nodes = self._node_signatures()
        places = {
            kind: self._signatures_of_places(kind, nodes, progress) for kind in dict.fromkeys(self.kinds)
        }
        stages = np.arange(self.ranks) // self.of_stage
        signatures = np.stack([stages, nodes, np.concatenate([places[kind] for kind in self.kinds])], axis=1)
        _, firsts, programme_of = np.unique(signatures, axis=0, return_index=True, return_inverse=True)
        programmes = []
        for number, first in enumerate(firsts.tolist(), 1):
            progress(f"programme {number} of {len(firsts)}")
            stage, place = divmod(first, self.of_stage)
            programmes.append(self._from_creation(stage, place, self.kinds[stage]))
        return StepProgrammes(programmes, programme_of.reshape(-1), self.groups(), self.place)

    def every_job(self) -> StepProgrammes:
        """Return the programmes of all ranks, each generated on its own."""
        programmes = [
            self._from_creation(*divmod(rank, self.of_stage), ("rank", rank)) for rank in range(self.ranks)
        ]
        return StepProgrammes(programmes, np.arange(self.ranks), self.groups(), self.place)

    def programme(self, stage: int, place: int, signature: object) -> Programme:
        """Return the programme of the rank at a place of a stage.

        Ranks with the same `signature` make the same calls in an action.
        """
        return self._step(stage, place, signature).programme(self.schedule, stage, self._statistics_of_step)

    def _from_creation(self, stage: int, place: int, signature: object) -> Programme:
        """Return a `programme` after the creation of all communicators."""
        events = self.programme(stage, place, signature)
        creations = self._step(stage, place, signature).recorder.creations
        shifted = (
            replace(e, call_index=e.call_index + len(creations)) if e.operation == WAIT else e for e in events
        )
        return (*creations, *shifted)

    def groups(self) -> dict[str, Membership]:
        """Return all groups that programmes have used so far, by name.

        They are checked to be those of the meshes of single ranks.
        """
        groups: dict[str, Membership] = {"agreements": membership("agreements", self.sizes)}
        for step in self._steps.values():
            for named in step.recorder.groups.values():
                if named.name not in groups:
                    groups[named.name] = membership(named.name, self.sizes)
                members = tuple(groups[named.name].group_of(named.ranks[named.rank]).tolist())
                assert members == named.ranks, named
        if self.deck.stability.corruption != "off":
            groups |= {AUDIT + name: group for name, group in groups.items()}
        return groups

    def place(self, rank: int) -> str:
        """Return a rank with its coordinates, such as "rank 5 (data 1, tensor 1)"."""
        along = coordinates(self.sizes, rank)
        sizes = {**expert_sizes(self.sizes), **self.sizes}
        there = ", ".join(f"{axis} {number}" for axis, number in along.items() if sizes[axis] > 1)
        return f"rank {rank}" + (f" ({there})" if there else "")

    @cached_property
    def _statistics_of_step(self) -> Mapping[Reduction, int]:
        """Number of step statistics of all stages together, by reduction."""
        of_kind = {kind: self._first_step(kind).statistics() for kind in self.kinds}
        return {how: sum(of_kind[kind][how] for kind in self.kinds) for how in get_args(Reduction)}

    def stage_of(self, number: int) -> TrainedStage:
        """Return a stage as the first rank of the first stage of its kind builds it."""
        return self._first_step(self.kinds[number]).stage

    @property
    def device(self) -> torch.device:
        """Type of device of the run."""
        return device_kind(self.deck.run.device)

    def _first_step(self, kind: object) -> RankStep:
        """Return the first rank of the first stage of a kind."""
        return self._step(self.kinds.index(kind), 0, kind)

    def _node_signatures(self) -> Numbers:
        """Return a number for each rank, equal if nodes divide their groups in the same way, [ranks]."""
        signatures = [np.zeros(self.ranks, dtype=np.int64)]
        names = {each.name for kind in set(self.kinds) for each in self._named(kind)}
        for name in sorted(names):
            groups = membership(name, self.sizes)
            cut = [ranks_per_node_of((row // self.ranks_per_node).tolist()) for row in groups.rows]
            signatures.append(np.where(groups.row_of < 0, -1, np.array(cut)[groups.row_of]))
        return np.unique(np.stack(signatures, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def _named(self, kind: object) -> list[NamedGroup]:
        return list(self._first_step(kind).recorder.groups.values())

    def _signatures_of_places(self, kind: object, nodes: Numbers, progress: Progress) -> Numbers:
        """Return a number for each place of a kind of stage, equal for places with the same calls, [places].

        Only the ranks that are the first of a signature are kept. Others are built again if they are needed.
        """
        stage, few = self.kinds.index(kind), all_forward_schedule(self.schedule, COMPARED_MICRO_BATCHES)
        known: dict[Programme, int] = {}
        numbers: dict[int, int] = {}

        def ask(place: int) -> int:
            if place not in numbers:
                progress(f"place {len(numbers) + 1} of stage {stage}")
                programme = self._step(stage, place, kind).programme(few, stage, self._statistics_of_step)
                numbers[place] = known.setdefault(programme, len(known))
            return numbers[place]

        ranks = np.arange(stage * self.of_stage, (stage + 1) * self.of_stage)
        shares = BucketShares(self._first_step(kind), self.sizes)
        initial = np.stack([nodes[ranks], shares.signatures(ranks)], axis=1)
        initial = np.unique(initial, axis=0, return_inverse=True)[1].reshape(-1)
        ends = [rank - int(ranks[0]) for rank in shares.ends(int(ranks[0]))]
        signatures = SignatureSearch(folds_of(self.sizes), initial, ask).find(ends)
        firsts = {0, *np.unique(signatures, return_index=True)[1].tolist()}
        for place in numbers.keys() - firsts:
            del self._steps[kind, place]
        return signatures

    def _step(self, stage: int, place: int, signature: object) -> RankStep:
        if (signature, place) not in self._steps:
            self._steps[signature, place] = self._new_step(stage, place)
        return self._steps[signature, place]

    def _new_step(self, stage: int, place: int) -> RankStep:
        position = PipelinePosition(self.schedule, self.split, stage)
        return RankStep(self.deck, self.shape, self.sizes, position, place, self.ranks_per_node, self._cache)
