"""What the simulator says a pipeline's step takes, from stages measured alone, beside what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.costs.action_timer import ActionTimer, Measured
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.layer_times import message_seconds, slowest_ranks
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.text import table
from hpctrain.train.step import Step, TrainState


@dataclass(frozen=True)
class PipelinePrediction:
    """Milliseconds; medians over the rounds.

    `forward` and `backward` are those of one micro-batch in each stage, all its chunks together.
    `predicted` is the simulated pipeline and `rest`: synchronization and step, as they were measured.
    `ratio` is measured over predicted, taken within each round.
    """

    forward: list[float]
    backward: list[float]
    communication: float
    pipeline: float
    rest: float
    predicted: float
    measured: float
    ratio: float


class StageProbe:
    """Measures the stages of an engine after each round of its steps.

    All ranks work at the same time, as they do in a step, since those of a node share its memory; but none
    waits for another: each does the actions of its stage in their order on stand-ins for messages.
    """

    def __init__(self, engine: Engine, step: Step) -> None:
        self.engine = engine
        rank, ranks = engine.mesh.coordinate("data"), engine.mesh.size("data")
        micro = next(step.batches.step(0, step.micro_size * ranks, rank, ranks, step.micro_size))
        scale = torch.tensor(1.0 / max(1, micro.targets.numel()), device=engine.world.device)
        batch = step.prepare(micro, scale, step.dropout_source(TrainState(), 0))
        self.replay = ActionTimer(engine.stage.models, engine.stage.layer_context, batch)
        self.rounds: list[tuple[StageTimes, PipelinePrediction]] = []

    def __call__(self, measured: float, phases: dict[str, float]) -> None:
        """Take note of a round: seconds a step, and of each phase of it, on this rank. Collective."""
        engine, schedule = self.engine, self.engine.schedule
        world = engine.world
        # One backward pass more than will come, so that no bucket is ever final.
        engine.stage.synchronizer.start(schedule.micro_batches + 1)
        world.everyone.barrier()
        alone = self.replay.run(schedule.stages[engine.mesh.coordinate("pipeline")])
        times = gather_part_times(alone, schedule, engine.mesh, self.replay.hidden)
        # The stage that ends last does not wait for others before it synchronizes.
        synchronize, *others = (phases.get(name, 0.0) for name in ("synchronize", "step", "other"))
        figures = [-synchronize, *others, measured]
        shared = world.everyone.all_reduce(torch.tensor(figures, dtype=torch.float64), "max").tolist()
        forward = self._of_stages(times.forward)
        backward = self._of_stages(times.input_gradient, times.weight_gradient)
        pipeline, rest = simulate(schedule, times).cost, -shared[0] + shared[1] + shared[2]
        assert isinstance(times.communication, float)
        seconds = times.communication, pipeline, rest, pipeline + rest, shared[3]
        ratio = shared[3] / (pipeline + rest)
        one = PipelinePrediction(forward, backward, *(*(1e3 * each for each in seconds), ratio))
        self.rounds.append((times, one))

    def prediction(self) -> PipelinePrediction:
        """All rounds together."""
        forward, backward, *others = zip(*(astuple(one) for _, one in self.rounds), strict=True)
        stages = [[median(stage) for stage in zip(*rows, strict=True)] for rows in (forward, backward)]
        return PipelinePrediction(stages[0], stages[1], *map(median, others))

    def _of_stages(self, *passes: float | Sequence[float]) -> list[float]:
        """Milliseconds of each stage, of seconds of each part."""
        schedule = self.engine.schedule
        seconds = [0.0] * schedule.stage_count
        for part in range(schedule.parts):
            for values in passes:
                assert not isinstance(values, (int, float))
                seconds[schedule.stage_and_chunk(part)[0]] += values[part]
        return [1e3 * each for each in seconds]


def stage_lines(prediction: PipelinePrediction) -> list[str]:
    """A table of the stages, a row each."""
    rows = [["stage", "forward ms", "backward ms"]]
    for stage, (forward, backward) in enumerate(zip(prediction.forward, prediction.backward, strict=True)):
        rows.append([str(stage), f"{forward:.2f}", f"{backward:.2f}"])
    return table(rows)


def step_time_line(prediction: PipelinePrediction) -> str:
    """The prediction and what came of it."""
    return (
        f"step time: predicted {prediction.predicted:.1f} ms ({prediction.pipeline:.1f} ms of the "
        "pipeline, from these times "
        f"and {prediction.communication:.2f} ms per message; {prediction.rest:.1f} ms outside of the "
        "pipeline, "
        f"measured); measured {prediction.measured:.1f} ms, {prediction.ratio:.3f} of the prediction"
    )


def gather_part_times(measured: Measured, schedule: Schedule, mesh: Mesh, hidden: Tensor) -> StageTimes:
    """Return the times of all parts of a pipeline, from the measurements of each stage. Collective.

    The slowest rank of each stage counts.

    Args:
        measured: Result of `ActionTimer.run` for the parts of this stage.
        schedule: Pipeline schedule. Without actions "I" and "W", backward passes count as input gradient.
        mesh: Arrangement of the ranks.
        hidden: Hidden states of a micro-batch, to measure messages between stages.
    """
    stage = mesh.coordinate("pipeline")
    figures = [0.0] * (3 * schedule.parts)
    for chunk in range(schedule.chunks):
        forward, both, first, second = (measured.get((kind, chunk), 0.0) for kind in ("F", "B", "I", "W"))
        # If both were measured, separate times of the two halves are more exact.
        backward = (first, second) if first else (both, 0.0)
        part = schedule.part(stage, chunk)
        figures[3 * part : 3 * part + 3] = (forward, *backward)
    *slowest, communication = slowest_ranks(
        mesh.world, [*figures, message_seconds(mesh.group("pipeline"), hidden)]
    )
    return StageTimes(slowest[0::3], slowest[1::3], slowest[2::3], communication)
