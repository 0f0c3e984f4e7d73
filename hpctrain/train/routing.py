"""Routers' choices of a run: those of its first samples written down, and those of a file followed."""

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


def read_given(world: World, path: Path, shape: ModelShape) -> RoutingFile:
    """The choices of a file that fits the model, on all ranks. Collective; errors are agreed."""
    found: RoutingFile | None = None
    with world.agreement():
        if world.rank == 0:
            found = RoutingFile.read(path)
            found.require_fit(path, shape)
    given: RoutingFile = world.everyone.broadcast_object(found)
    return given


class ReplayedChoices:
    """Choices of the samples of a file, for the steps of a run."""

    def __init__(self, given: RoutingFile) -> None:
        self.given = given
        self.rows = {int(sample): row for row, sample in enumerate(given.samples)}

    def of(self, samples: range, rows: int, device: torch.device) -> dict[str, Tensor]:
        """By router [rows, s, k], of a micro-batch of so many rows; empty where no sample of it is known."""
        known = [(at, self.rows[sample]) for at, sample in enumerate(samples) if sample in self.rows]
        if not known:
            return {}
        ours, theirs = map(list, zip(*known, strict=True))
        result = {}
        for block, choices in zip(self.given.blocks.tolist(), self.given.choices, strict=True):
            values = np.full((rows, *choices.shape[1:]), -1, dtype=np.int64)
            values[ours] = choices[theirs]
            result[router_name(block)] = torch.from_numpy(values).to(device)
        return result


class RoutingRecorder(Hook):
    """Makes the RoutingChoices of every micro-batch of training; as a hook writes down those of the first
    samples.

    `recorded` samples of a run are written, those with the lowest numbers, into its folder: once all have
    been there, or at the run's end what there has been. A run that goes on from a checkpoint among them keeps
    what its file has of those before.
    """

    def __init__(
        self, engine: Engine, state: TrainState, recorded: int, given: RoutingFile | None = None
    ) -> None:
        self.engine, self.state, self.recorded = engine, state, recorded
        self.given = None if given is None else ReplayedChoices(given)
        self.first = state.samples
        self.path: Path | None = None
        self._made: list[tuple[int, RoutingChoices]] = []
        self._rows: dict[str, list[Tensor]] = {}
        self._done = recorded <= self.first

    def record_into(self, folder: Path) -> RoutingRecorder:
        """From here on choices are written down; this is to be among the hooks."""
        self.path = folder / ROUTING_FILE
        return self

    def choices(self, samples: range, rows: int) -> RoutingChoices | None:
        """What goes beside the inputs of a micro-batch of so many rows, the first of them these samples."""
        given = {} if self.given is None else self.given.of(samples, rows, self.engine.world.device)
        recorded = self.path is not None and not self._done and samples.start < self.recorded
        if not (given or (recorded and samples)):
            return None
        choices = RoutingChoices(recorded, given)
        if recorded:
            self._made.append((samples.start, choices))
        return choices

    def after_step(self, done: StepDone) -> None:
        """Take what was chosen off the device; write where it is all there. Collective."""
        for first, choices in self._made:
            for router, made in choices.recorded_experts.items():
                host = made.cpu()
                host[:, 0] += first
                self._rows.setdefault(router, []).append(host[host[:, 0] < self._end(done.state)])
        self._made.clear()
        if not self._done and done.state.samples >= self.recorded:
            self._write()

    def at_end(self, order: StepDecision) -> None:  # noqa: ARG002
        """Write what there has been, where that is not all."""
        if not self._done and self.state.samples > self.first:
            self._write()

    def _end(self, state: TrainState) -> int:
        """Behind the last sample that is written down."""
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
            # Every token is one rank's, and one after another fits into memory.
            of_block = world.everyone.empty(size, torch.int64).fill_(PADDING)
            for rows in self._rows.pop(router_name(block), []):
                own = rows.to(of_block.device)
                of_block[own[:, 0] - self.first, own[:, 1]] = own[:, 2:]
            world.everyone.all_reduce(of_block, "max")
            if world.rank == 0:
                choices[index] = of_block.cpu().numpy()
        with world.agreement():
            if world.rank == 0:
                found = RoutingFile(shape.experts.count, np.array(blocks, np.int32), samples, choices)
                self._with_earlier(found).write(self.path)

    def _with_earlier(self, found: RoutingFile) -> RoutingFile:
        """With what the run's file has of the samples before this part of the run."""
        assert self.path is not None
        if self.first and self.path.exists():
            try:
                earlier = RoutingFile.read(self.path)
                earlier.require_fit(self.path, self.engine.shape)
            except HpctrainError:  # whatever it is, it is not of this run
                return found
            return earlier.before(self.first).joined(found)
        return found

    def sentence(self, path: Path) -> str:
        """What is said of the choices that are followed."""
        assert self.given is not None
        return f"experts of {counted(len(self.given.rows), 'sample')} are read from {path}"
