"""Fingerprints of all that a step reads, computes, sums and changes, in the order in which it does.

By them two steps are compared without having both: see `train/divergence.py`. What is looked at stays as it
is.
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
"""Of a step: weights and state before it; what is read; what blocks give, and the loss; each rank's own
gradients, before they are summed; the sums, and their norm; the rate, weights and state after it.
"""

LOSS, NORM, RATE = "loss", "gradient norm", "learning rate"
AS_COMPUTED = "/computed/"
"""What names begin with of whole weights that layers compute with, which ZeRO gathers from slices."""

Key = tuple[str, str]
_Copy = tuple[int, int]
_ONE: _Copy = (0, 1)
_LAST = 1e9  # place behind all others


@dataclass(frozen=True)
class Print:
    """The fingerprint of one tensor in one phase of a step, over all ranks.

    `name` is the dataset's, as of a checkpoint, of weights and state, else what it is in words. `bits` are
    each rank's own, `total` those of all of the tensor, each element once; in `sketch` and `broken` copies
    count together as one, and the ranks' own gradients as their sum.
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
    """Those of a step, in their order, the same on all ranks; of each sample, by number, a hash; the step's
    metrics, which are among the prints, by name.
    """

    step: int
    prints: list[Print]
    samples: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def by_key(self) -> dict[Key, Print]:
        """By phase and name."""
        return {(each.phase, each.name): each for each in self.prints}


@dataclass
class _LocalPrint:
    """This rank's part of a Print; its place in the phase."""

    place: tuple[float, float]
    own: Fingerprint = field(default_factory=Fingerprint)
    total: int = 0


