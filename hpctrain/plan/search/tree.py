"""Layouts as a tree: how layers are split, over how many stages, in which order and with which ZeRO.

Each node knows seconds that no layout below it undercuts; the nearer to a layout, the closer. A layout's own
seconds are those of `plan/time/step.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from hpctrain.deck.check_layout import layout_problems
from hpctrain.deck.check_world import world_problems
from hpctrain.deck.problem import Problem
from hpctrain.deck.schedules import NAMES
from hpctrain.deck.schema import Deck
from hpctrain.engine.place import placed_by_flops, split_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.pipeline.generate import generate
from hpctrain.pipeline.split import split_over
from hpctrain.pipeline.wanted import make_schedule, outline
from hpctrain.plan.holding import Holding
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.search.choices import Choices, Values, with_values
from hpctrain.plan.search.coarse import Coarse
from hpctrain.plan.search.form import Form
from hpctrain.plan.search.least_bytes import LayerBytes, MicroBytes
from hpctrain.plan.search.least_seconds import KNOWN, PartSeconds, least_seconds
from hpctrain.plan.search.moments import Opened, moments, opened
from hpctrain.plan.search.needs import Needs, States
from hpctrain.plan.time.arrangement import Arrangement
from hpctrain.plan.time.ground import Ground, ranks_of_kinds
from hpctrain.plan.time.layers import LayerSeconds, LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.machine import Machine
from hpctrain.plan.time.step import boundary_seconds, step_seconds

_ROUNDING = 1e-9
_NONE = PartSeconds(0.0, 0.0, 0.0)

_NO_ZERO: Values = {
    "layout.zero": 0,
    "layout.zero_group": None,
    "memory.keep_gathered": 0,
    "memory.accumulate": "whole",
}
"""What asks for no stage of ZeRO."""

_NEUTRAL: Values = _NO_ZERO | {
    "layout.data": None,
    "layout.pipeline": 1,
    "layout.schedule": "1f1b",
    "layout.chunks": 1,
    "layout.split": None,
    "layout.replicas": 1,
}
"""What of a layout layers do not ask for: any model has it."""


@dataclass(frozen=True)
class Fell:
    """What became of other layouts: how many cannot be, and the first reason of each kind; how many whole
    ones were looked at, and what did not fit into memory, by its least need and by its plan.
    """

    impossible: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def cannot_be(self, problems: Sequence[Problem], deck: Deck) -> bool:
        """Whether there are any."""
        if problems:
            first = problems[0]
            self.impossible[first.key] += 1
            self.reasons.setdefault(first.key, f"{first.key} = {deck.value(first.key)}: {first.sentence}")
        return bool(problems)


@dataclass(frozen=True)
class SplitLayers:
    """How layers are split, and what each kind of layer then takes and keeps of a micro-batch. Of every node
    `bound` are seconds that no layout below it undercuts, `least` the bytes of a mean rank that none does.
    """

    bound: float
    least: float
    deck: Deck
    at: Arrangement
    of_kinds: tuple[Mapping[LayerSizes, LayerSeconds], ...]
    """Of the machine's kinds of node, each by itself."""
    kept: MicroBytes
    needs: Mapping[int, float]
    """Bytes of a rank at the least by numbers of stages that may have room."""
    layers: tuple[LayerSizes, ...]

    @cached_property
    def prefix(self) -> list[PartSeconds]:
        """Seconds of the layers before each, on nodes of the first kind."""
        return _prefix(self.layers, self.of_kinds[0])

    @cached_property
    def _of_groups(self) -> dict[tuple[int, ...], tuple[list[PartSeconds], list[float]]]:
        return {}

    def on(self, ground: Ground, group: int) -> tuple[list[PartSeconds], list[float]]:
        """Seconds of the layers before each, and of each, on stages of a group."""
        key = ground.numbers[group]
        if key not in self._of_groups:
            seconds = self.of_kinds[key[0]] if len(key) == 1 else ground.layers(self.layers, group)
            total = {layer: each.total for layer, each in seconds.items()}
            self._of_groups[key] = _prefix(self.layers, seconds), [total[layer] for layer in self.layers]
        return self._of_groups[key]


@dataclass(frozen=True)
class Staged:
    """Layers split so over a number of stages."""

    bound: float
    least: float
    deck: Deck
    at: Arrangement
    layers: SplitLayers
    ground: Ground


