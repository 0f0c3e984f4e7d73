"""Predicted bubble of a pipeline and FLOPs of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from hpctrain.costs.layer_flops import layer_flops
from hpctrain.costs.pass_times import times_of_parts
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.model.construction import architecture_of
from hpctrain.pipeline.simulate import simulate
from hpctrain.pipeline.split import split_layers
from hpctrain.text import counted


@dataclass(frozen=True)
class PipelinePlan:
    """Split of a model over pipeline stages.

    Attributes:
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches per step.
        split: Number of blocks of each part of the model.
        loads: FLOPs of each stage, relative to the mean.
        waiting: Share of forward and backward passes in which ranks wait, if all ranks are equally fast and
            messages take no time.
    """

    schedule: str
    micro_batches: int
    split: tuple[int, ...]
    loads: tuple[float, ...]
    waiting: float

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {"split": list(self.split), "stage_loads": list(self.loads), "waiting": self.waiting}

    def __str__(self) -> str:
        return (
            f"{self.schedule}, {counted(self.micro_batches, 'micro-batch')}, blocks per chunk "
            f"{', '.join(map(str, self.split))}: the largest stage has {max(self.loads):.2f} times the mean "
            f"FLOPs, and the bubble is {100 * self.waiting:.0f}% of a step"
        )


def plan_pipeline(deck: Deck, ranks: int, vocabulary: int) -> PipelinePlan | None:
    """Return the plan of a deck with several pipeline stages; None with one stage.

    Raises:
        HpctrainError: A run would fail with this error.
    """
    if deck.layout.pipeline == 1:
        return None
    data, architecture = axis_sizes(deck, ranks)["data"], architecture_of(deck, vocabulary)
    placement, passes = place_by_flops(deck, architecture, data), micro_batches(deck, data)
    schedule = placement.schedule_of(passes)
    simulation = simulate(
        schedule, times_of_parts(split_layers(layer_flops(deck, architecture), placement.split))
    )
    work = [simulation.cost - idle for idle in simulation.idle]
    loads = tuple(each / fmean(work) for each in work)
    return PipelinePlan(
        schedule.name, passes, placement.split, loads, fmean(simulation.idle) / simulation.cost
    )
