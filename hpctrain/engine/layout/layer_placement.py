"""Division of a model's layers into pipeline parts, and the schedule that runs them.

Parts are balanced by FLOPs or by measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.mesh import Mesh
from hpctrain.costs.balanced_split import balanced_split
from hpctrain.costs.layer_flops import layer_flops
from hpctrain.costs.pass_times import LayerTimes, times_of_parts
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_times import measure_layers
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model, split_problems
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.deck_schedule import outline_schedule, schedule_builder
from hpctrain.pipeline.generate import SEARCHED_SCHEDULES
from hpctrain.pipeline.split import split_layers


@dataclass(frozen=True)
class LayerPlacement:
    """Division of a model into pipeline parts.

    Attributes:
        schedule_of: Returns the schedule for a number of micro-batches.
        split: Number of blocks of each part, in the order of the model.
        times: Measured times of layers; None if none were needed.
    """

    schedule_of: Callable[[int], Schedule]
    split: tuple[int, ...]
    times: LayerTimes | None = None

    def __str__(self) -> str:
        text = f"layers of each part: {', '.join(map(str, self.split))}"
        if self.times is not None:
            text += "; measured per micro-batch: " + ", ".join(
                f"{kind} {1e3 * times.total:.3g} ms" for kind, times in self.times.of_kind.items()
            )
        return text


def with_split(deck: Deck, split: Sequence[int] | None) -> Deck:
    """Return the deck with a split of an earlier run, unless the deck has one."""
    if split is None or isinstance(deck.layout.split, tuple):
        return deck
    return deck.with_keys(layout={"split": tuple(split)})


def place_by_flops(deck: Deck, architecture: Architecture, data: int) -> LayerPlacement:
    """Return the deck's schedule and split without measuring. Local.

    Without a split in the deck, the result minimizes the FLOPs of the largest stage, and then of the largest
    part. It also replaces a split that a run would measure. It raises what `schedule_builder` raises.

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        data: Number of data ranks.
    """
    flops = layer_flops(deck, architecture)
    split = split_by_flops(deck, architecture, schedule_without_search(deck, data))
    times = times_of_parts(split_layers(flops, split)) if _needs_search(deck) else None
    _require_parts(deck, architecture, split)
    return LayerPlacement(schedule_builder(deck, data, times), split)


def split_by_flops(deck: Deck, architecture: Architecture, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of blocks of each part of a schedule.

    It is the deck's own split, or else the one that minimizes the FLOPs of the largest stage.
    """
    if isinstance(deck.layout.split, tuple):
        return deck.layout.split
    if schedule.parts == 1:
        return (architecture.block_count,)
    flops = [passes.total for passes in layer_flops(deck, architecture)]
    return _balance_split(flops, architecture, schedule)


def place_layers(
    deck: Deck, architecture: Architecture, layer_context: LayerContext, mesh: Mesh
) -> LayerPlacement:
    """Return the deck's schedule and split, which are the same on all ranks. Collective.

    It measures layers for `layout.split = "balanced"` and for schedules that a search finds. The order of
    actions of the latter may then differ between runs, but not what they compute. It raises what
    `schedule_builder` raises.
    """
    layout, data = deck.layout, mesh.size("data")
    schedule = schedule_without_search(deck, data)
    is_balanced = layout.split == "balanced" and schedule.parts > 1
    if not is_balanced and not _needs_search(deck):
        return place_by_flops(deck, architecture, data)
    times, layers = measure_layers(deck, architecture, layer_context, mesh), bare_model(architecture).layers
    if is_balanced:
        split = _balance_split([times.of_kind[layer.kind].total for layer in layers], architecture, schedule)
    else:
        split = split_by_flops(deck, architecture, schedule)
    _require_parts(deck, architecture, split)
    of_parts = times.of_parts(split_layers(layers, split)) if _needs_search(deck) else None
    return LayerPlacement(schedule_builder(deck, data, of_parts), split, times)


def _balance_split(costs: Sequence[float], architecture: Architecture, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of blocks of each part that balances the costs of the stages.

    Args:
        costs: Times or FLOPs of all layers, in the order of the model.
        architecture: Architecture of the model. If it begins with a block, the first part keeps that block,
            which then counts as part of the embedding.
        schedule: Schedule with the stages and parts.
    """
    if not architecture.begins_with_block:
        return tuple(balanced_split(costs, schedule))
    first, block, *rest = costs
    split = balanced_split([first + block, *rest], schedule) if len(rest) > 1 else [0] * schedule.parts
    return 1 + split[0], *split[1:]


def _require_parts(deck: Deck, architecture: Architecture, split: Sequence[int]) -> None:
    """Raise HpctrainError if the model cannot be split like this."""
    key = "layout.split" if isinstance(deck.layout.split, tuple) else "layout.pipeline"
    problems = [deck.problem(key, each) for each in dict.fromkeys(split_problems(architecture, split))]
    if problems:
        raise HpctrainError(problems)


def schedule_without_search(deck: Deck, data: int) -> Schedule:
    """Return a schedule with the stages, chunks and placement of the deck's schedule, without a search."""
    return (
        outline_schedule(deck)
        if _needs_search(deck)
        else schedule_builder(deck, data)(micro_batches(deck, data))
    )


def _needs_search(deck: Deck) -> bool:
    """Return True if a search with layer times finds the schedule."""
    return deck.layout.pipeline > 1 and deck.layout.schedule in SEARCHED_SCHEDULES