@dataclass(frozen=True)
class Layout:
    """All of a layout, with its own seconds by cause once they are known: then the bound is their sum."""

    bound: float
    least: float
    deck: Deck
    at: Arrangement
    split: tuple[int, ...]
    causes: Mapping[str, float] | None = None


Node = SplitLayers | Staged | Layout


class Tree:
    """Of a deck on so many ranks of a machine; a rank may hold `limit` bytes, in the mean over those of a
    node of the kind that has most.
    """

    def __init__(self, choices: Choices, machine: Machine, holding: Holding, limit: float) -> None:
        self.choices, self.machine, self.holding = choices, machine, holding
        self.limit = limit
        deck = choices.deck
        self.shape = ModelShape.of(deck, holding.vocabulary)
        self.layers = layer_sizes(self.shape, tuple(deck.model.frozen))
        self._kinds = Counter(self.layers)
        self.fell = Fell()
        self._per_node = deck.machine.ranks_per_node or machine.ranks_per_node
        self._bytes = LayerBytes(self.shape, self.layers, self._per_node)
        self.needs = Needs(deck, holding, self._per_node)
        self._forms: dict[object, Form | None] = {}
        self._splits: dict[object, Form] = {}
        self._coarse = Coarse(choices, self.needs, self._kinds, self._form_of)
        self._schedule = lru_cache(maxsize=16)(_schedule)
        lying = ranks_of_kinds(machine, choices.ranks, self._per_node)
        self._ranks_of_kinds = [ranks for _, ranks in lying]
        self._placed: dict[object, Schedule] = {}
        self._ways_of: dict[object, list[States]] = {}
        self._afters: dict[object, float] = {}

    def roots(self) -> Iterator[SplitLayers]:
        """Every way to split layers whose micro-batches have room."""
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
                    at, kept = Arrangement.of_axes(whole, _axes(whole), self._per_node), self._bytes.of(whole)
                    needs = {stages: self._coarsely(whole, at, kept, stages) for stages in counts}
                    fitting = {stages: least for stages, least in needs.items() if least <= self.limit}
                    if fitting:
                        yield self._split(whole, at, kept, fitting)
                        continue
                    self.fell.counts["memory"] += 1
                    if whole.memory.activations == "keep":
                        break  # more sequences keep more

    def _coarsely(self, deck: Deck, at: Arrangement, kept: MicroBytes, stages: int) -> float:
        """Bytes at the least with so many stages, whether or not these share the batch."""
        data = self.choices.ranks // (at.tensor * at.context * stages)
        passes = max(1, deck.batch.global_size // (at.micro_size * data))
        staged = replace(at, pipeline=stages, data=data, micro_batches=passes)
        by_flops = not self.machine.others or self.choices.given("layout.split")
        return self._coarse.least(deck, staged, kept, self._ways(staged), by_flops=by_flops)

    def _split(
        self, deck: Deck, at: Arrangement, kept: MicroBytes, needs: Mapping[int, float]
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
        seconds = [{layer: sum(_part(passes)) for layer, passes in each.items()} for each in of_kinds]
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
        return self._stages(node) if isinstance(node, SplitLayers) else self._layouts(node)

    def _stages(self, node: Node) -> Iterator[Staged]:
        assert isinstance(node, SplitLayers)
        at, ranks = node.at, self.choices.ranks // (node.at.tensor * node.at.context)
        batch = node.deck.batch.global_size
        for stages, needed in node.needs.items():
            data = ranks // stages
            asked = self.choices.deck.layout.data
            deck = with_values(node.deck, {"layout.pipeline": stages})
            checked = with_values(deck, _NO_ZERO)
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
                least = self._coarse.least(deck, staged, node.kept, self._ways(staged), by_flops=True)
                if least > self.limit:
                    self.fell.counts["memory"] += 1
                    continue
            yield Staged(bound, least, deck, staged, node, ground)

    def _ways(self, at: Arrangement) -> list[States]:
        """To keep states."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor
        if key not in self._ways_of:
            of_states = self.choices.of_states(at.data_ranks, self.machine)
            self._ways_of[key] = [self.needs.states_of(at, each) for each in of_states]
        return self._ways_of[key]

    def _message(self, at: Arrangement) -> float:
        """Seconds from a stage to the next, at the least."""
        kinds = self.machine.kinds if at.pipeline > 1 else ()
        return min((boundary_seconds(self.layers[0].hidden, at, kind) for kind in kinds), default=0.0)

    def _layouts(self, node: Node) -> Iterator[Layout]:
        assert isinstance(node, Staged)
        at, machine, layers, ground = node.at, self.machine, node.layers, node.ground
        prefixes, splits = [layers.prefix], dict[tuple[int, str], Form]()
        if not ground.is_one:
            prefixes = [layers.on(ground, group)[0] for group in range(len(ground.groups))]
        message = self._message(at)
        blocking = machine.messages == "blocking"
        sent = 0.0 if blocking else message
        zeros = list(self.choices.of_states(at.data_ranks, machine))
        ways = self._ways(at)
        for schedule, chunks in self.choices.of_schedules(at.pipeline, at.micro_batches):
            form = self._form_of(node.deck, schedule, chunks)
            if form is None or not self._is_had(node, schedule, chunks):
                continue
            own = form.split
            if not ground.is_one and form.schedule.parts > 1 and not self.choices.given("layout.split"):
                placed = chunks, form.schedule.placement
                if placed not in splits:
                    splits[placed] = self._by_seconds(form.schedule, layers, ground)
                form = splits[placed]
            self.fell.counts["layouts"] += len(zeros)
            needs = zip(zeros, self._least_of(node, schedule, form, ways), strict=True)
            fitting = [(zero, least) for zero, least in needs if least <= self.limit]
            self.fell.counts["memory"] += len(zeros) - len(fitting)
            if not fitting:
                continue
            waits = [message * blocking * ends for ends in form.ends]
            homes = [form.schedule.home(part)[0] for part in range(form.schedule.parts)]
            of_parts = [prefixes[ground.of_stage[home]] for home in homes]
            seconds = [
                PartSeconds(
                    prefix[last].forward - prefix[first].forward + wait,
                    prefix[last].input_gradient - prefix[first].input_gradient + wait,
                    prefix[last].weight_gradient - prefix[first].weight_gradient,
                )
                for prefix, (first, last), wait in zip(of_parts, form.parts, waits, strict=True)
            ]
            span = least_seconds(schedule, at.pipeline, at.micro_batches, seconds, sent)
            backward = [
                max(seconds[part].input_gradient + seconds[part].weight_gradient for part in stage.numbers)
                for stage in form.stages
            ]
            for zero, least in fitting:
                of_form: Values = {"layout.schedule": schedule, "layout.chunks": chunks}
                if form.split != own:
                    of_form["layout.split"] = form.split
                whole = with_values(node.deck, zero | of_form)
                if self.fell.cannot_be(world_problems(whole, self.choices.ranks), whole):
                    continue
                group, home = whole.layout.zero_group, whole.memory.optimizer
                if group == "node":
                    group = at.data_ranks.together
                cut_so = replace(at, zero=whole.layout.zero, zero_group=group or 0, optimizer_home=home)
                rest = self._after(ground, form, backward, cut_so)
                # What is summed in another order here differs by rounding.
                yield Layout((span + rest) * (1 - _ROUNDING), least, whole, cut_so, form.split)

    def _least_of(self, node: Staged, schedule: str, form: Form, ways: Sequence[States]) -> list[float]:
        """Bytes of the node that needs most, for a rank, of a form of a schedule by each of some ways to keep
        states.
        """
        at, kept, stages = node.at, node.layers.kept, node.at.pipeline
        parts = [kept.part(kind) for kind in form.kinds]
        chunks, places = form.schedule.chunks, self.needs.places(at, form)
        activations = []
        for number, like, kinds, _ in places:
            of_parts = [parts[kind] for kind in kinds]
            own = kept.most(of_parts, moments(schedule, stages, at.micro_batches, chunks, number))
            ways_out = (number > 0) + (number < stages - 1)
            activations.append(own + kept.around(form.stages[like].alike, ways_out))
        found = []
        for held in self._states_held(at, form, ways, opened(schedule, stages, at.micro_batches)):
            both = zip(places, activations, strict=True)
            found.append(self.needs.most(at, places, [held[place.like] + own for place, own in both]))
        return found

    def _states_held(
        self, at: Arrangement, form: Form, ways: Sequence[States], opens: Opened
    ) -> list[list[float]]:
        """Bytes of states by each of some ways to keep them, on each stage of a form."""
        key = at.tensor, at.context, at.data, at.expert, at.expert_tensor, opens
        if key not in form.memo:
            elements = [stage.elements(at, form.kinds) for stage in form.stages]
            form.memo[key] = [[states(each, opens) for each in elements] for states in ways]
        found: list[list[float]] = form.memo[key]
        return found

    def _after(self, ground: Ground, form: Form, backward: Sequence[float], at: Arrangement) -> float:
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
        hiding = tuple(backward) if self.machine.overlap else ()
        # Nothing else of an arrangement differs within a tree and is asked for; forms of one kind stay.
        key = id(form), hiding, ranks, often, at.zero, at.zero_group, at.optimizer_home
        if key not in self._afters:
            self._afters[key] = min(of_stages())
        return self._afters[key]

    def _form_of(self, deck: Deck, schedule: str, chunks: int) -> Form | None:
        """The parts of the model, as a run has them; None where it cannot have them."""
        key = deck.layout.pipeline, chunks, schedule, deck.memory.recompute
        if key not in self._forms:
            values: Values = {"layout.schedule": schedule, "layout.chunks": chunks}
            plain = with_values(deck, values | _NO_ZERO)
            if self.fell.cannot_be(layout_problems(plain), plain):
                self._forms[key] = None
            else:
                form = outline(plain)
                split = split_by_flops(plain, self.shape, form)
                self._forms[key] = Form.of(form, split, self.layers, [0] * form.stage_count)
        return self._forms[key]

    def _is_had(self, node: Staged, schedule: str, chunks: int) -> bool:
        """Whether there is such a schedule: a file has one of some stages, chunks and micro-batches alone."""
        if schedule in NAMES:
            return True
        deck = with_values(node.deck, {"layout.schedule": schedule, "layout.chunks": chunks})
        try:
            make_schedule(deck, node.at.data)
        except HpctrainError as error:
            return not self.fell.cannot_be(
                [Problem("layout.schedule", error.problems[0].split(": ", 2)[-1])], deck
            )
        return True

    def _by_seconds(self, form: Schedule, layers: SplitLayers, ground: Ground) -> Form:
        """The parts of the model, split over stages on several kinds of node."""
        times = [layers.on(ground, group)[1] for group in range(len(ground.groups))]
        split = tuple(split_over([times[group] for group in ground.of_stage], form))
        key = form.stage_count, form.chunks, form.placement, split, tuple(ground.of_stage)
        if key not in self._splits:
            self._splits[key] = Form.of(form, split, self.layers, ground.of_stage)
        return self._splits[key]

    def schedule(self, layout: Layout) -> Schedule:
        """That of a layout's step."""
        keys, at = layout.deck.layout, layout.at
        if at.pipeline > 1 and keys.schedule not in KNOWN:
            kind = keys.schedule, at.pipeline, at.micro_batches, layout.split, at.recompute
            if kind not in self._placed:
                placement = placed_by_flops(layout.deck, self.shape, at.data)
                self._placed[kind] = placement.schedule_of(at.micro_batches)
            return self._placed[kind]
        return self._schedule(keys.schedule, at.pipeline, at.micro_batches, keys.chunks)

    def seconds(self, layout: Layout) -> Mapping[str, float]:
        """Of a layout's step, by cause."""
        return step_seconds(self.layers, layout.at, self.schedule(layout), layout.split, self.machine)

    def memory(self, layout: Layout) -> MemoryPlan:
        """What its ranks hold."""
        return self.holding.memory_of(layout.deck, self.schedule(layout), layout.split)


def _schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    if stages == 1:
        return accumulation(micro_batches)
    return generate(name, stages, micro_batches, chunks if name == "interleaved" else None)


def _prefix(layers: Sequence[LayerSizes], seconds: Mapping[LayerSizes, LayerSeconds]) -> list[PartSeconds]:
    """Seconds of the layers before each."""
    of_layers = {layer: _part(passes) for layer, passes in seconds.items()}
    return list(accumulate((of_layers[layer] for layer in layers), _plus, initial=_NONE))


def _part(passes: LayerSeconds) -> PartSeconds:
    return PartSeconds(
        *(sum(each.values()) for each in (passes.forward, passes.input_gradient, passes.weight_gradient))
    )


def _plus(one: PartSeconds, other: PartSeconds) -> PartSeconds:
    return PartSeconds(*(a + b for a, b in zip(one, other, strict=True)))


def _axes(deck: Deck) -> Mapping[str, int]:
    """Ranks along each axis, of one data rank of one stage."""
    layout = deck.layout
    sizes = {"tensor": layout.tensor, "context": layout.context, "data": 1, "pipeline": 1}
    return sizes | (
        {"expert": layout.expert, "expert_tensor": layout.expert_tensor} if deck.model.experts else {}
    )
