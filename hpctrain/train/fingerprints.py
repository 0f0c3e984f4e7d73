"""Fingerprints of all tensors of a step: samples, weights, activations, gradients and optimizer state.

`train/divergence.py` compares two steps by their fingerprints. Taking them changes no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.data.batches import MicroBatch
from hpctrain.fault_checks.fingerprint import SUMS, Fingerprint, Indices, Sums
from hpctrain.memory.scratch import Flat
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.part import Layer, ModelPart
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.outputs import in_backward
from hpctrain.train.trainer import Trainer

PHASES = ("start", "samples", "forward", "gradient", "reduction", "update")
"""Phases of a step, in their order.

They are: weights and state before the step; its samples; outputs of blocks, and the loss; gradients of each
rank before the reduction; reduced gradients and their norm; learning rate, weights and state after the step.
"""

LOSS, NORM, RATE = "loss", "gradient norm", "learning rate"
AS_COMPUTED = "/computed/"
"""Prefix of the names of complete weights that layers compute with, which ZeRO gathers from shards."""

Key = tuple[str, str]
_Copy = tuple[int, int]
_ONE: _Copy = (0, 1)
_LAST = 1e9  # place after all others


@dataclass(frozen=True)
class Print:
    """Fingerprint of one tensor in one phase of a step, over all ranks.

    Replicas of an element count as one in `sketch` and `broken`, and gradients before the reduction as their
    sum.

    Attributes:
        phase: The phase, from `PHASES`.
        name: Dataset of a checkpoint for weights and state, else a name for messages.
        bits: Checksum of each rank's piece.
        total: Checksum of the complete tensor, with each element once.
        sketch: Sketch of the finite elements, from which the norm of a difference is estimated.
        broken: Number of elements that are not finite.
        elements: Number of elements.
    """

    phase: str
    name: str
    bits: tuple[int, ...]
    total: int
    sketch: Sums
    broken: float
    elements: float


@dataclass(frozen=True)
class StepPrints:
    """Fingerprints of a step, equal on all ranks.

    Attributes:
        step: Number of the step.
        prints: The fingerprints, in the order of the step.
        samples: Hash of each sample, by its number.
        metrics: Loss, gradient norm and learning rate, by name. They have fingerprints, too.
    """

    step: int
    prints: list[Print]
    samples: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def by_key(self) -> dict[Key, Print]:
        """Return the fingerprints by phase and name."""
        return {(each.phase, each.name): each for each in self.prints}


@dataclass
class _LocalPrint:
    """Local part of a Print.

    Attributes:
        place: Sort key within the phase.
        fingerprint: Fingerprint of the local elements.
        total: Local part of the checksum of the complete tensor.
    """

    place: tuple[float, float]
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    total: int = 0


class Fingerprints(Hook):
    """Hook that takes the fingerprints of each step of a trainer; it must be the trainer's last hook.

    It is collective, like the step.

    Attributes:
        trainer: The trainer.
        engine: Its engine.
        last: Fingerprints of the last step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.engine = trainer, trainer.engine
        # The statistics hold the number of the current micro-batch, even if layers record nothing.
        trainer.step.executor.statistics = self.engine.stage.layer_context.statistics
        self.last: StepPrints | None = None
        self._rows: dict[Key, _LocalPrint] | None = None
        self._samples: dict[int, int] = {}
        self._present: list[tuple[int, int]] = []
        self._summed = False
        mesh = self.engine.mesh
        axes = ("pipeline", "context", "tensor")
        is_first = all(mesh.coordinate(axis) == 0 for axis in axes)
        self._of_tokens: _Copy = (0 if is_first else 1, int(np.prod([mesh.size(axis) for axis in axes])))
        world = self.engine.world
        self._of_all: _Copy = (world.rank, world.size)
        # The two stages of a tied table shard it at different places, so that shards are not replicas.
        self._tied = {
            segment.parameter.shard.name: (segment.replication.stage_copy, segment.replication.stage_copies)
            for bucket in self.engine.stage.buckets
            for segment in bucket.segments
            if segment.replication.tied_pipeline is not None and bucket.sharding.zero > 0
        }
        self._places = {
            each.shard.name: (float(number), float(index))
            for part in self.engine.stage.models
            for number, layer in _numbered(part)
            for index, each in enumerate(layer.all_parameters)
        }

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Take the fingerprints before a step, and register the hooks that take those within it."""
        self._rows, self._samples, self._summed = {}, {}, False
        self._state("start")
        step_of, synchronizer = self.trainer.step, self.engine.stage.synchronizer
        before = step_of.before_pass, synchronizer.before_reduction
        step_of.before_pass, synchronizer.before_reduction = self._read, self._local_gradients
        handles = [
            module.register_forward_hook(partial(self._output, part, name, number))
            for part in self.engine.stage.models
            for name, number, module in _observed_modules(part)
        ]
        try:
            yield
        finally:
            step_of.before_pass, synchronizer.before_reduction = before
            for handle in handles:
                handle.remove()

    def before_update(self) -> None:
        """Take the fingerprints of the reduced gradients."""
        if self._rows is not None:
            self._sums()

    def after_step(self, done: StepDone) -> None:
        """Take the fingerprints after the step, and combine those of all ranks."""
        assert self._rows is not None
        if not self._summed:
            self._sums()  # the step skips its update
        result = done.result
        self._number("forward", LOSS, result.loss, _LAST)
        self._number("reduction", NORM, result.grad_norm, _LAST)
        self._number("update", RATE, result.learning_rate, -_LAST)
        self._state("update")
        metrics = {LOSS: result.loss, NORM: result.grad_norm, RATE: result.learning_rate}
        self.last = self._combine(done.state.step, metrics)
        self._rows = None

    def _row(self, phase: str, name: str, place: tuple[float, float]) -> _LocalPrint:
        assert self._rows is not None
        return self._rows.setdefault((phase, name), _LocalPrint(place))

    def _add(self, row: _LocalPrint, values: Tensor, indices: Indices, copy: _Copy) -> None:
        before = row.fingerprint.bits
        row.fingerprint.add(values, indices, 1 / copy[1])
        row.total += (row.fingerprint.bits - before) * (copy[0] == 0)

    def _piece(self, row: _LocalPrint, shard: Shard, values: Flat, offset: int, copy: _Copy) -> None:
        before = row.fingerprint.bits
        row.fingerprint.add_piece(shard, values, offset, 1 / copy[1])
        row.total += (row.fingerprint.bits - before) * (copy[0] == 0)

    def _number(self, phase: str, name: str, number: float, place: float) -> None:
        """Add a number that all ranks have."""
        value = torch.tensor([number], dtype=torch.float64)
        self._add(self._row(phase, name, (place, 0.0)), value, np.zeros(1, np.uint64), self._of_all)

    def _state(self, phase: str) -> None:
        """Add the tensors that a checkpoint holds, and the weights that layers compute with if different."""
        for entry in training_entries(self.engine.state()):
            place = self._places.get(entry.shard.name, (-1.0, 0.0))
            row = self._row(phase, entry.dataset, place)
            copy = self._owned(entry.shard.name, (entry.copy, entry.copies))
            self._piece(row, entry.shard, entry.values, entry.offset, copy)
        for bucket in self.engine.stage.buckets:
            if bucket.sharding.zero not in (1, 2) or bucket.values is None:
                continue
            for segment in bucket.segments:
                shard, copy = (
                    segment.parameter.shard,
                    segment.replication.holder_position(False, *bucket.sharding.diverging_groups),
                )
                row = self._row(phase, f"{AS_COMPUTED}{shard.name}", self._places[shard.name])
                self._piece(row, shard, segment.view(bucket.values).reshape(-1), 0, copy)

    def _owned(self, name: str, copy: _Copy) -> _Copy:
        """Return this rank's number among the replicas of a parameter's piece, and how many there are.

        The replicas of a tied parameter are those of both of its stages.
        """
        number, copies = self._tied.get(name, _ONE)
        return number * copy[1] + copy[0], copies * copy[1]

    def _read(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add this rank's samples of the step."""
        step, state = self.trainer.step, self.trainer.state
        firsts = (step.first_sample(state, index) for index in range(len(micro_batches)))
        self._present = [(first, each.present) for first, each in zip(firsts, micro_batches, strict=True)]
        for (first, present), micro in zip(self._present, micro_batches, strict=True):
            for number in range(present):
                for place, (name, rows) in enumerate(micro.fields.items()):
                    values = rows[number].reshape(-1)
                    row = self._row("samples", name, (float(place), 0.0))
                    before = row.fingerprint.bits
                    self._add(row, values, _indices(first + number, values.numel()), self._of_tokens)
                    if self._of_tokens[0] == 0:
                        known = self._samples.get(first + number, 0)
                        self._samples[first + number] = (3 * known + row.fingerprint.bits - before) % 2**64

    def _output(
        self,
        part: ModelPart,
        name: str,
        place: int,
        module: nn.Module,  # noqa: ARG002
        inputs: Any,  # noqa: ARG002
        output: Any,
    ) -> None:
        """Add the output of a layer for a micro-batch in the forward pass."""
        micro = self.engine.stage.layer_context.statistics.micro_batch
        if micro is None or in_backward() or (isinstance(part, ModulePart) and not part.computing()):
            return
        fractions = (each for each in tensors_of(output) if each.is_floating_point())
        values = next(fractions, None)
        if values is None:
            return
        row = self._row("forward", f"output of {name}", (float(place), 0.0))
        first, present = self._present[micro]
        values = values.detach()
        tensor = self.engine.stage.layer_context.tensor
        cut = tensor.size > 1 and self.engine.stage.layer_context.sequence_parallel
        copy = _ONE if cut else (tensor.rank, tensor.size)
        if not isinstance(part, ModulePart):
            positions = self.engine.positions
            if cut:
                positions = positions.chunk(tensor.size)[tensor.rank]
            features, length = values.shape[-1], self.engine.architecture.sequence
            tokens = positions.cpu().numpy().astype(np.uint64)[:, None]
            for number in range(present):
                places = (tokens + np.uint64((first + number) * length)) * np.uint64(features)
                indices = (places + np.arange(features, dtype=np.uint64)).reshape(-1)
                self._add(row, values[:, number].reshape(-1), indices, copy)
            return
        # The meaning of a user module's dimensions is not known, but micro-batches are equal in all layouts.
        indices = _indices(first // self.trainer.step.micro_size, values.numel())
        if cut and values.dim() == 3 and values.shape[1] * tensor.size == self.engine.architecture.sequence:
            rows, length, features = values.shape
            whole = _indices(first // self.trainer.step.micro_size, values.numel() * tensor.size)
            indices = whole.reshape(rows, tensor.size, length * features)[:, tensor.rank].reshape(-1)
        else:
            copy = (tensor.rank, tensor.size)
        self._add(row, values.reshape(-1), indices, copy)

    def _local_gradients(self, bucket: Bucket) -> None:
        """Add a bucket's gradients of this rank, over all micro-batches or those since the last reduction."""
        whole = bucket.final_gradients()
        for segment in bucket.segments:
            shard, replication = segment.parameter.shard, segment.replication
            layer, index = self._places[shard.name]
            row = self._row("gradient", shard.name, (-layer, -index))
            row.fingerprint.bits = 3 * row.fingerprint.bits % 2**64
            copies = 1 if replication.partial else replication.holders.size
            row.fingerprint.add_piece(shard, segment.view(whole).reshape(-1), 0, 1 / copies)
            row.total = row.fingerprint.bits

    def _sums(self) -> None:
        """Add the reduced gradients."""
        self._summed = True
        for bucket in self.engine.stage.synchronizer.buckets:
            for segment, values, offset in bucket.owned_segments(bucket.owned_gradients):
                shard = segment.parameter.shard
                layer, index = self._places[shard.name]
                row = self._row("reduction", shard.name, (-layer, -index))
                copy = self._owned(
                    shard.name, segment.replication.holder_position(True, *bucket.sharding.diverging_groups)
                )
                self._piece(row, shard, values, offset, copy)

    def _combine(self, step: int, metrics: Mapping[str, float]) -> StepPrints:
        """Return the fingerprints of a step, combined from those of all ranks. Collective."""
        assert self._rows is not None
        everyone, own = self.engine.world.everyone, self._rows
        here = [[*key, *row.place] for key, row in own.items()]
        places: dict[Key, tuple[float, float]] = {}
        for phase, name, *place in (each for rank in everyone.all_gather_object(here) for each in rank):
            known = places.setdefault((phase, name), (place[0], place[1]))
            places[phase, name] = min(known, (place[0], place[1]))
        keys = sorted(places, key=lambda key: (PHASES.index(key[0]), _kind(key[1]), *places[key], key[1]))
        words = np.zeros((2, len(keys)), np.uint64)
        sums = np.zeros((len(keys), SUMS + 2))
        for number, key in enumerate(keys):
            if (row := own.get(key)) is not None:
                words[:, number] = row.fingerprint.bits, row.total % 2**64
                sums[number] = *row.fingerprint.sketch, row.fingerprint.broken, row.fingerprint.elements
        bits = everyone.all_gather(torch.from_numpy(words.view(np.int64)).unsqueeze(0))
        of_ranks = bits.cpu().numpy().view(np.uint64)
        summed = everyone.all_reduce(torch.from_numpy(sums)).numpy()
        samples = everyone.all_gather_object([[number, each] for number, each in self._samples.items()])
        prints = [
            Print(
                *key,
                bits=tuple(map(int, of_ranks[:, 0, number])),
                total=int(of_ranks[:, 1, number].sum(dtype=np.uint64)),
                sketch=summed[number, :SUMS].copy(),
                broken=float(summed[number, SUMS]),
                elements=float(summed[number, SUMS + 1]),
            )
            for number, key in enumerate(keys)
        ]
        return StepPrints(step, prints, {number: each for rank in samples for number, each in rank}, metrics)


def fingerprints(trainer: Trainer) -> StepPrints:
    """Make the next step of a trainer, and return its fingerprints. Collective."""
    hook = Fingerprints(trainer)
    trainer.hooks.append(hook)
    try:
        trainer.train_step()
    finally:
        trainer.hooks.remove(hook)
    assert hook.last is not None
    return hook.last


def _indices(number: int, elements: int) -> Indices:
    """Return the indices of the elements of one tensor within a concatenation of tensors of equal size.

    Args:
        number: Number of the tensor.
        elements: Number of elements of each tensor.
    """
    return np.arange(number * elements, (number + 1) * elements, dtype=np.uint64)


def _kind(name: str) -> int:
    """Return the sort key for kinds of tensors: weights, then their optimizer state, then all other state."""
    if not name.startswith("/"):
        return 0
    kinds = ("/model/", AS_COMPUTED, "/replicas.model/", "/master/", "/replicas.master/", "/optimizer/")
    return next((1 + number for number, each in enumerate(kinds) if name.startswith(each)), len(kinds) + 1)


def _numbered(part: ModelPart) -> Iterator[tuple[int, Layer]]:
    """Return the layers of a part with their numbers in the model; the embedding has number 0."""
    first = part.span.first + (not part.span.has_embedding and not isinstance(part, ModulePart))
    return enumerate(part.layers, first)


def _observed_modules(part: ModelPart) -> Iterator[tuple[str, int, nn.Module]]:
    """Yield the layers of a transformer, or the blocks of a user module, with their names and numbers."""
    if isinstance(part, ModulePart):
        names = {module: name for name, module in part.module.named_modules()}
        for number, block in enumerate(part.blocks, part.span.first + 1):
            yield names[block], number, block
        return
    for number, layer in _numbered(part):
        yield f"blocks.{number - 1}" if layer.is_block else str(layer.kind), number, layer
