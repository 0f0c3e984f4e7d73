"""The layouts of a model whose layers are split over so many stages: in which order, and with which ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.deck.check import world_problems
from hpctrain.pipeline.v_schedule import LIMITS
from hpctrain.plan.search.in_flight import Opened, moments, opened
from hpctrain.plan.search.least_bytes import PartActivations
from hpctrain.plan.search.least_seconds import PartSeconds, least_seconds
from hpctrain.plan.search.memory_needs import Needs, States
from hpctrain.plan.search.model_partition import Form
from hpctrain.plan.search.partition_choices import SplitForms
from hpctrain.plan.search.search_space import SearchSpace, Values, with_values
from hpctrain.plan.search.tree_nodes import Fell, LayoutNode, Staged
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.stage_nodes import Ground

_ROUNDING = 1e-9


class Leaves:
    """Of a tree whose ranks may hold `limit` bytes; what cannot be, or does not fit, falls."""

    def __init__(
        self,
        choices: SearchSpace,
        machine: MachineRates,
        needs: Needs,
        forms: SplitForms,
        fell: Fell,
        limit: float,
    ) -> None:
        self._choices, self._machine, self._needs = choices, machine, needs
        self._forms, self._fell, self._limit = forms, fell, limit
        self._afters: dict[object, float] = {}

    def of(self, node: Staged, ways: Sequence[States], message: float) -> Iterator[LayoutNode]:
        """All of a node that may fit, with some ways to keep states, in the order of the choices;
        `message` are seconds from a stage to the next at the least.
        """
        for schedule, chunks in self._choices.of_schedules(node.at.pipeline, node.at.micro_batches):
            usual = self._forms.usual(node.deck, schedule, chunks)
            if usual is None or not self._forms.is_had(node, schedule, chunks):
                continue
            first, *others = self._forms.tried(usual, node.layers, node.ground)
            known: dict[LayoutSizes, LayoutNode] = {}
            for layout in self._of_form(node, schedule, first, ways, message):
                known[layout.at] = layout if first is usual else _split(layout)
                yield known[layout.at]
            for form in others:
                for layout in self._of_form(node, schedule, form, ways, message):
                    if layout.at in known:
                        yield replace(_split(layout), usual=known[layout.at])

    def _of_form(
        self, node: Staged, schedule: str, form: Form, ways: Sequence[States], message: float
    ) -> Iterator[LayoutNode]:
        at, ground = node.at, node.ground
        zeros = list(self._choices.of_states(at.data_ranks, self._machine))
        needs = zip(zeros, self._least_of(node, schedule, form, ways), strict=True)
        fitting = [(zero, least) for zero, least in needs if least <= self._limit]
        self._fell.counts["layouts"] += len(zeros)
        self._fell.counts["memory"] += len(zeros) - len(fitting)
        if not fitting:
            return
        blocking = self._machine.messages == "blocking"
        seconds = self._seconds(node, form, message * blocking)
        sent = 0.0 if blocking else message
        span = least_seconds(schedule, at.pipeline, at.micro_batches, seconds, sent)
        backward = [
            max(seconds[part].input_gradient + seconds[part].weight_gradient for part in stage.numbers)
            for stage in form.stages
        ]
        values: Values = {"layout.schedule": schedule, "layout.chunks": form.schedule.chunks}
        for zero, least in fitting:
            whole = with_values(node.deck, zero | values)
            if self._fell.cannot_be(world_problems(whole, self._choices.ranks), whole):
                continue
            group, home = whole.layout.zero_group, whole.memory.optimizer
            if group == "node":
                group = at.data_ranks.together
            cut_so = replace(at, zero=whole.layout.zero, zero_group=group or 0, optimizer_home=home)
            bound = span + self._after(ground, form, backward, cut_so)
            # What is summed in another order here differs by rounding.
            yield LayoutNode(bound * (1 - _ROUNDING), least, whole, cut_so, form.split)

    def _seconds(self, node: Staged, form: Form, waited: float) -> list[PartSeconds]:
        """Of each part of a form, whose messages are `waited` for so long."""
        homes = [form.schedule.stage_and_chunk(part)[0] for part in range(form.schedule.parts)]
        groups = range(len(node.ground.groups))
        prefixes = [node.layers.on(node.ground, group)[0] for group in groups]
        of_parts = [prefixes[node.ground.of_stage[home]] for home in homes]
        return [
            PartSeconds(
                prefix[last].forward - prefix[first].forward + waited * ends,
                prefix[last].input_gradient - prefix[first].input_gradient + waited * ends,
                prefix[last].weight_gradient - prefix[first].weight_gradient,
            )
            for prefix, (first, last), ends in zip(of_parts, form.parts, form.ends, strict=True)
        ]

    def _least_of(self, node: Staged, schedule: str, form: Form, ways: Sequence[States]) -> list[float]:
        """Bytes of the node that needs most, for a rank, of a form of a schedule by each of some ways to keep
        states.
        """
        at, kept, stages = node.at, node.layers.kept, node.at.pipeline
        parts = [kept.part_activations(kind) for kind in form.kinds]
        chunks, places = form.schedule.chunks, self._needs.places(at, form)
        activations = []
        for number, like, kinds, _ in places:
            of_parts = [parts[kind] for kind in kinds]
            own = kept.peak_bytes(of_parts, moments(schedule, stages, at.micro_batches, chunks, number))
            ways_out = (number > 0) + (number < stages - 1)
            own = max(own, self._allowed(schedule, at, of_parts))
            activations.append(own + kept.temporary_bytes(form.stages[like].alike, ways_out))
        found = []
        for held in self._states_held(at, form, ways, opened(schedule, stages, at.micro_batches)):
            both = zip(places, activations, strict=True)
            found.append(self._needs.most(at, places, [held[place.like] + own for place, own in both]))
        return found

    def _allowed(self, schedule: str, at: LayoutSizes, parts: Sequence[PartActivations]) -> float:
        """Bytes of the micro-batches that an order may have wait in parts of a stage, where a run looks for
        it by times of its own: what is found here for others may hold less.
        """
        if schedule not in LIMITS or at.pipeline == 1:
            return 0.0
        many = min(2 * LIMITS[schedule](at.pipeline), 2 * at.micro_batches)
        return many * min(part.stored - part.head for part in parts)

    def _states_held(
        self, at: LayoutSizes, form: Form, ways: Sequence[States], opens: Opened
    ) -> list[list[float]]:
        """Bytes of states by each of some ways to keep them, on each stage of a form."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor, opens
        if key not in form.memo:
            elements = [stage.elements(at, form.kinds) for stage in form.stages]
            form.memo[key] = [[states(each, opens) for each in elements] for states in ways]
        found: list[list[float]] = form.memo[key]
        return found

    def _after(self, ground: Ground, form: Form, backward: Sequence[float], at: LayoutSizes) -> float:
        """Seconds that any stage of a form takes after its backward, at the least; where stages lie on kinds
        of node, those that all wait for.
        """

        def of_stages() -> Iterator[float]:
            for stage, hides in zip(form.stages, backward, strict=True):
                yield sum(ground.after(stage.layers, hides, at, stage.number).values())

        if not ground.is_one:
            return max(of_stages())
        ranks = at.tensor, at.context, at.data, at.expert, at.expert_tensor, at.sequence_parallel
        often = at.micro_batches if at.zero == 3 or at.sliced else 1
        hiding = tuple(backward) if self._machine.overlap else ()
        # Nothing else of an arrangement differs within a tree and is asked for; forms of one kind stay.
        key = id(form), hiding, ranks, often, at.zero, at.zero_group, at.optimizer_home
        if key not in self._afters:
            self._afters[key] = min(of_stages())
        return self._afters[key]


def _split(layout: LayoutNode) -> LayoutNode:
    """One whose deck says how it is split."""
    return replace(layout, deck=with_values(layout.deck, {"layout.split": layout.split}))
