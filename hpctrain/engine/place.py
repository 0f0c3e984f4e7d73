"""Where the layers of a deck go, and the schedule that runs them: by FLOPs, or by measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.mesh import Mesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.layer_flops import layer_flops
from hpctrain.engine.layer_times import LayerTimes, measure_layers, times_of_parts
from hpctrain.engine.sizes import micro_batches
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import bare_model, split_problems
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.deck_schedule import make_schedule, outline_schedule
from hpctrain.pipeline.generate import SEARCHED_SCHEDULES
from hpctrain.pipeline.split import balanced_split, split_layers


@dataclass(frozen=True)
class Placement:
    """The schedule of any number of micro-batches, and the blocks of each part of the model, in order.

    `times` are those that were measured for them, None where none were needed.
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
    """The deck with a split that was found before, where it does not give one."""
    if split is None or isinstance(deck.layout.split, tuple):
        return deck
    return deck.with_keys(layout={"split": tuple(split)})


def placed_by_flops(deck: Deck, architecture: Architecture, data: int) -> Placement:
    """The deck's schedule on so many data ranks and its split, as the deck alone tells them.

    A split that is not given makes the heaviest stage, and then the heaviest part, as light as can be by
    FLOPs; so does what stands in for one that would be measured. Raises as `make_schedule` does.
    """
    flops = layer_flops(deck, architecture)
    split = split_by_flops(deck, architecture, pipeline_form(deck, data))
    times = times_of_parts(split_layers(flops, split)) if _searched(deck) else None
    _require_parts(deck, architecture, split)
    return Placement(make_schedule(deck, data, times), split)


def split_by_flops(deck: Deck, architecture: Architecture, form: Schedule) -> tuple[int, ...]:
    """Blocks of every part of a schedule, as in `placed_by_flops`."""
    if isinstance(deck.layout.split, tuple):
        return deck.layout.split
    if form.parts == 1:
        return (architecture.block_count,)
    return _balanced([passes.total for passes in layer_flops(deck, architecture)], architecture, form)


def place_layers(deck: Deck, architecture: Architecture, groups: LayerContext, mesh: Mesh) -> Placement:
    """The deck's schedule and split, the same on all ranks. Collective.

    Measures for `layout.split = "balanced"` and for schedules that are searched for; the latter's order
    then varies from run to run, but not what it computes. Raises as `make_schedule` does.
    """
    layout, data = deck.layout, mesh.size("data")
    form = pipeline_form(deck, data)
    measured = layout.split == "balanced" and form.parts > 1
    if not measured and not _searched(deck):
        return placed_by_flops(deck, architecture, data)
    times, layers = measure_layers(deck, architecture, groups, mesh), bare_model(architecture).layers
    if measured:
        split = _balanced([times.of_kind[layer.kind].total for layer in layers], architecture, form)
    else:
        split = split_by_flops(deck, architecture, form)
    _require_parts(deck, architecture, split)
    of_parts = times.of_parts(split_layers(layers, split)) if _searched(deck) else None
    return Placement(make_schedule(deck, data, of_parts), split, times)


def _balanced(times: Sequence[float], architecture: Architecture, form: Schedule) -> tuple[int, ...]:
    """As `balanced_split`; a block that the first part has to have is of what it does besides."""
    if not architecture.begins_with_block:
        return tuple(balanced_split(times, form))
    first, block, *rest = times
    others = balanced_split([first + block, *rest], form) if len(rest) > 1 else [0] * form.parts
    return 1 + others[0], *others[1:]


def _require_parts(deck: Deck, architecture: Architecture, split: Sequence[int]) -> None:
    """HpctrainError where the model cannot be split so."""
    key = "layout.split" if isinstance(deck.layout.split, tuple) else "layout.pipeline"
    problems = [deck.problem(key, each) for each in dict.fromkeys(split_problems(architecture, split))]
    if problems:
        raise HpctrainError(problems)


def pipeline_form(deck: Deck, data: int) -> Schedule:
    """A schedule with the stages, chunks and placement of the deck's. Raises as `make_schedule` does."""
    return outline_schedule(deck) if _searched(deck) else make_schedule(deck, data)(micro_batches(deck, data))


def _searched(deck: Deck) -> bool:
    """Whether the schedule is one that times are needed for."""
    return deck.layout.pipeline > 1 and deck.layout.schedule in SEARCHED_SCHEDULES
