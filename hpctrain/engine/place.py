"""Where the layers of a deck go, and the schedule that runs them; by measured times where they matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.mesh import Mesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.layer_times import LayerTimes, measure_layers
from hpctrain.engine.sizes import micro_batches
from hpctrain.model.build import bare_model
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.groups import LayerGroups
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import SEARCHED
from hpctrain.pipeline.split import balanced_split, cut, even_split
from hpctrain.pipeline.wanted import make_schedule, outline


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
            text += "; measured, a micro-batch: " + ", ".join(
                f"{kind} {1e3 * times.total:.3g} ms" for kind, times in self.times.of_kind.items()
            )
        return text


def with_split(deck: Deck, split: Sequence[int] | None) -> Deck:
    """The deck with a split that was found before, where it wants a balanced one."""
    if split is None or deck.layout.split != "balanced":
        return deck
    return deck.with_keys(layout={"split": tuple(split)})


def unmeasured_split(deck: Deck, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of every part as the deck gives them; even where it does not, or wants them measured."""
    split = deck.layout.split
    if split is None or split == "balanced":
        return tuple(even_split(deck.model.layers, schedule.parts))
    return split


def place_layers(deck: Deck, shape: ModelShape, groups: LayerGroups, mesh: Mesh) -> Placement:
    """The deck's schedule and split, the same on all ranks. Collective.

    Measures for `layout.split = "balanced"` and for schedules that are searched for; the latter's order
    then varies from run to run, but not what it computes. Raises as `make_schedule` does.
    """
    layout, data = deck.layout, mesh.size("data")
    searched = layout.pipeline > 1 and layout.schedule in SEARCHED
    schedule = None if searched else make_schedule(deck, data)
    form = outline(deck) if schedule is None else schedule(micro_batches(deck, data))
    times, layers = None, bare_model(shape).layers
    if searched or (layout.split == "balanced" and form.parts > 1):
        times = measure_layers(deck, shape, groups, mesh)
    if layout.split == "balanced" and times is not None:
        split = tuple(balanced_split([times.of_kind[layer.kind].total for layer in layers], form))
    else:
        split = unmeasured_split(deck, form)
    if schedule is None:
        assert times is not None
        schedule = make_schedule(deck, data, times.of_parts(cut(layers, split)))
    return Placement(schedule, split, times)
