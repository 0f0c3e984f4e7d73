"""Division of a module between blocks: what stages send and hold, and splits that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.pipeline.call_order import CallOrder, CallResult, find_call_order
from hpctrain.model.part import LayerRange


def tensors_between(order: CallOrder, block: int) -> list[CallResult]:
    """Return the tensors that a stage sends to the next one if a boundary is before a block.

    They are results of calls before the block that are used in it or after it.

    Args:
        order: Order of calls in a pass.
        block: Number of the block.
    """
    uses = order.last_uses.items()
    return sorted(each for each, last in uses if order.calls[each.call].position < 2 * block <= last)


@dataclass(frozen=True)
class StageMessage:
    """Size of what is sent between any two stages.

    Attributes:
        elements: Number of elements.
        dtype: The widest dtype of all tensors that are sent.
    """

    elements: int
    dtype: torch.dtype

    @staticmethod
    def of(order: CallOrder) -> StageMessage:
        """Return the size at the boundary where most is sent."""
        specs = [[order.spec(s) for s in tensors_between(order, k)] for k in range(1, len(order.blocks) + 1)]
        formats = [spec.dtype for each in specs for spec in each if spec.sendable]
        elements = max((sum(spec.elements for spec in each) for each in specs), default=0)
        return StageMessage(elements, reduce(torch.promote_types, formats) if formats else torch.float32)


@dataclass(frozen=True)
class StageSlice:
    """The slice of a module's pass that one pipeline stage computes.

    Attributes:
        order: Order of calls in the whole pass.
        span: Blocks of the stage.
    """

    order: CallOrder
    span: LayerRange

    def computes(self, position: int) -> bool:
        """Return True if this stage computes what is at a position."""
        if position == self.order.end_position:
            return self.span.has_head
        return 2 * self.span.first <= position < 2 * self.span.last

    def needs(self, positions: frozenset[int]) -> bool:
        """Return True if this stage computes one of these positions."""
        return any(map(self.computes, positions))

    def shares(self, positions: frozenset[int]) -> bool:
        """Return True if both this stage and another one compute some of these positions."""
        return self.needs(positions) and not all(map(self.computes, positions))

    def has_block(self, number: int) -> bool:
        """Return True if a block belongs to this stage."""
        return self.span.first <= number < self.span.last

    @property
    def remote_buffers(self) -> set[str]:
        """Names of the buffers in blocks of other stages."""
        others = [name for number, name in enumerate(self.order.blocks) if not self.has_block(number)]
        within = tuple(f"{name}." for name in others)
        return {name for name in self.order.buffers if name.startswith(within)} if others else set()

    @property
    def saved_elsewhere(self) -> set[str]:
        """Names of the buffers that other stages save: the first stage that uses a buffer does."""
        return {name for name, at in self.order.buffers.items() if not self.computes(min(at))}

    @property
    def received(self) -> list[CallResult]:
        """Tensors that this stage receives from the one before."""
        return [] if self.span.has_embedding else tensors_between(self.order, self.span.first)

    @property
    def sent(self) -> list[CallResult]:
        """Tensors that this stage sends to the next one."""
        return [] if self.span.has_head else tensors_between(self.order, self.span.last)


def require_call_order(deck: Deck, architecture: ModuleArchitecture) -> None:
    """Check that the calls of a module can be divided into pipeline stages, before a run starts.

    Args:
        deck: Deck of the run.
        architecture: Architecture of the module. Without a pipeline, all modules pass.

    Raises:
        HpctrainError: A block is not called once and in order, or the module does not run on "meta".
    """
    if not architecture.has_stages:
        return
    try:
        find_call_order(architecture)
    except HpctrainError as error:
        first, *frames = error.problems
        raise HpctrainError([deck.problem("layout.pipeline", first), *frames]) from error.__cause__


def module_split_problems(architecture: ModuleArchitecture, split: Sequence[int]) -> Iterable[str]:
    """Return the problems of a division into pipeline stages, as ends of sentences.

    Args:
        architecture: Architecture of the module.
        split: Number of blocks of each stage.
    """
    return order_problems(find_call_order(architecture), split) if architecture.has_stages else ()


def order_problems(order: CallOrder, split: Sequence[int]) -> Iterator[str]:
    """Yield the problems of a division into stages with `split` blocks each; see `module_split_problems`."""
    ends = list(accumulate(split))
    last = len(ends) - 1

    def part_of(position: int) -> int:
        return last if position == order.end_position else sum(end <= position // 2 for end in ends)

    for name, positions in order.parameters.items():
        parts = {part_of(position) for position in positions}
        if len(parts) > 1 and parts != {0, last}:
            yield (
                f"conflicts with the parameter {name}, which is used by "
                f"{_describe_positions(order, positions)} on several stages: only the "
                "first and the last stage can share a parameter (use a separate parameter for each block)"
            )
    for name in sorted(order.written & order.buffers.keys()):
        positions = order.buffers[name]
        if len({part_of(position) for position in positions}) > 1:
            yield (
                f"conflicts with the buffer {name}, which a forward pass changes and which is used by "
                f"{_describe_positions(order, positions)} on several stages"
            )
    for end in ends[:-1]:
        yield from _boundary_problems(order, end)


def _boundary_problems(order: CallOrder, block: int) -> Iterator[str]:
    """Yield what cannot be sent to the stage that begins with a block."""
    sources = tensors_between(order, block)
    for source in sources:
        call, spec = order.calls[source.call], order.spec(source)
        user = order.describe_position(order.last_uses[source])
        if not spec.sendable:
            yield (
                f"splits the module where {call.name} returns {spec}, which {user} uses on another "
                "stage: only floating-point tensors are sent between stages (every stage can compute what "
                "depends on the inputs alone, outside of modules with parameters)"
            )
    for number, last in order.last_side_uses.items():
        call = order.calls[number]
        if call.position < 2 * block <= last:
            yield (
                f"splits the module where {order.describe_position(last)}, on another stage, uses a tensor "
                f"of {call.name} that is not part of its result (return it)"
            )
    if not any(order.spec(source).requires_gradient for source in sources):
        where = order.describe_position(min(2 * block + 1, order.end_position))
        yield f"splits the module before {where}, where no tensor with a gradient is sent to the next stage"


def _describe_positions(order: CallOrder, positions: frozenset[int]) -> str:
    """Return positions in words, at most three of them."""
    places = [order.describe_position(position) for position in sorted(positions)]
    if len(places) > 3:
        places[2:-1] = []
        return f"{places[0]}, {places[1]}, ... and {places[-1]}"
    *others, last = places
    return f"{', '.join(others)} and {last}" if others else last
