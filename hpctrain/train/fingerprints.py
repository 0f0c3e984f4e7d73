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

_ReplicaPosition = tuple[int, int]
"""Number of a rank among those that hold the same elements, and the number of these ranks."""

_ONLY_REPLICA: _ReplicaPosition = (0, 1)
_LAST = 1e9  # place after all others


@dataclass(frozen=True)
class TensorFingerprint:
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
class StepFingerprints:
    """Fingerprints of a step, equal on all ranks.

    Attributes:
        step: Number of the step.
        tensors: The fingerprints, in the order of the step.
        samples: Hash of each sample, by its number.
        metrics: Loss, gradient norm and learning rate, by name. They have fingerprints, too.
    """

    step: int
    tensors: list[TensorFingerprint]
    samples: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def by_key(self) -> dict[Key, TensorFingerprint]:
        """Return the fingerprints by phase and name."""
        return {(each.phase, each.name): each for each in self.tensors}


@dataclass
class _LocalFingerprint:
    """Local part of a TensorFingerprint.

    Attributes:
        place: Sort key within the phase.
        fingerprint: Fingerprint of the local elements.
        total: Local part of the checksum of the complete tensor.
    """

    place: tuple[float, float]
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    total: int = 0

    def add(self, values: Tensor, indices: Indices, replica: _ReplicaPosition) -> int:
        """Add elements by their indices in the complete tensor. Return what they add to the checksum."""
        former_bits = self.fingerprint.bits
        self.fingerprint.add(values, indices, 1 / replica[1])
        return self._add_to_total(former_bits, replica)

    def add_piece(self, shard: Shard, values: Flat, offset: int, replica: _ReplicaPosition) -> None:
        """Add the elements of a shard from an offset on."""
        former_bits = self.fingerprint.bits
        self.fingerprint.add_piece(shard, values, offset, 1 / replica[1])
        self._add_to_total(former_bits, replica)

    def _add_to_total(self, former_bits: int, replica: _ReplicaPosition) -> int:
        added_bits = self.fingerprint.bits - former_bits
        self.total += added_bits * (replica[0] == 0)
        return added_bits


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
        self.last: StepFingerprints | None = None
        self._local: dict[Key, _LocalFingerprint] | None = None
        self._samples: dict[int, int] = {}
        self._sample_ranges: list[range] = []
        self._has_reduced_gradients = False
        mesh = self.engine.mesh
        axes = ("pipeline", "context", "tensor")
        is_first = all(mesh.coordinate(axis) == 0 for axis in axes)
        self._token_replica: _ReplicaPosition = (
            0 if is_first else 1,
            int(np.prod([mesh.size(axis) for axis in axes])),
        )
        world = self.engine.world
        self._number_replica: _ReplicaPosition = (world.rank, world.size)
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
        self._local, self._samples, self._has_reduced_gradients = {}, {}, False
        self._add_state("start")
        step_of, synchronizer = self.trainer.step, self.engine.stage.synchronizer
        before = step_of.before_pass, synchronizer.before_reduction
        step_of.before_pass, synchronizer.before_reduction = self._add_samples, self._add_local_gradients
        handles = [
            module.register_forward_hook(partial(self._add_output, part, name, number))
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
        if self._local is not None:
            self._add_reduced_gradients()

    def after_step(self, done: StepDone) -> None:
        """Take the fingerprints after the step, and combine those of all ranks."""
        assert self._local is not None
        if not self._has_reduced_gradients:
            self._add_reduced_gradients()  # the step skips its update
        result = done.result
        self._add_number("forward", LOSS, result.loss, _LAST)
        self._add_number("reduction", NORM, result.grad_norm, _LAST)
        self._add_number("update", RATE, result.learning_rate, -_LAST)
        self._add_state("update")
        metrics = {LOSS: result.loss, NORM: result.grad_norm, RATE: result.learning_rate}
        self.last = self._combine(done.state.step, metrics)
        self._local = None

    def _local_fingerprint(self, phase: str, name: str, place: tuple[float, float]) -> _LocalFingerprint:
        assert self._local is not None
        return self._local.setdefault((phase, name), _LocalFingerprint(place))

    def _add_number(self, phase: str, name: str, number: float, place: float) -> None:
        """Add a number that all ranks have."""
        value = torch.tensor([number], dtype=torch.float64)
        self._local_fingerprint(phase, name, (place, 0.0)).add(
            value, np.zeros(1, np.uint64), self._number_replica
        )

    def _add_state(self, phase: str) -> None:
        """Add the tensors that a checkpoint holds, and the weights that layers compute with if different."""
        for entry in training_entries(self.engine.state()):
            place = self._places.get(entry.shard.name, (-1.0, 0.0))
            replica = self._among_tied_stages(entry.shard.name, (entry.copy, entry.copies))
            local = self._local_fingerprint(phase, entry.dataset, place)
            local.add_piece(entry.shard, entry.values, entry.offset, replica)
        for bucket in self.engine.stage.buckets:
            if bucket.sharding.zero not in (1, 2) or bucket.values is None:
                continue
            for segment in bucket.segments:
                shard = segment.parameter.shard
                replica = segment.replication.holder_position(False, *bucket.sharding.diverging_groups)
                name, place = f"{AS_COMPUTED}{shard.name}", self._places[shard.name]
                values = segment.view(bucket.values).reshape(-1)
                self._local_fingerprint(phase, name, place).add_piece(shard, values, 0, replica)

    def _among_tied_stages(self, name: str, replica: _ReplicaPosition) -> _ReplicaPosition:
        """Return the position among the replicas on both stages if the parameter is tied; else `replica`."""
        stage, stages = self._tied.get(name, _ONLY_REPLICA)
        return stage * replica[1] + replica[0], stages * replica[1]

    def _add_samples(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add this rank's samples of the step."""
        step, state = self.trainer.step, self.trainer.state
        firsts = (step.first_sample(state, index) for index in range(len(micro_batches)))
        self._sample_ranges = [
            range(first, first + each.present) for first, each in zip(firsts, micro_batches, strict=True)
        ]
        for samples, micro in zip(self._sample_ranges, micro_batches, strict=True):
            for row, sample in enumerate(samples):
                for place, (name, rows) in enumerate(micro.fields.items()):
                    values = rows[row].reshape(-1)
                    local = self._local_fingerprint("samples", name, (float(place), 0.0))
                    added_bits = local.add(values, _indices(sample, values.numel()), self._token_replica)
                    if self._token_replica[0] == 0:
                        self._samples[sample] = (3 * self._samples.get(sample, 0) + added_bits) % 2**64

    def _add_output(
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
        local = self._local_fingerprint("forward", f"output of {name}", (float(place), 0.0))
        samples = self._sample_ranges[micro]
        values = values.detach()
        tensor = self.engine.stage.layer_context.tensor
        is_split = tensor.size > 1 and self.engine.stage.layer_context.sequence_parallel
        replica = _ONLY_REPLICA if is_split else (tensor.rank, tensor.size)
        if not isinstance(part, ModulePart):
            positions = self.engine.positions
            if is_split:
                positions = positions.chunk(tensor.size)[tensor.rank]
            features, length = values.shape[-1], self.engine.architecture.sequence
            tokens = positions.cpu().numpy().astype(np.uint64)[:, None]
            for row, sample in enumerate(samples):
                places = (tokens + np.uint64(sample * length)) * np.uint64(features)
                indices = (places + np.arange(features, dtype=np.uint64)).reshape(-1)
                local.add(values[:, row].reshape(-1), indices, replica)
            return
        # The meaning of a user module's dimensions is not known, but micro-batches are equal in all layouts.
        number = samples.start // self.trainer.step.micro_size
        indices = _indices(number, values.numel())
        sequence = self.engine.architecture.sequence
        if is_split and values.dim() == 3 and values.shape[1] * tensor.size == sequence:
            rows, length, features = values.shape
            global_indices = _indices(number, values.numel() * tensor.size)
            indices = global_indices.reshape(rows, tensor.size, length * features)[:, tensor.rank].reshape(-1)
        else:
            replica = (tensor.rank, tensor.size)
        local.add(values.reshape(-1), indices, replica)

    def _add_local_gradients(self, bucket: Bucket) -> None:
        """Add a bucket's gradients of this rank, over all micro-batches or those since the last reduction."""
        gradients = bucket.final_gradients()
        for segment in bucket.segments:
            shard, replication = segment.parameter.shard, segment.replication
            layer, index = self._places[shard.name]
            local = self._local_fingerprint("gradient", shard.name, (-layer, -index))
            local.fingerprint.bits = 3 * local.fingerprint.bits % 2**64
            replicas = 1 if replication.partial else replication.holders.size
            local.fingerprint.add_piece(shard, segment.view(gradients).reshape(-1), 0, 1 / replicas)
            local.total = local.fingerprint.bits

    def _add_reduced_gradients(self) -> None:
        """Add the reduced gradients."""
        self._has_reduced_gradients = True
        for bucket in self.engine.stage.synchronizer.buckets:
            for segment, values, offset in bucket.owned_segments(bucket.owned_gradients):
                shard = segment.parameter.shard
                layer, index = self._places[shard.name]
                replica = segment.replication.holder_position(True, *bucket.sharding.diverging_groups)
                local = self._local_fingerprint("reduction", shard.name, (-layer, -index))
                local.add_piece(shard, values, offset, self._among_tied_stages(shard.name, replica))

    def _combine(self, step: int, metrics: Mapping[str, float]) -> StepFingerprints:
        """Return the fingerprints of a step, combined from those of all ranks. Collective."""
        assert self._local is not None
        everyone, local = self.engine.world.everyone, self._local
        local_places = [[*key, *each.place] for key, each in local.items()]
        places: dict[Key, tuple[float, float]] = {}
        for phase, name, *place in (
            each for rank in everyone.all_gather_object(local_places) for each in rank
        ):
            known = places.setdefault((phase, name), (place[0], place[1]))
            places[phase, name] = min(known, (place[0], place[1]))
        keys = sorted(places, key=lambda key: (PHASES.index(key[0]), _kind(key[1]), *places[key], key[1]))
        words = np.zeros((2, len(keys)), np.uint64)
        sums = np.zeros((len(keys), SUMS + 2))
        for number, key in enumerate(keys):
            if (each := local.get(key)) is not None:
                words[:, number] = each.fingerprint.bits, each.total % 2**64
                sums[number] = *each.fingerprint.sketch, each.fingerprint.broken, each.fingerprint.elements
        bits = everyone.all_gather(torch.from_numpy(words.view(np.int64)).unsqueeze(0))
        words_of_ranks = bits.cpu().numpy().view(np.uint64)
        totals = everyone.all_reduce(torch.from_numpy(sums)).numpy()
        samples = everyone.all_gather_object([[number, each] for number, each in self._samples.items()])
        tensors = [
            TensorFingerprint(
                *key,
                bits=tuple(map(int, words_of_ranks[:, 0, number])),
                total=int(words_of_ranks[:, 1, number].sum(dtype=np.uint64)),
                sketch=totals[number, :SUMS].copy(),
                broken=float(totals[number, SUMS]),
                elements=float(totals[number, SUMS + 1]),
            )
            for number, key in enumerate(keys)
        ]
        return StepFingerprints(
            step, tensors, {number: each for rank in samples for number, each in rank}, metrics
        )


def fingerprints(trainer: Trainer) -> StepFingerprints:
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
