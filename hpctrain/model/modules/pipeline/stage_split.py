"""A module cut between blocks: what passes from part to part, which part holds what, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.pipeline.call_order import CallOrder, Source, order_of
from hpctrain.model.part import LayerRange


def crossing(order: CallOrder, block: int) -> list[Source]:
    """The tensors that are made before a block, by its number, and used from there on."""
    return sorted(
        source for source, last in order.uses.items() if order.calls[source.call].position < 2 * block <= last
    )


@dataclass(frozen=True)
class Passing:
    """What passes wherever a module is cut: so many `elements`, in one `format`, the widest that there is."""

    elements: int
    format: torch.dtype

    @staticmethod
    def of(order: CallOrder) -> Passing:
        """As much as at the place where it is most."""
        specs = [[order.spec(s) for s in crossing(order, k)] for k in range(1, len(order.blocks) + 1)]
        formats = [spec.dtype for each in specs for spec in each if spec.travels]
        elements = max((sum(spec.elements for spec in each) for each in specs), default=0)
        return Passing(elements, reduce(torch.promote_types, formats) if formats else torch.float32)


@dataclass(frozen=True)
class PartPass:
    """What the part of a `span` has of a module's pass."""

    order: CallOrder
    span: LayerRange

    def computes(self, position: int) -> bool:
        """Whether what is at a position is this part's to compute."""
        if position == self.order.end:
            return self.span.predicts
        return 2 * self.span.first <= position < 2 * self.span.last

    def uses(self, positions: frozenset[int]) -> bool:
        """Whether this part uses what these positions do."""
        return any(map(self.computes, positions))

    def shares(self, positions: frozenset[int]) -> bool:
        """Whether another part uses it too."""
        return self.uses(positions) and not all(map(self.computes, positions))

    def has_block(self, number: int) -> bool:
        """Whether a block is of this part."""
        return self.span.first <= number < self.span.last

    @property
    def buffers_elsewhere(self) -> set[str]:
        """Those that blocks of other parts have."""
        others = [name for number, name in enumerate(self.order.blocks) if not self.has_block(number)]
        within = tuple(f"{name}." for name in others)
        return {name for name in self.order.buffers if name.startswith(within)} if others else set()

    @property
    def kept_elsewhere(self) -> set[str]:
        """The buffers that other parts keep: the first one that uses it does."""
        return {name for name, at in self.order.buffers.items() if not self.computes(min(at))}

    @property
    def arriving(self) -> list[Source]:
        """What it needs of the parts before."""
        return [] if self.span.embeds else crossing(self.order, self.span.first)

    @property
    def leaving(self) -> list[Source]:
        """What it hands over to those behind."""
        return [] if self.span.predicts else crossing(self.order, self.span.last)


def require_order(deck: Deck, architecture: ModuleArchitecture) -> None:
    """HpctrainError where a module is to be cut in whose passes stages cannot follow each other."""
    if not architecture.cut:
        return
    try:
        order_of(architecture)
    except HpctrainError as error:
        first, *frames = error.problems
        raise HpctrainError([deck.problem("layout.pipeline", first), *frames]) from error.__cause__


def module_split_problems(architecture: ModuleArchitecture, split: Sequence[int]) -> Iterable[str]:
    """See `split_problems` in model/construction.py."""
    return cut_problems(order_of(architecture), split) if architecture.cut else ()


def cut_problems(order: CallOrder, split: Sequence[int]) -> Iterator[str]:
    """Why stages cannot compute a module that is cut into parts of so many blocks: ends of sentences."""
    ends = list(accumulate(split))
    last = len(ends) - 1

    def part_of(position: int) -> int:
        return last if position == order.end else sum(end <= position // 2 for end in ends)

    for name, positions in order.parameters.items():
        parts = {part_of(position) for position in positions}
        if len(parts) > 1 and parts != {0, last}:
            yield (
                f"conflicts with the parameter {name}, which is used by {_places(order, positions)} on "
                "several stages: only the first and the last stage can share a parameter (use a separate "
                "parameter for each block)"
            )
    for name in sorted(order.written & order.buffers.keys()):
        positions = order.buffers[name]
        if len({part_of(position) for position in positions}) > 1:
            yield (
                f"conflicts with the buffer {name}, which a forward pass changes and which is used by "
                f"{_places(order, positions)} on several stages"
            )
    for end in ends[:-1]:
        yield from _problems_at(order, end)


def _problems_at(order: CallOrder, block: int) -> Iterator[str]:
    """What cannot pass to the part that begins with a block."""
    sources = crossing(order, block)
    for source in sources:
        call, spec, last = order.calls[source.call], order.spec(source), order.uses[source]
        if not spec.travels:
            yield (
                f"splits the module where {call.name} returns {spec}, which {order.where(last)} uses on "
                "another stage: only floating-point tensors are sent between stages (every stage can "
                "compute what depends on the inputs alone, outside of modules with parameters)"
            )
    for number, last in order.left.items():
        call = order.calls[number]
        if call.position < 2 * block <= last:
            yield (
                f"splits the module where {order.where(last)}, on another stage, uses a tensor of "
                f"{call.name} that is not part of its result (return it)"
            )
    if not any(order.spec(source).learns for source in sources):
        where = order.where(min(2 * block + 1, order.end))
        yield f"splits the module before {where}, where no tensor with a gradient is sent to the next stage"


def _places(order: CallOrder, positions: frozenset[int]) -> str:
    """Positions in words, a few of many."""
    places = [order.where(position) for position in sorted(positions)]
    if len(places) > 3:
        places[2:-1] = []
        return f"{places[0]}, {places[1]}, ... and {places[-1]}"
    *others, last = places
    return f"{', '.join(others)} and {last}" if others else last
