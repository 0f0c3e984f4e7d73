"""What ranks hold at the least before a schedule, or the sums of gradients, are known.

How many micro-batches a stage has under way, in how many blocks, follows from the schedule and the split that
its FLOPs make; it is found once for all ways to split layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil, inf

from hpctrain.deck.schema import Deck
from hpctrain.memory.recompute import segment_size
from hpctrain.plan.search.form import Form, ParameterCounts
from hpctrain.plan.search.least_bytes import ModelActivations
from hpctrain.plan.search.moments import moments
from hpctrain.plan.search.needs import Needs, States
from hpctrain.plan.search.search_space import SearchSpace, with_values
from hpctrain.plan.time.arrangement import LayoutSizes
from hpctrain.plan.time.layers import LayerSizes

FormOf = Callable[[Deck, str, int], Form | None]
"""The form of a schedule by name with so many chunks, of a deck with stages; None where there is none."""


class Coarse:
    """Of a deck whose layers are these; `form_of` finds forms."""

    def __init__(
        self, choices: SearchSpace, needs: Needs, layers: Mapping[LayerSizes, int], form_of: FormOf
    ) -> None:
        self._choices, self._needs, self._form_of = choices, needs, form_of
        self._layers = layers
        self._blocks = {layer: many for layer, many in layers.items() if layer.is_block}
        self._loads: dict[object, list[tuple[float, float]]] = {}
        self._states: dict[object, tuple[float, float]] = {}
        self._fewest: dict[tuple[int, int], set[tuple[int, ...]]] = {}

    def least(
        self, deck: Deck, at: LayoutSizes, kept: ModelActivations, ways: list[States], *, by_flops: bool
    ) -> float:
        """Bytes of the node that needs most, for a rank, of all schedules and these ways to keep states;
        where blocks are not split `by_flops`, however they are.
        """
        states, of_all = self._states_of(at, ways)
        mean = self._needs.of_mean_rank(of_all + kept.stored_bytes(self._layers) / at.pipeline)
        if kept.has_frozen_parameters or (not by_flops and self._needs.mixes(at)):
            return mean
        if not by_flops:
            return max(mean, self._of_any_split(at, kept, states))
        kinds = [kept.by_kind[layer.kind] for layer in self._blocks]
        computed = kept.recompute not in {"none", "selective"}
        unit = kept.stored_input if computed else min(each.stored for each in kinds)
        if self._needs.mixes(at):
            loads = self._loads_of(deck, at, whole=False)
            held = (alive * unit + blocks * states for alive, blocks in loads)
            return max(mean, min(map(self._needs.of_mean_rank, held), default=inf))
        besides = min(each.saved - each.saved_input for each in kinds) if computed else 0
        loads = self._loads_of(deck, at, whole=True)
        held = (alive * unit + blocks * states + (besides if blocks else 0) for alive, blocks in loads)
        return max(mean, min((self._needs.libraries + each for each in held), default=inf))

    def _of_any_split(self, at: LayoutSizes, kept: ModelActivations, states: float) -> float:
        """However blocks are split: a stage with n micro-batches under way has room for X / (n w + s) of them
        in X bytes, of w that wait in a block and s of its states, and all stages for all.
        """
        blocks = sum(self._blocks.values())
        size = segment_size(kept.recompute, blocks)
        waiting = min(kept.by_kind[layer.kind].stored for layer in self._blocks)
        of_block = kept.stored_input / size if size else waiting
        key = at.pipeline, _rounded(at)
        if key not in self._fewest:
            self._fewest[key] = self._fewest_of(*key)
        shares = self._needs.shares(at)
        rooms = (
            sum(share / max(1.0, many * of_block + states) for many, share in zip(each, shares, strict=True))
            for each in self._fewest[key]
        )
        return blocks / max(rooms, default=inf)

    def _fewest_of(self, stages: int, most: int) -> set[tuple[int, ...]]:
        """Of each schedule the micro-batches that every stage has under way in any of its parts."""
        return {
            tuple(min(moments(name, stages, most, chunks, stage)[0].waiting) for stage in range(stages))
            for name, chunks in self._choices.of_schedules(stages, stages)
        }

    def _states_of(self, at: LayoutSizes, ways: list[States]) -> tuple[float, float]:
        """Bytes of states of a block, and of all of a mean rank, as few as can be."""
        key = at.tensor, at.context, at.data, at.pipeline, at.expert, at.expert_tensor
        if key not in self._states:
            of_blocks = [layer.elements(at) for layer in self._blocks]
            block = ParameterCounts(min(each[0] for each in of_blocks), min(each[1] for each in of_blocks))
            sizes = [(many, layer.elements(at)) for layer, many in self._layers.items()]
            experts, others = (sum(many * each[index] for many, each in sizes) for index in range(2))
            mean = ParameterCounts(experts / at.pipeline, others / at.pipeline)
            self._states[key] = min(of(block, "none") for of in ways), min(of(mean, "none") for of in ways)
        return self._states[key]

    def _loads_of(self, deck: Deck, at: LayoutSizes, *, whole: bool) -> list[tuple[float, float]]:
        """Of each form of a schedule blocks of micro-batches that wait on a stage, or pieces of blocks that
        are computed again as one, and its blocks: of the stage that has most, or in the mean. Those with more
        of both than another are left out.
        """
        most = _rounded(at)
        key = at.pipeline, most, deck.memory.recompute, whole
        if key not in self._loads:
            found = sorted(self._forms(deck, at, most, whole))
            best = list[tuple[float, float]]()
            for alive, blocks in found:
                if not best or blocks < best[-1][1]:
                    best.append((alive, blocks))
            self._loads[key] = best
        return self._loads[key]

    def _forms(self, deck: Deck, at: LayoutSizes, most: int, whole: bool) -> Iterator[tuple[float, float]]:
        stages = at.pipeline
        deck = with_values(deck, {"layout.pipeline": stages})
        for schedule, chunks in self._choices.of_schedules(stages, stages):
            form = self._form_of(deck, schedule, chunks)
            if form is None:
                continue
            loads = []
            for stage in form.stages:
                for number in stage.numbers[:1] if whole else stage.numbers:
                    parts = [form.kinds[kind] for kind in form.kinds_on(number)]
                    (first, *_) = moments(schedule, stages, most, chunks, number)
                    alive = sum(
                        many * _units(deck, len(part.blocks))
                        for many, part in zip(first.waiting, parts, strict=True)
                    )
                    loads.append((float(alive), float(sum(len(part.blocks) for part in parts))))
            if whole:
                yield max(loads)
            else:
                yield sum(each[0] for each in loads) / stages, sum(each[1] for each in loads) / stages


def _rounded(at: LayoutSizes) -> int:
    """A number of micro-batches that hold no more than a step's."""
    return 1 << (min(at.micro_batches, 2 * at.pipeline).bit_length() - 1)


def _units(deck: Deck, blocks: int) -> int:
    """What is kept of so many blocks: each, or of those that are computed again as one the first input."""
    size = segment_size(deck.memory.recompute, blocks)
    return ceil(blocks / size) if size else blocks
