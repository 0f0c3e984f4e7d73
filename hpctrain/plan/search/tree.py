"""Layouts as a tree: how layers are split, over how many stages, in which order and with which ZeRO.

Each node knows seconds that no layout below it undercuts; the nearer to a layout, the closer. A layout's own
seconds are those of `plan/time/step.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, repeat
from statistics import fmean

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
from hpctrain.pipeline.split import cut, split_over
from hpctrain.pipeline.wanted import make_schedule, outline
from hpctrain.plan.holding import Holding
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.search.choices import Choices, Values, with_values
from hpctrain.plan.search.least_bytes import Kept, LayerBytes, StateBytes, stage_elements
from hpctrain.plan.search.least_seconds import KNOWN, PartSeconds, least_seconds, live
from hpctrain.plan.time.arrangement import Arrangement
from hpctrain.plan.time.ground import Ground, ranks_of_kinds
from hpctrain.plan.time.layers import LayerSeconds, LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.machine import Machine
from hpctrain.plan.time.step import boundary_seconds, step_seconds, waits_of

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
    kept: Mapping[str, Kept]
    waiting: float
    """Bytes of a micro-batch in all layers."""
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


@dataclass(frozen=True)
class _Stage:
    """A stage by its number, its layers, how many are alike, and the first parts of all stages like it."""

    number: int
    layers: tuple[LayerSizes, ...]
    alike: tuple[tuple[LayerSizes, int], ...]
    first_parts: list[int]

    def elements(self, at: Arrangement) -> tuple[float, float]:
        """Of its parameters on a rank: of experts, and of all else."""
        experts = others = 0.0
        for layer, count in self.alike:
            of_experts, of_others = layer.elements(at)
            experts, others = experts + count * of_experts, others + count * of_others
        return experts, others

    def waiting(self, kept: Mapping[str, Kept], under_way: float) -> float:
        """Bytes of activations, of so many micro-batches."""
        waiting = under_way * sum(count * kept[layer.kind].waiting for layer, count in self.alike)
        # While a block is computed again, the head's part is gone.
        gone = sum(kept[layer.kind].waiting for layer, _ in self.alike if layer.is_last)
        again = max(kept[layer.kind].again for layer, _ in self.alike)
        passing = max(kept[layer.kind].passing - (gone if layer.is_block else 0.0) for layer, _ in self.alike)
        return max(waiting, waiting - gone + again) + max(0.0, passing)


@dataclass(frozen=True)
class _Form:
    """How a schedule's stages hold a model: the blocks of each part, its first and last layer, at how many of
    its ends others are half waited for; and the stages that hold other layers than all those before them, or
    lie on other nodes. `schedule` has the stages and the placement.
    """

    schedule: Schedule
    split: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    ends: tuple[float, ...]
    stages: tuple[_Stage, ...]

    @staticmethod
    def of(
        form: Schedule, split: tuple[int, ...], layers: Sequence[LayerSizes], groups: Sequence[int]
    ) -> _Form:
        """Of a form of schedule with blocks split so, over stages of these groups of a ground."""
        held, parts, begin = cut(layers, split), [], 0
        for part in held:
            parts.append((begin, begin + len(part)))
            begin += len(part)
        stages: dict[object, _Stage] = {}
        for stage in range(form.stage_count):
            numbers = [form.part(stage, chunk) for chunk in range(form.chunks)]
            own = tuple(layer for number in numbers for layer in held[number])
            counted = Counter(map(id, own))  # layers that are alike are one object
            key = groups[stage], frozenset(counted.items())
            if key not in stages:
                by_id = {id(layer): layer for layer in own}
                alike = tuple((by_id[each], count) for each, count in counted.items())
                stages[key] = _Stage(stage, own, alike, [])
            stages[key].first_parts.append(numbers[0])
        homes = [form.home(part)[0] for part in range(form.parts)]
        ends = tuple(waits_of([float(one != other) for one, other in pairwise(homes)]))
        return _Form(form, split, tuple(parts), ends, tuple(stages.values()))


class Tree:
    """Of a deck on so many ranks of a machine; a rank may hold
    `limit` bytes, in the mean over those of a node."""

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
        self._states = StateBytes.of(deck)
        self._libraries, self._together = holding.libraries(deck), holding.together(deck)
        self._forms: dict[object, _Form | None] = {}
        self._schedule = lru_cache(maxsize=16)(_schedule)
        lying = ranks_of_kinds(machine, choices.ranks, self._per_node)
        self._ranks_of_kinds = [ranks for _, ranks in lying]
        self._placed: dict[object, Schedule] = {}
        self._afters: dict[object, float] = {}

    def roots(self) -> Iterator[SplitLayers]:
        """Every way to split layers whose micro-batches have room."""
        deck, ranks = self.choices.deck, self.choices.ranks
        for of_layers in self.choices.of_layers():
            neutral = with_values(deck, of_layers | _NEUTRAL)
            if self.fell.cannot_be(layout_problems(neutral), neutral):
                continue
            of_model = ranks // (neutral.layout.tensor * neutral.layout.context)
            most = max(self.choices.of_stages(of_model), default=1)
            for of_kept in self.choices.of_kept(self.machine):
                split = with_values(deck, of_layers | of_kept)
                kept = self._bytes.of(split)
                # Of one micro-batch, spread over as many stages as there can be.
                waiting = sum(kept[layer.kind].waiting for layer in self.layers)
                least = waiting / most
                room = self.limit - self._libraries
                for size in self.choices.of_micro_batches(deck.batch.global_size * most // of_model):
                    if size * least > room:
                        self.fell.counts["memory"] += 1
                        break
                    yield self._split(with_values(split, {"batch.micro_size": size}), kept, waiting)

    def _split(self, deck: Deck, kept: Mapping[str, Kept], waiting: float) -> SplitLayers:
        at = Arrangement.of_axes(deck, _axes(deck), self._per_node)
        of_kinds = tuple(
            {layer: layer_seconds(layer, at, kind) for layer in self._kinds} for kind in self.machine.kinds
        )
        fixed = min(kind.fixed for kind in self.machine.kinds)
        # Micro-batches of a rank over its share of the layers: the same for any number of stages.
        share = deck.batch.global_size * at.tensor * at.context / (self.choices.ranks * at.micro_size)
        own = {
            kind: Kept(at.micro_size * each.waiting, at.micro_size * each.again, each.passing)
            for kind, each in kept.items()
        }
        waiting *= at.micro_size
        most = self.choices.ranks // (at.tensor * at.context)
        least = self._libraries + waiting / max(self.choices.of_stages(most), default=1)
        return SplitLayers(
            self._micro(of_kinds) * share + fixed, least, deck, at, of_kinds, own, waiting, self.layers
        )

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
        for stages in self.choices.of_stages(ranks):
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
            least = self._least_of_stages(node, staged)
            if least > self.limit:
                self.fell.counts["memory"] += 1
                continue
            yield Staged(bound, least, deck, staged, node, Ground(self.machine, staged))

    def _message(self, at: Arrangement) -> float:
        """Seconds from a stage to the next, at the least."""
        kinds = self.machine.kinds if at.pipeline > 1 else ()
        return min((boundary_seconds(self.layers[0].hidden, at, kind) for kind in kinds), default=0.0)

    def _least_of_stages(self, node: SplitLayers, at: Arrangement) -> float:
        """Bytes of a mean rank, with all states cut as far as can be and one micro-batch under way."""
        experts, others = (each / at.pipeline for each in stage_elements(self.layers, at))
        states = min(
            self._states_of(at, each)((experts, others))
            for each in self.choices.of_states(at.data_ranks, self.machine)
        )
        waiting = node.waiting / at.pipeline
        return self._libraries + states + waiting

    def _layouts(self, node: Node) -> Iterator[Layout]:
        assert isinstance(node, Staged)
        at, machine, layers, ground = node.at, self.machine, node.layers, node.ground
        prefixes, splits = [layers.prefix], dict[tuple[int, str], _Form]()
        if not ground.is_one:
            prefixes = [layers.on(ground, group)[0] for group in range(len(ground.groups))]
        message = self._message(at)
        blocking = machine.messages == "blocking"
        sent = 0.0 if blocking else message
        zeros = [(each, self._states_of(at, each)) for each in self.choices.of_states(at.data_ranks, machine)]
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
            alone = self._holds_whole_nodes(at)
            waiting = [
                fmean(
                    stage.waiting(layers.kept, live(schedule, at.pipeline, at.micro_batches, chunks, number))
                    for number in ([stage.number] if alone else stage.first_parts)
                )
                for stage in form.stages
            ]
            counts = [len(stage.first_parts) for stage in form.stages]
            self.fell.counts["layouts"] += len(zeros)
            if self._least(at, counts, waiting, repeat(0.0, len(waiting))) > self.limit:
                self.fell.counts["memory"] += len(zeros)
                continue
            elements = [stage.elements(at) for stage in form.stages]
            needs = [
                (zero, self._least(at, counts, waiting, map(states, elements))) for zero, states in zeros
            ]
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
                max(
                    seconds[part].input_gradient + seconds[part].weight_gradient for part in stage.first_parts
                )
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

    def _after(self, ground: Ground, form: _Form, backward: Sequence[float], at: Arrangement) -> float:
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

    def _form_of(self, deck: Deck, schedule: str, chunks: int) -> _Form | None:
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
                self._forms[key] = _Form.of(form, split, self.layers, [0] * form.stage_count)
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

    def _by_seconds(self, form: Schedule, layers: SplitLayers, ground: Ground) -> _Form:
        """The parts of the model, split over stages on several kinds of node."""
        times = [layers.on(ground, group)[1] for group in range(len(ground.groups))]
        split = tuple(split_over([times[group] for group in ground.of_stage], form))
        return _Form.of(form, split, self.layers, ground.of_stage)

    def _states_of(self, at: Arrangement, zero: Values) -> Callable[[tuple[float, float]], float]:
        """Bytes of the states of elements, of experts and of others, under some ZeRO."""
        stage, group = zero["layout.zero"], zero["layout.zero_group"]
        kept = self._states if zero["memory.optimizer"] == "device" else replace(self._states, optimizer=0)
        assert isinstance(stage, int)
        size = group if isinstance(group, int) else at.data_ranks.size
        of_experts = min(size, at.expert_data_ranks.size)

        def states(elements: tuple[float, float]) -> float:
            experts, others = elements
            held = kept.held(others, stage, size, self._per_node)
            return held + kept.held(experts, stage, of_experts, self._per_node)

        return states

    def _holds_whole_nodes(self, at: Arrangement) -> bool:
        """Whether each node's ranks are of one stage."""
        return at.stage_ranks % self._together == 0

    def _least(
        self, at: Arrangement, counts: Sequence[int], waiting: Sequence[float], states: Iterable[float]
    ) -> float:
        """Bytes of the rank that holds most; where a node has ranks of several stages, of a mean rank, which
        those of the fullest node hold at the least. `counts` are stages that are alike.
        """
        held = [one + other for one, other in zip(waiting, states, strict=True)]
        if self._holds_whole_nodes(at):
            return self._libraries + max(held)
        ranks = self.choices.ranks
        nodes = -(-ranks // self._together)
        mean = sum(count * each for count, each in zip(counts, held, strict=True)) / sum(counts)
        return (self._libraries + mean) * ranks / (nodes * self._together)

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
