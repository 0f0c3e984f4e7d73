"""Keys of a deck that are searched, and their values. Keys that the deck sets are not searched."""

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
from hpctrain.plan.time.machine_rates import GroupPlacement, MachineRates

RECOMPUTED = ("none", "selective", "full", "sqrt")

ORDERED = ("1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe-v")
"""Schedules whose order has a closed form. GPipe and the naive one are never faster than 1F1B."""

TRIED = (*ORDERED, "zb-v")
"""Schedules that are searched by default. The order of ZB-V is generated, which is fast."""

EVERY = (*ORDERED, *LIMITS)
"""All schedules, with those that need less memory and wait longer. Generating each takes about a second."""

Values = dict[str, object]
"""Values of keys, by their full names."""


def with_values(deck: Deck, values: Values) -> Deck:
    """Return the deck with other values of keys. They are not checked."""
    tables: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return deck.with_keys(**tables)


@dataclass(frozen=True)
class SearchSpace:
    """Values of the searched keys of a deck.

    Attributes:
        deck: The deck.
        ranks: Number of ranks.
        schedules: Schedules to search if the deck sets none.
    """

    deck: Deck
    ranks: int
    schedules: Sequence[str] = TRIED

    def is_set(self, key: str) -> bool:
        """Return True if the deck sets the key."""
        place = self.deck.sources.places.get(key)
        return place is not None and not place.note

    @property
    def free(self) -> tuple[str, ...]:
        """Keys that the deck does not set."""
        return tuple(key for key in SEARCH_KEYS if not self.is_set(key))

    def of(self, key: str, values: Sequence[object]) -> Sequence[object]:
        """Return the value of the deck if it sets the key, or else the given values."""
        return [self.deck.value(key)] if self.is_set(key) else values

    def of_layers(self) -> Iterator[Values]:
        """Yield the splits of layers over tensor, context and expert ranks.

        The model may not support all of them.
        """
        deck, most = self.deck, divisors(self.ranks)
        experts = divisors(deck.model.experts.count) if deck.model.experts else [1]
        for tensor, context in product(self.of("layout.tensor", most), self.of("layout.context", most)):
            assert isinstance(tensor, int) and isinstance(context, int)
            if self.ranks % (tensor * context):
                continue
            sequence_parallel = self.of("layout.sequence_parallel", [False, True] if tensor > 1 else [False])
            forms = self.of("layout.context_form", ["ring", "all_to_all"] if context > 1 else ["ring"])
            expert_sizes = self.of("layout.expert", experts)
            expert_tensor_sizes = self.of(
                "layout.expert_tensor", divisors(tensor) if deck.model.experts else [1]
            )
            names = ("sequence_parallel", "context_form", "expert", "expert_tensor")
            for values in product(sequence_parallel, forms, expert_sizes, expert_tensor_sizes):
                layer_values = {f"layout.{name}": value for name, value in zip(names, values, strict=True)}
                yield {"layout.tensor": tensor, "layout.context": context} | layer_values

    def of_micro_batches(self, at_most: int) -> list[int]:
        """Return the numbers of sequences of a micro-batch, up to `at_most`, the smallest first."""
        sizes = [size for size in divisors(self.deck.batch.global_size) if size <= at_most]
        return [size for size in self.of("batch.micro_size", sizes) if isinstance(size, int)]

    def of_stages(self, ranks: int) -> list[int]:
        """Return the numbers of pipeline stages for a number of ranks."""
        most = self.deck.model.layers + 2
        return [
            stages
            for stages in self.of("layout.pipeline", divisors(ranks))
            if isinstance(stages, int) and ranks % stages == 0 and stages <= most
        ]

    def of_schedules(self, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
        """Yield the schedules for a number of stages, with their numbers of chunks."""
        if stages == 1:
            yield from self._named(self.of("layout.schedule", ["1f1b"]), lambda _: [1])
            return
        most = (self.deck.model.layers + 2) // stages

        def chunk_counts(schedule: str) -> Sequence[int]:
            if schedule == "interleaved":
                return range(2, most + 1)
            if schedule not in SCHEDULE_NAMES:
                return [read_schedule_file(self.deck).chunks]
            return [2] if schedule in TWO_CHUNKS else [1]

        # On so few stages others may hold as much as one before them, and are that one.
        limits = {limit(stages): name for name, limit in reversed(list(LIMITS.items()))}
        tried = [name for name in self.schedules if name not in LIMITS or name in limits.values()]
        for schedule, chunks in self._named(self.of("layout.schedule", tried), chunk_counts):
            if schedule != "interleaved" or micro_batches % stages == 0:
                yield schedule, chunks

    def _named(
        self, schedules: Sequence[object], chunk_counts: Callable[[str], Sequence[int]]
    ) -> Iterator[tuple[str, int]]:
        for schedule in schedules:
            assert isinstance(schedule, str)
            for chunks in self.of("layout.chunks", chunk_counts(schedule)):
                assert isinstance(chunks, int)
                yield schedule, chunks

    def of_activations(self, machine: MachineRates) -> Iterator[Values]:
        """Yield the kinds of recomputation, and of offloading of activations."""
        homes = [home for home in ("host", "disk") if getattr(machine, home) is not None]
        for recompute in self.of("memory.recompute", RECOMPUTED):
            for home in self.of("memory.activations", ["keep", *homes]):
                yield {"memory.recompute": recompute, "memory.activations": home}

    def of_states(self, group: GroupPlacement, machine: MachineRates) -> Iterator[Values]:
        """Yield the choices of ZeRO, of its group, and of offloading of the optimizer state.

        ZeRO splits over all data ranks, or over those of a node, which need no links between nodes.
        """
        homes = [home for home in ("host", "disk") if getattr(machine, home) is not None]
        for zero in self.of("layout.zero", [0, 1, 2, 3] if group.size > 1 else [0]):
            inside = [group.ranks_per_node] if zero and 1 < group.ranks_per_node < group.size else []
            for size in self.of("layout.zero_group", [None, *inside]):
                for home in self.of("memory.optimizer", ["device", *homes]):
                    yield {"layout.zero": zero, "layout.zero_group": size, "memory.optimizer": home}
