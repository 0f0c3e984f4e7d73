"""All layouts of a deck, one after the other: what a search is held to. It has no tree and no bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from hpctrain.deck.check import check_deck, world_problems
from hpctrain.deck.schema import Deck
from hpctrain.deck.search_keys import SEARCH_KEYS
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.deck_schedule import outline_schedule
from hpctrain.pipeline.split import split_layers
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.time.layer_seconds import layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.plan.time.stage_nodes import StageNodes
from hpctrain.plan.time.step_plan import plan_step, split_by_seconds

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe-v", "zb-v")
HOMES = ("host", "disk")


class Timed(NamedTuple):
    """A deck with its step's seconds; `usual` where it has another split than a run makes by itself."""

    seconds: float
    deck: Deck
    usual: Timed | None = None


@dataclass(frozen=True)
class Brute:
    """Of a deck on so many ranks of a machine."""

    deck: Deck
    ranks: int
    machine: MachineRates
    schedules: Sequence[str] = SCHEDULES

    def _given(self, key: str) -> bool:
        place = self.deck.sources.places.get(key)
        return place is not None and not place.note

    @cached_property
    def _homes(self) -> list[str]:
        return [home for home in HOMES if getattr(self.machine, home) is not None]

    @cached_property
    def domains(self) -> Mapping[str, Sequence[object]]:
        """The values of every searched key, whatever others say; groups of ZeRO by `_groups`."""
        deck = self.deck
        ranks = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
        sizes = [size for size in range(1, deck.batch.global_size + 1) if deck.batch.global_size % size == 0]
        experts = range(1, (deck.model.experts.count if deck.model.experts else 1) + 1)
        most = deck.model.layers + 2
        values: dict[str, Sequence[object]] = {
            "layout.tensor": ranks,
            "layout.sequence_parallel": (False, True),
            "layout.context": ranks,
            "layout.context_form": ("ring", "all_to_all"),
            "layout.expert": experts,
            "layout.expert_tensor": ranks if deck.model.experts else (1,),
            "layout.pipeline": [size for size in ranks if size <= most],
            "layout.schedule": self.schedules,
            "layout.chunks": range(1, most // 2 + 1),
            "layout.zero": (0, 1, 2, 3),
            "layout.zero_group": (None, "some"),
            "batch.micro_size": sizes,
            "memory.recompute": ("none", "selective", "full", "sqrt"),
            "memory.activations": ("keep", *self._homes),
            "memory.optimizer": ("device", *self._homes),
        }
        assert {"layout.split"} >= set(SEARCH_KEYS) - set(values)
        return {key: [deck.value(key)] if self._given(key) else some for key, some in values.items()}

    def decks(self) -> Iterator[Deck]:
        """Those that a run could have, each layout once."""
        first = [key for key in self.domains if key.startswith("layout.") and "zero" not in key]
        rest = [key for key in self.domains if key not in first]
        for values in product(*(self.domains[key] for key in first)):
            layout = {key.removeprefix("layout."): value for key, value in zip(first, values, strict=True)}
            if self._doubled(layout):
                continue
            deck = self.deck.with_keys(layout=layout)
            if any(not problem.key.startswith("batch.") for problem in check_deck(deck, self.ranks)):
                continue
            for others in product(*(self.domains[key] for key in rest)):
                yield from self._checked(deck, dict(zip(rest, others, strict=True)))

    def _doubled(self, layout: Mapping[str, object]) -> bool:
        """Whether another layout is the same, or none of those that are searched."""
        tensor, context, expert_tensor = layout["tensor"], layout["context"], layout["expert_tensor"]
        pipeline, chunks, schedule = layout["pipeline"], layout["chunks"], layout["schedule"]
        assert isinstance(tensor, int) and isinstance(context, int) and isinstance(pipeline, int)
        assert isinstance(expert_tensor, int)
        alone = pipeline == 1 and not self._given("layout.schedule") and (schedule, chunks) != ("1f1b", 1)
        ring = context == 1 and layout["context_form"] != "ring" and not self._given("layout.context_form")
        return alone or ring or self.ranks % (tensor * context * pipeline) > 0 or tensor % expert_tensor > 0

    def _checked(self, deck: Deck, values: dict[str, object]) -> Iterator[Deck]:
        if values["layout.zero_group"] == "some":
            layout, per_node = deck.layout, deck.machine.ranks_per_node
            assert per_node is not None
            among = self.ranks // layout.pipeline // layout.tensor
            fitting = [size for size in range(1, among + 1) if size * layout.tensor <= per_node]
            together = max((size for size in fitting if among % size == 0), default=1)
            if together in {1, among} or not values["layout.zero"]:
                return
            values["layout.zero_group"] = together
        sections: dict[str, dict[str, object]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        whole = deck.with_keys(**sections)
        size = self.ranks // (whole.layout.pipeline * whole.layout.tensor)
        if whole.layout.zero and size == 1 and not self._given("layout.zero"):
            return  # cuts over nobody else
        if not world_problems(whole, self.ranks) and not check_deck(whole, self.ranks):
            yield whole

    def ordered(self, vocabulary: int) -> list[Timed]:
        """All of them with a step's seconds, the quickest first."""
        timed = []
        for deck in self.decks():
            try:
                usual = Timed(plan_step(deck, self.ranks, vocabulary, self.machine).seconds, deck)
            except HpctrainError:
                continue  # a schedule that so many micro-batches cannot have
            timed.append(usual)
            other = self._split_by_seconds(deck, vocabulary)
            if other is not None:
                seconds = plan_step(other, self.ranks, vocabulary, self.machine).seconds
                if seconds <= 0.995 * usual.seconds:
                    timed.append(Timed(seconds, other, usual))
        return sorted(timed, key=lambda each: each.seconds)

    def _split_by_seconds(self, deck: Deck, vocabulary: int) -> Deck | None:
        """With another split, whose longest stage is shorter by half a percent of the usual one's."""
        if deck.layout.pipeline == 1 or self._given("layout.split"):
            return None
        shape = ModelShape.of(deck, vocabulary)
        at = LayoutSizes.of(deck, self.ranks, deck.machine.ranks_per_node or self.machine.ranks_per_node)
        layers, ground = layer_sizes(shape, ()), StageNodes(self.machine, at)
        form = outline_schedule(deck)
        seconds = {layer: each.total for layer, each in ground.seconds_by_layer(layers, 0).items()}

        def longest(split: Sequence[int]) -> float:
            stages = [0.0] * form.stage_count
            for part, held in enumerate(split_layers(layers, split)):
                stages[form.stage_and_chunk(part)[0]] += sum(seconds[layer] for layer in held)
            return max(stages)

        usual = place_by_flops(deck, shape, at.data).split
        split = split_by_seconds(layers, ground, form)
        other = deck.with_keys(layout={"split": split})
        if longest(split) >= 0.995 * longest(usual) or check_deck(other, self.ranks):
            return None
        return other

    def best(self, budget: MemoryBudget, count: int) -> list[tuple[float, Deck]]:
        """The quickest that fit, and all others that are as quick as the last of them."""
        found: list[tuple[float, Deck]] = []
        instead = list[Deck]()

        def fits(deck: Deck) -> bool:
            demand = budget.demand(deck, budget.plan(deck))
            return demand is None or demand.fits

        for seconds, deck, usual in self.ordered(budget.vocabulary):
            if len(found) >= count and seconds > found[count - 1][0] * (1 + 1e-9):
                break
            if deck not in instead and (usual is None or fits(usual.deck)) and fits(deck):
                found.append((seconds, deck))
                instead += [usual.deck] if usual is not None else []
        return found
