"""Recording of the routers' choices for the first samples of a run, and replay of the choices in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import RoutingChoices
from hpctrain.model.mixtures.router import router_name
from hpctrain.model.shape import ModelShape
from hpctrain.text import counted
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.routing_file import PADDING, RoutingFile
from hpctrain.train.step import TrainState

ROUTING_FILE = "routing.h5"


def read_routing_file(world: World, path: Path, shape: ModelShape) -> RoutingFile:
    """Return the choices of a file on all ranks, after a check that they fit the model. Collective.

    Raises:
        HpctrainError: The file cannot be read, or does not fit; raised on all ranks.
    """
    file: RoutingFile | None = None
    with world.agreement():
        if world.rank == 0:
            file = RoutingFile.read(path)
            file.require_fit(path, shape)
    shared: RoutingFile = world.everyone.broadcast_object(file)
    return shared


class ReplayedChoices:
    """Choices of a file, for the steps of a run."""

    def __init__(self, file: RoutingFile) -> None:
        self.file = file
        self.rows = {int(sample): row for row, sample in enumerate(file.samples)}

    def of(self, samples: range, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return the choices of a micro-batch, [rows, s, k] by router; {} if its samples are not known."""
        known = [(at, self.rows[sample]) for at, sample in enumerate(samples) if sample in self.rows]
        if not known:
            return {}
        micro_rows, file_rows = map(list, zip(*known, strict=True))
        result = {}
        for block, choices in zip(self.file.blocks.tolist(), self.file.choices, strict=True):
            values = np.full((rows, *choices.shape[1:]), -1, dtype=np.int64)
            values[micro_rows] = choices[file_rows]
            result[router_name(block)] = torch.from_numpy(values).to(device)
        return result


class RoutingRecorder(Hook):
    """Hook that makes the RoutingChoices of micro-batches, and writes those of the first samples to a file.

    The file is written when all `recorded` samples have been trained on, or at the end of the run. A resumed
    run keeps the samples that its file has from before.

    Attributes:
        engine: The engine.
        state: Counters of the run.
        recorded: Number of samples to record, from the first sample of the run on.
        replayed: Choices to follow, if any.
        first: First sample of this part of the run.
        path: File to write; None before `record_into`.
    """

    def __init__(
        self, engine: Engine, state: TrainState, recorded: int, file: RoutingFile | None = None
    ) -> None:
        self.engine, self.state, self.recorded = engine, state, recorded
        self.replayed = None if file is None else ReplayedChoices(file)
        self.first = state.samples
        self.path: Path | None = None
        self._made: list[tuple[int, RoutingChoices]] = []
        self._rows: dict[str, list[Tensor]] = {}
        self._done = recorded <= self.first

    def record_into(self, folder: Path) -> RoutingRecorder:
        """Record choices from now on, as a hook of the run. Return the hook."""
        self.path = folder / ROUTING_FILE
        return self

    def choices(self, samples: range, rows: int) -> RoutingChoices | None:
        """Return the choices to record or follow in a micro-batch (see `ChoicesOf`), if there are any."""
        replayed = {} if self.replayed is None else self.replayed.of(samples, rows, self.engine.world.device)
        recorded = self.path is not None and not self._done and samples.start < self.recorded
        if not (replayed or (recorded and samples)):
            return None
        choices = RoutingChoices(recorded, replayed)
        if recorded:
            self._made.append((samples.start, choices))
        return choices

    def after_step(self, done: StepDone) -> None:
        """Copy the choices of the step to the host. Write the file if it is complete. Collective."""
        for first, choices in self._made:
            for router, made in choices.recorded_experts.items():
                host = made.cpu()
                host[:, 0] += first
                self._rows.setdefault(router, []).append(host[host[:, 0] < self._end(done.state)])
        self._made.clear()
        if not self._done and done.state.samples >= self.recorded:
            self._write()

    def at_end(self, decision: StepDecision) -> None:  # noqa: ARG002
        """Write the samples so far, if the file is not written yet. Collective."""
        if not self._done and self.state.samples > self.first:
            self._write()

    def _end(self, state: TrainState) -> int:
        """Return the number after the last recorded sample."""
        return min(self.recorded, state.samples)

    def _write(self) -> None:
        self._done = True
        assert self.path is not None
        world, shape = self.engine.world, self.engine.shape
        assert shape.experts is not None
        blocks = list(shape.mixture_blocks)
        samples = np.arange(self.first, self._end(self.state))
        size = (len(samples), shape.sequence, shape.experts.per_token)
        choices = np.zeros((len(blocks), *size) if world.rank == 0 else 0, dtype=np.int32)
        for index, block in enumerate(blocks):
            # Each token belongs to one rank. Block by block, since not all blocks fit into memory at once.
            of_block = world.everyone.empty(size, torch.int64).fill_(PADDING)
            for rows in self._rows.pop(router_name(block), []):
                own = rows.to(of_block.device)
                of_block[own[:, 0] - self.first, own[:, 1]] = own[:, 2:]
            world.everyone.all_reduce(of_block, "max")
            if world.rank == 0:
                choices[index] = of_block.cpu().numpy()
        with world.agreement():
            if world.rank == 0:
                file = RoutingFile(shape.experts.count, np.array(blocks, np.int32), samples, choices)
                self._with_earlier_samples(file).write(self.path)

    def _with_earlier_samples(self, file: RoutingFile) -> RoutingFile:
        """Return `file` with the earlier samples of the file in the run folder, if it fits."""
        assert self.path is not None
        if self.first and self.path.exists():
            try:
                earlier = RoutingFile.read(self.path)
                earlier.require_fit(self.path, self.engine.shape)
            except HpctrainError:  # the file does not belong to this run
                return file
            return earlier.before(self.first).joined(file)
        return file

    def sentence(self, path: Path) -> str:
        """Return a sentence about the choices that the run follows."""
        assert self.replayed is not None
        return f"experts of {counted(len(self.replayed.rows), 'sample')} are read from {path}"
