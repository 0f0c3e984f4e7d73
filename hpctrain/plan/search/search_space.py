"""Which keys of a deck are searched, and the values that each may have: those that the deck does not give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hpctrain.deck.problem import divisors
from hpctrain.deck.schedules import SCHEDULE_NAMES, TWO_CHUNKS
from hpctrain.deck.schema import Deck
from hpctrain.deck.search_keys import SEARCH_KEYS
from hpctrain.pipeline.deck_schedule import read_schedule_file
from hpctrain.pipeline.v_schedule import LIMITS
from hpctrain.plan.time.machine_rates import MachineRates, Sharing

RECOMPUTED = ("none", "selective", "full", "sqrt")

ORDERED = ("1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe-v")
"""Schedules that are tried whose order is known without looking for it. GPipe and the naive one are no
quicker than 1F1B, and hold as much or more."""

TRIED = (*ORDERED, "zb-v")
"""Of those whose order is looked for, the one that is usually as published, and soon found."""

EVERY = (*ORDERED, *LIMITS)
"""With those that hold less, and wait longer; each of their orders is looked for about a second."""

Values = dict[str, object]
"""Values of keys, by their full names."""


def with_values(deck: Deck, values: Values) -> Deck:
    """The deck with these values of keys; nothing is checked."""
    tables: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return deck.with_keys(**tables)


@dataclass(frozen=True)
class SearchSpace:
    """The values of a deck's searched keys on so many ranks."""

    deck: Deck
    ranks: int
    schedules: Sequence[str] = TRIED

    def given(self, key: str) -> bool:
        """Whether the deck says what it is."""
        place = self.deck.sources.places.get(key)
        return place is not None and not place.note

    @property
    def free(self) -> tuple[str, ...]:
        """The keys that it does not give."""
        return tuple(key for key in SEARCH_KEYS if not self.given(key))

    def of(self, key: str, values: Sequence[object]) -> Sequence[object]:
        """These, or the one that the deck gives."""
        return [self.deck.value(key)] if self.given(key) else values

    def of_layers(self) -> Iterator[Values]:
        """How layers are split, whatever of it the model can have."""
        deck, most = self.deck, divisors(self.ranks)
        experts = divisors(deck.model.experts.count) if deck.model.experts else [1]
        for tensor, context in product(self.of("layout.tensor", most), self.of("layout.context", most)):
            assert isinstance(tensor, int) and isinstance(context, int)
            if self.ranks % (tensor * context):
                continue
            sequence_parallel = self.of("layout.sequence_parallel", [False, True] if tensor > 1 else [False])
            forms = self.of("layout.context_form", ["ring", "all_to_all"] if context > 1 else ["ring"])
            spread = self.of("layout.expert", experts)
            cut = self.of("layout.expert_tensor", divisors(tensor) if deck.model.experts else [1])
            names = ("sequence_parallel", "context_form", "expert", "expert_tensor")
            for values in product(sequence_parallel, forms, spread, cut):
                here = {f"layout.{name}": value for name, value in zip(names, values, strict=True)}
                yield {"layout.tensor": tensor, "layout.context": context} | here

    def of_micro_batches(self, at_most: int) -> list[int]:
        """Sequences of a micro-batch, the fewest first, where a data rank has so many at most."""
        sizes = [size for size in divisors(self.deck.batch.global_size) if size <= at_most]
        return [size for size in self.of("batch.micro_size", sizes) if isinstance(size, int)]

    def of_stages(self, ranks: int) -> list[int]:
        """Stages of a pipeline that so many ranks can be."""
        most = self.deck.model.layers + 2
        return [
            stages
            for stages in self.of("layout.pipeline", divisors(ranks))
            if isinstance(stages, int) and ranks % stages == 0 and stages <= most
        ]

    def of_schedules(self, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
        """The schedule of so many stages, and the parts of each."""
        if stages == 1:
            yield from self._named(self.of("layout.schedule", ["1f1b"]), lambda _: [1])
            return
        most = (self.deck.model.layers + 2) // stages

        def usual(schedule: str) -> Sequence[int]:
            if schedule == "interleaved":
                return range(2, most + 1)
            if schedule not in SCHEDULE_NAMES:
                return [read_schedule_file(self.deck).chunks]
            return [2] if schedule in TWO_CHUNKS else [1]

        # On so few stages others may hold as much as one before them, and are that one.
        limits = {limit(stages): name for name, limit in reversed(list(LIMITS.items()))}
        tried = [name for name in self.schedules if name not in LIMITS or name in limits.values()]
        for schedule, chunks in self._named(self.of("layout.schedule", tried), usual):
            if schedule != "interleaved" or micro_batches % stages == 0:
                yield schedule, chunks

    def _named(
        self, schedules: Sequence[object], usual: Callable[[str], Sequence[int]]
    ) -> Iterator[tuple[str, int]]:
        for schedule in schedules:
            assert isinstance(schedule, str)
            for chunks in self.of("layout.chunks", usual(schedule)):
                assert isinstance(chunks, int)
                yield schedule, chunks

    def of_kept(self, machine: MachineRates) -> Iterator[Values]:
        """What of a block is computed again, and where the rest waits for backward."""
        homes = [home for home in ("host", "disk") if getattr(machine, home) is not None]
        for recompute in self.of("memory.recompute", RECOMPUTED):
            for home in self.of("memory.activations", ["keep", *homes]):
                yield {"memory.recompute": recompute, "memory.activations": home}

    def of_states(self, group: Sharing, machine: MachineRates) -> Iterator[Values]:
        """What is cut over the ranks that train on other tokens: over all of these, or over those of a node,
        which do without the links between nodes; and where the optimizer's state lives.
        """
        homes = [home for home in ("host", "disk") if getattr(machine, home) is not None]
        for zero in self.of("layout.zero", [0, 1, 2, 3] if group.size > 1 else [0]):
            inside = [group.together] if zero and 1 < group.together < group.size else []
            for size in self.of("layout.zero_group", [None, *inside]):
                for home in self.of("memory.optimizer", ["device", *homes]):
                    yield {"layout.zero": zero, "layout.zero_group": size, "memory.optimizer": home}
