"""Step time of a pipeline that the simulator predicts from stages measured alone.

`bench train` compares the prediction with the measured step time.
"""

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
    """Predicted and measured step time in milliseconds: medians over the rounds.

    Attributes:
        forward: Forward pass of a micro-batch in each stage, all chunks together.
        backward: Backward pass of a micro-batch in each stage, all chunks together.
        communication: Message between two stages.
        pipeline: Simulated time of the pipeline schedule.
        rest: Measured time outside of the pipeline, such as synchronization and optimizer step.
        predicted: Sum of `pipeline` and `rest`.
        measured: Measured step time.
        ratio: Measured time relative to the predicted time, a median of the ratios in each round.
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
    """Measurement of the stages of an engine after each round of its steps.

    Each rank performs the actions of its stage in their order, with dummy messages, so that no rank waits for
    another. All ranks do so at the same time, since ranks of a node share its memory bandwidth.

    Attributes:
        engine: The engine.
        timer: Timer of the actions of this rank's stage.
        rounds: Times of all parts, and the prediction, of each round.
    """

    def __init__(self, engine: Engine, step: Step) -> None:
        self.engine = engine
        rank, ranks = engine.mesh.coordinate("data"), engine.mesh.size("data")
        micro = next(step.batches.step(0, step.micro_size * ranks, rank, ranks, step.micro_size))
        scale = torch.tensor(1.0 / max(1, micro.targets.numel()), device=engine.world.device)
        batch = step.prepare(micro, scale, step.dropout_source(TrainState(), 0))
        self.timer = ActionTimer(engine.stage.models, engine.stage.layer_context, batch)
        self.rounds: list[tuple[StageTimes, PipelinePrediction]] = []

    def __call__(self, measured: float, phases: dict[str, float]) -> None:
        """Measure the stages, and record a prediction for a round. Collective.

        Args:
            measured: Seconds per step of this rank.
            phases: Seconds per step of this rank in each phase.
        """
        engine, schedule = self.engine, self.engine.schedule
        world = engine.world
        # One backward pass more than there will be, so that no bucket is complete and none is reduced.
        engine.stage.synchronizer.start(schedule.micro_batches + 1)
        world.everyone.barrier()
        part_times = self.timer.run(schedule.stages[engine.mesh.coordinate("pipeline")])
        times = gather_part_times(part_times, schedule, engine.mesh, self.timer.hidden)
        # The stage that ends last does not wait for others, and thus has the shortest synchronization.
        synchronize, step, other = (phases.get(name, 0.0) for name in ("synchronize", "step", "other"))
        local_seconds = torch.tensor([-synchronize, step, other, measured], dtype=torch.float64)
        negative, step, other, slowest = world.everyone.all_reduce(local_seconds, "max").tolist()
        forward = self._stage_times(times.forward)
        backward = self._stage_times(times.input_gradient, times.weight_gradient)
        pipeline, rest = simulate(schedule, times).cost, -negative + step + other
        assert isinstance(times.communication, float)
        seconds = times.communication, pipeline, rest, pipeline + rest, slowest
        ratio = slowest / (pipeline + rest)
        prediction = PipelinePrediction(forward, backward, *(*(1e3 * each for each in seconds), ratio))
        self.rounds.append((times, prediction))

    def prediction(self) -> PipelinePrediction:
        """Return the medians over the rounds."""
        predictions = (astuple(prediction) for _, prediction in self.rounds)
        forward, backward, *others = zip(*predictions, strict=True)
        stages = [[median(stage) for stage in zip(*rows, strict=True)] for rows in (forward, backward)]
        return PipelinePrediction(stages[0], stages[1], *map(median, others))

    def _stage_times(self, *passes: float | Sequence[float]) -> list[float]:
        """Return the milliseconds of each stage from the seconds of each part in some passes."""
        schedule = self.engine.schedule
        seconds = [0.0] * schedule.stage_count
        for part in range(schedule.parts):
            for values in passes:
                assert not isinstance(values, (int, float))
                seconds[schedule.stage_and_chunk(part)[0]] += values[part]
        return [1e3 * each for each in seconds]


def stage_lines(prediction: PipelinePrediction) -> list[str]:
    """Return a table with a row for each stage."""
    rows = [["stage", "forward ms", "backward ms"]]
    for stage, (forward, backward) in enumerate(zip(prediction.forward, prediction.backward, strict=True)):
        rows.append([str(stage), f"{forward:.2f}", f"{backward:.2f}"])
    return table(rows)


def step_time_line(prediction: PipelinePrediction) -> str:
    """Return a sentence on the predicted and the measured step time."""
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
    seconds = [0.0] * (3 * schedule.parts)
    for chunk in range(schedule.chunks):
        forward, both, first, second = (measured.get((kind, chunk), 0.0) for kind in ("F", "B", "I", "W"))
        # If both were measured, separate times of the two halves are more exact.
        backward = (first, second) if first else (both, 0.0)
        part = schedule.part(stage, chunk)
        seconds[3 * part : 3 * part + 3] = (forward, *backward)
    *slowest, communication = slowest_ranks(
        mesh.world, [*seconds, message_seconds(mesh.group("pipeline"), hidden)]
    )
    return StageTimes(slowest[0::3], slowest[1::3], slowest[2::3], communication)