class Fingerprints(Hook):
    """Takes those of each step of a trainer, the `last` one's to be had after it; the last of its hooks.

    Collective, as the step is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.engine = trainer, trainer.engine
        # They know the micro-batch of an action, also if layers record nothing.
        trainer.step.executor.statistics = self.engine.stage.layer_context.statistics
        self.last: StepPrints | None = None
        self._rows: dict[Key, _LocalPrint] | None = None
        self._samples: dict[int, int] = {}
        self._present: list[tuple[int, int]] = []
        self._summed = False
        mesh = self.engine.mesh
        axes = ("pipeline", "context", "tensor")
        alike = all(mesh.coordinate(axis) == 0 for axis in axes)
        self._of_tokens: _Copy = (0 if alike else 1, int(np.prod([mesh.size(axis) for axis in axes])))
        world = self.engine.world
        self._of_all: _Copy = (world.rank, world.size)
        # Slices of tied tables are cut in other places on the two stages, so that none is a copy.
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
        """Look at what a step begins with, and have its passes and sums looked at."""
        self._rows, self._samples, self._summed = {}, {}, False
        self._state("start")
        step_of, synchronizer = self.trainer.step, self.engine.stage.synchronizer
        before = step_of.before_pass, synchronizer.before_reduction
        step_of.before_pass, synchronizer.before_reduction = self._read, self._own_gradients
        handles = [
            module.register_forward_hook(partial(self._output, part, name, number))
            for part in self.engine.stage.models
            for name, number, module in _watched(part)
        ]
        try:
            yield
        finally:
            step_of.before_pass, synchronizer.before_reduction = before
            for handle in handles:
                handle.remove()

    def before_update(self) -> None:
        """Look at the sums of gradients."""
        if self._rows is not None:
            self._sums()

    def after_step(self, done: StepDone) -> None:
        """Look at what the step leaves behind, and share all."""
        assert self._rows is not None
        if not self._summed:
            self._sums()  # of a step whose update is left out
        result = done.result
        self._number("forward", LOSS, result.loss, _LAST)
        self._number("reduction", NORM, result.grad_norm, _LAST)
        self._number("update", RATE, result.learning_rate, -_LAST)
        self._state("update")
        metrics = {LOSS: result.loss, NORM: result.grad_norm, RATE: result.learning_rate}
        self.last = self._shared(done.state.step, metrics)
        self._rows = None

    def _row(self, phase: str, name: str, place: tuple[float, float]) -> _LocalPrint:
        assert self._rows is not None
        return self._rows.setdefault((phase, name), _LocalPrint(place))

    def _add(self, row: _LocalPrint, values: Tensor, indices: Indices, copy: _Copy) -> None:
        before = row.own.bits
        row.own.add(values, indices, 1 / copy[1])
        row.total += (row.own.bits - before) * (copy[0] == 0)

    def _piece(self, row: _LocalPrint, shard: Shard, values: Flat, offset: int, copy: _Copy) -> None:
        before = row.own.bits
        row.own.add_piece(shard, values, offset, 1 / copy[1])
        row.total += (row.own.bits - before) * (copy[0] == 0)

    def _number(self, phase: str, name: str, number: float, place: float) -> None:
        """One that all ranks have."""
        value = torch.tensor([number], dtype=torch.float64)
        self._add(self._row(phase, name, (place, 0.0)), value, np.zeros(1, np.uint64), self._of_all)

    def _state(self, phase: str) -> None:
        """All that a checkpoint would hold, and weights that layers compute with, where these are others."""
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
        """The number and count of copies of what this rank owns of a parameter, over both stages where it is
        tied.
        """
        number, copies = self._tied.get(name, _ONE)
        return number * copy[1] + copy[0], copies * copy[1]

    def _read(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Look at this rank's share of the step's samples."""
        step, state = self.trainer.step, self.trainer.state
        firsts = (step.first_sample(state, index) for index in range(len(micro_batches)))
        self._present = [(first, each.present) for first, each in zip(firsts, micro_batches, strict=True)]
        for (first, present), micro in zip(self._present, micro_batches, strict=True):
            for number in range(present):
                for place, (name, rows) in enumerate(micro.fields.items()):
                    values = rows[number].reshape(-1)
                    row = self._row("samples", name, (float(place), 0.0))
                    before = row.own.bits
                    self._add(row, values, _indices(first + number, values.numel()), self._of_tokens)
                    if self._of_tokens[0] == 0:
                        known = self._samples.get(first + number, 0)
                        self._samples[first + number] = (3 * known + row.own.bits - before) % 2**64

    def _output(
        self,
        part: ModelPart,
        name: str,
        place: int,
        module: nn.Module,  # noqa: ARG002
        given: Any,  # noqa: ARG002
        output: Any,
    ) -> None:
        """Look at what a layer gives of a micro-batch in its forward pass."""
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
        # Of a module nobody knows which dim is what; all layouts have the same micro-batches.
        indices = _indices(first // self.trainer.step.micro_size, values.numel())
        if cut and values.dim() == 3 and values.shape[1] * tensor.size == self.engine.architecture.sequence:
            rows, length, features = values.shape
            whole = _indices(first // self.trainer.step.micro_size, values.numel() * tensor.size)
            indices = whole.reshape(rows, tensor.size, length * features)[:, tensor.rank].reshape(-1)
        else:
            copy = (tensor.rank, tensor.size)
        self._add(row, values.reshape(-1), indices, copy)

    def _own_gradients(self, bucket: Bucket) -> None:
        """Look at this rank's own gradients of a bucket: of all micro-batches, or since the last sum."""
        whole = bucket.final_gradients()
        for segment in bucket.segments:
            shard, replication = segment.parameter.shard, segment.replication
            layer, index = self._places[shard.name]
            row = self._row("gradient", shard.name, (-layer, -index))
            row.own.bits = 3 * row.own.bits % 2**64
            copies = 1 if replication.partial else replication.holders.size
            row.own.add_piece(shard, segment.view(whole).reshape(-1), 0, 1 / copies)
            row.total = row.own.bits

    def _sums(self) -> None:
        """Look at the sums of gradients."""
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

    def _shared(self, step: int, metrics: Mapping[str, float]) -> StepPrints:
        """What all ranks have looked at. Collective."""
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
                words[:, number] = row.own.bits, row.total % 2**64
                sums[number] = *row.own.sketch, row.own.broken, row.own.elements
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
    """Make the next step of a trainer; its fingerprints. Collective."""
    hook = Fingerprints(trainer)
    trainer.hooks.append(hook)
    try:
        trainer.train_step()
    finally:
        trainer.hooks.remove(hook)
    assert hook.last is not None
    return hook.last


def _indices(number: int, elements: int) -> Indices:
    """Those of the elements of the tensor of that number, of several of one size behind each other."""
    return np.arange(number * elements, (number + 1) * elements, dtype=np.uint64)


def _kind(name: str) -> int:
    """Weights come before what belongs to them, and after these what else is kept."""
    if not name.startswith("/"):
        return 0
    kinds = ("/model/", AS_COMPUTED, "/replicas.model/", "/master/", "/replicas.master/", "/optimizer/")
    return next((1 + number for number, each in enumerate(kinds) if name.startswith(each)), len(kinds) + 1)


def _numbered(part: ModelPart) -> Iterator[tuple[int, Layer]]:
    """The layers of a part with their numbers in the model: what embeds is number 0."""
    first = part.span.first + (not part.span.has_embedding and not isinstance(part, ModulePart))
    return enumerate(part.layers, first)


def _watched(part: ModelPart) -> Iterator[tuple[str, int, nn.Module]]:
    """What of a part is looked at, by name and number: a transformer's layers, or a module's blocks."""
    if isinstance(part, ModulePart):
        names = {module: name for name, module in part.module.named_modules()}
        for number, block in enumerate(part.blocks, part.span.first + 1):
            yield names[block], number, block
        return
    for number, layer in _numbered(part):
        yield f"blocks.{number - 1}" if layer.is_block else str(layer.kind), number, layer
