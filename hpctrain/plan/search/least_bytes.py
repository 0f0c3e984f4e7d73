"""Lower bounds of a rank's memory in closed form, so that a search need not plan layouts that cannot fit.

The state of parameters follows ZeRO's formulas (arXiv 1910.02054), with complete gradients and gathered
blocks that exist for some time. Layers report their activations. The padding of buckets is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

import torch

from hpctrain.comm.planned import META, PlannedMesh
from hpctrain.costs.layer_bytes import byte_functions
from hpctrain.costs.layer_bytes.activation_sizes import DeferredBytes, total
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.function_choice import with_planned_functions
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.device_memory import matmul_workspace_bytes
from hpctrain.memory.recompute import Recompute, segment_size
from hpctrain.model.construction import build_parts
from hpctrain.model.part import Layer, LayerKind, LayerRange, ModelPart
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape, Recomputed
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.pipeline.execute import receives_ahead
from hpctrain.plan.activation_memory import segment_bytes
from hpctrain.plan.search.in_flight import CompleteGradients, InFlight
from hpctrain.plan.search.model_partition import ParameterCounts, PartLayers
from hpctrain.plan.time.layer_seconds import LayerSizes


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch in one layer of a rank.

    Attributes:
        saved: Bytes that autograd saves.
        stored: Bytes that stay in memory until the backward pass, if the layer is not recomputed.
        computing: Further bytes while the layer computes, before they are compressed or offloaded.
        saved_input: Bytes of the layer's input, if `saved` includes it; otherwise 0.
        deferred: Bytes that deferred weight gradients keep.
        transient: Further bytes during a backward pass that defers weight gradients.
        workspace: Temporary bytes of the layer's backward pass or loss.
    """

    saved: int
    stored: int
    computing: int
    saved_input: int
    deferred: int
    transient: int
    workspace: int


@dataclass(frozen=True)
class PartActivations:
    """Lower bounds of the bytes of one micro-batch in a part of the model.

    Attributes:
        stored: Bytes in memory between forward and backward pass.
        head: Those of them that are saved after the blocks.
        computing: Further bytes of the block that computes.
        recompute: Further bytes of a backward pass that defers nothing, for what it recomputes.
        deferring: Further bytes of a backward pass that defers weight gradients.
        deferred: Bytes that deferred weight gradients keep.
    """

    stored: float
    head: float
    computing: float
    recompute: float
    deferring: float
    deferred: float


@dataclass(frozen=True)
class ModelActivations:
    """Bytes of one micro-batch in the layers of a model on one rank, from which lower bounds follow.

    If parameters are frozen, autograd may save nothing at all, so that the bounds of what is saved are 0.

    Attributes:
        by_kind: Bytes of a layer of each kind.
        hidden: Bytes of the hidden states between two layers.
        stored_input: Bytes that stay in memory of the hidden states that enter a recomputed segment.
        computing_input: Further bytes of these hidden states while the segment computes.
        shared: Bytes of tensors that all blocks of a part share.
        recompute: Kind of recomputation.
        device: Device of the run.
        has_frozen_parameters: True if some parameters are not trained.
    """

    by_kind: Mapping[LayerKind, LayerActivations]
    hidden: int
    stored_input: int
    computing_input: int
    shared: int
    recompute: Recomputed
    device: torch.device
    has_frozen_parameters: bool

    def stored_bytes(self, layers: Mapping[LayerSizes, int]) -> float:
        """Return a lower bound of the bytes that a micro-batch keeps in layers, however they are split.

        Args:
            layers: Number of layers of each kind.
        """
        if self.has_frozen_parameters:
            return 0.0
        size = segment_size(self.recompute, sum(count for layer, count in layers.items() if layer.is_block))
        stored = 0.0
        for layer, count in layers.items():
            is_recomputed = layer.is_block and size
            stored += count * (self.stored_input / size if is_recomputed else self.by_kind[layer.kind].stored)
        return stored

    def part_activations(self, part: PartLayers) -> PartActivations:
        """Return lower bounds of the bytes of a micro-batch in a part of the model."""
        if self.has_frozen_parameters:
            return PartActivations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        counts = [(self.by_kind[layer.kind], count) for layer, count in part.counts]
        stored = head = self.by_kind[part.last.kind].saved if part.last else 0
        stored += self.by_kind[part.first.kind].saved if part.first else 0
        if not counts:
            return PartActivations(stored, head, 0.0, 0.0, 0.0, 0.0)
        stored += self.shared
        deferred = sum(count * layer.deferred for layer, count in counts)
        transient = max(layer.transient for layer, _ in counts)
        size = segment_size(self.recompute, len(part.blocks))
        if not size:
            stored += sum(count * layer.stored for layer, count in counts)
            computing = max(layer.computing for layer, _ in counts)
            return PartActivations(stored, head, computing, 0.0, transient, deferred)
        blocks = [self.by_kind[layer.kind] for layer in part.blocks]
        recompute = self._recompute_bytes(blocks, size, len(counts) == 1)
        stored += self.stored_input * ceil(len(blocks) / size)
        return PartActivations(stored, head, self.computing_input, recompute, recompute + transient, deferred)

    def _recompute_bytes(
        self, blocks: Sequence[LayerActivations], size: int, has_equal_blocks: bool
    ) -> float:
        """Return the largest number of further bytes while a segment is recomputed.

        When a segment is recomputed, all later segments are freed already.

        Args:
            blocks: Blocks of a part.
            size: Number of blocks of a segment.
            has_equal_blocks: True if all blocks are equal.
        """
        largest, segments = 0, ceil(len(blocks) / size)
        # Of equal segments, a later one needs more. The last segment may be shorter.
        for number in range(max(0, segments - 2) if has_equal_blocks else 0, segments):
            segment = blocks[number * size : (number + 1) * size]
            recomputed = sum(block.saved for block in segment) - segment[0].saved_input
            largest = max(largest, recomputed - (segments - 1 - number) * self.stored_input)
        return largest

    def peak_bytes(self, parts: Sequence[PartActivations], states: Iterable[InFlight]) -> float:
        """Return the largest bytes of activations of a stage.

        Args:
            parts: Bytes of a micro-batch in each part of the stage, by chunk.
            states: Micro-batches in flight before backward passes, at which memory may be largest.
        """
        peak = 0.0
        for state in states:
            before = sum(count * part.stored for count, part in zip(state.waiting, parts, strict=True))
            before += sum(count * part.deferred for count, part in zip(state.deferred, parts, strict=True))
            part = parts[state.chunk]
            further = {
                True: part.deferring,
                False: part.recompute,
                None: min(part.deferring, part.recompute),
            }[state.split]
            peak = max(peak, before, before - part.head + part.computing + further)
            if state.split:
                peak = max(peak, before - part.stored + part.deferred)
        return peak

    def temporary_bytes(self, layers: Iterable[tuple[LayerSizes, int]], neighbors: int) -> float:
        """Return the bytes of messages and temporary memory of a stage.

        Args:
            layers: Layers of the stage, one of each kind, and their numbers.
            neighbors: Number of stages to which it sends and from which it receives.
        """
        activations = [(layer, self.by_kind[layer.kind]) for layer, _ in layers]
        # When the last block computes its gradients, the activations of the head are free already.
        head = sum(each.saved for layer, each in activations if layer.is_last)
        workspace = max(each.workspace - (head if layer.is_block else 0) for layer, each in activations)
        messages = (receives_ahead(self.device) + 1) * neighbors
        return messages * self.hidden + max(0, workspace) + matmul_workspace_bytes(self.device)


class ActivationBounds:
    """Bytes that the layers of a model keep of a micro-batch, for decks that split them differently.

    Decks with the same choices share their results, which are computed once.

    Args:
        shape: Sizes of the model.
        layers: Layers of the model, in their order.
        ranks_per_node: Number of consecutive ranks that share a node.
    """

    def __init__(self, shape: ModelShape, layers: Sequence[LayerSizes], ranks_per_node: int) -> None:
        self._small_shape = replace(shape, layers=_blocks_with_all_kinds(layers))
        self._ranks_per_node = ranks_per_node
        self._parts: dict[object, ModelPart] = {}
        self._models: dict[object, ModelActivations] = {}
        self._by_kind: dict[object, dict[LayerKind, LayerActivations]] = {}

    def of(self, deck: Deck) -> ModelActivations:
        """Return the bytes of a micro-batch, by how the deck splits, recomputes and stores it. Local."""
        memory = deck.memory
        key = *_layer_split(deck), deck.batch.micro_size, memory.recompute, memory.activations
        if key not in self._models:
            self._models[key] = self._model_activations(deck)
        return self._models[key]

    def _model_activations(self, deck: Deck) -> ModelActivations:
        model, memory = self._model(deck), deck.memory
        device = device_kind(deck.run.device)
        (part,) = part_bytes(deck, [model], not on_host(device), memory.recompute)
        sizes = part.sizes
        # Other choices of recomputation do not change what a layer saves.
        key = *_layer_split(deck), sizes.micro_size, sizes.recomputes_core, memory.activations
        if key not in self._by_kind:
            layers = {layer.kind: layer for layer in reversed(model.layers)}
            self._by_kind[key] = {
                kind: _layer_activations(deck, layer, part) for kind, layer in layers.items()
            }
        resident, packed, computed = segment_bytes(deck, [part.hidden])
        kept = packed if memory.activations == "keep" else 0
        return ModelActivations(
            self._by_kind[key],
            part.hidden.bytes,
            resident + kept,
            computed - kept,
            byte_functions.shared_bytes(model, sizes),
            memory.recompute,
            device,
            deck.model.has_frozen_parameters,
        )

    def _model(self, deck: Deck) -> ModelPart:
        """Return a model without memory that has a layer of each kind, on one pipeline stage."""
        layout = deck.layout
        sizes = {"pipeline": 1, "data": 1, "context": layout.context, "tensor": layout.tensor}
        if deck.model.experts:
            sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
            ranks_per_data_rank = layout.context * layout.tensor
            ranks = lcm(ranks_per_data_rank, layout.expert * layout.expert_tensor)
            sizes["data"] = ranks // ranks_per_data_rank
        key = _layer_split(deck)
        if key not in self._parts:
            device = device_kind(deck.run.device)
            mesh = PlannedMesh(sizes, 0, self._ranks_per_node, device=device)
            recompute = Recompute(deck.memory.recompute)
            all_layers = LayerRange.all_of(self._small_shape.layers)
            with META:
                layer_context = make_layer_context(with_planned_functions(deck), mesh, recompute, device)
                (self._parts[key],) = build_parts(self._small_shape, layer_context, [all_layers])
        return self._parts[key]


def _layer_activations(deck: Deck, layer: Layer, part: PartBytes) -> LayerActivations:
    """Return the bytes of a micro-batch in a layer of a part."""
    sizes, storages = part.sizes, byte_functions.saved_storages(layer, part.sizes)
    saved = stored = total(storages)
    computing = saved_input = 0
    deferred = DeferredBytes(0, 0)
    if layer.is_block:
        resident, packed, computed = segment_bytes(deck, storages)
        kept = packed if deck.memory.activations == "keep" else 0
        stored, computing = resident + kept, computed - kept
        deferred = byte_functions.deferred_bytes(layer, sizes)
        saved_input = storages[0].bytes if storages[0] == part.hidden else 0
    workspace = byte_functions.workspace_bytes(layer, sizes)
    return LayerActivations(saved, stored, computing, saved_input, *deferred, workspace)


def _blocks_with_all_kinds(layers: Sequence[LayerSizes]) -> int:
    """Return the number of leading blocks that have all kinds of blocks of a model."""
    kinds = [layer.kind for layer in layers if layer.is_block]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _layer_split(deck: Deck) -> tuple[object, ...]:
    """Return the values of a deck that say how ranks split the layers of a stage."""
    layout = deck.layout
    axes = layout.tensor, layout.context, layout.expert, layout.expert_tensor
    return *axes, layout.sequence_parallel, layout.context_form


@dataclass(frozen=True)
class ZeroSplit:
    """Split of parameters, gradients and optimizer state by ZeRO.

    Attributes:
        zero: Stage of ZeRO, from 0 to 3.
        group_size: Number of ranks over which it splits.
        expert_group_size: Number of ranks over which it splits the parameters of experts.
        complete_gradients: Layers whose complete gradients exist at the same time.
    """

    zero: int
    group_size: int
    expert_group_size: int
    complete_gradients: CompleteGradients


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a parameter of the model on a rank that does not split them.

    Attributes:
        parameter: Bytes of its value, as stored.
        gradient: Bytes of its gradient.
        optimizer: Bytes of its optimizer state and master weight.
        gathered: Bytes of its value in a gathered bucket.
        shares_parameters: True if ranks of a node may have the values of parameters in common.
    """

    parameter: float
    gradient: float
    optimizer: float
    gathered: float
    shares_parameters: bool

    @staticmethod
    def of(deck: Deck) -> StateBytes:
        """Return the bytes of a trained parameter of a deck. State of matrices is not counted."""
        formats, rule = Precision.of(deck), RULES[deck.optimizer.name](deck)
        itemsize = formats.storage.itemsize
        device = device_kind(deck.run.device)
        shares = on_host(device) and deck.communication.requested_transport in {"auto", "shared"}
        parameter = itemsize if deck.memory.parameters == "device" else 0
        # Buckets may be gathered in 8 bits. Parameters in common memory need no memory to be gathered.
        gathered = 0 if shares or deck.precision.fp8_gather else itemsize
        if deck.model.has_frozen_parameters:
            # Any of the parameters may be frozen, and then has no gradient and no state.
            return StateBytes(parameter, 0, 0, gathered, shares)
        optimizer = 0
        if not isinstance(rule, MatrixRules):
            optimizer = 4 * len(rule.names) + (4 if itemsize < 4 else 0)
        return StateBytes(parameter, formats.gradient.itemsize, optimizer, gathered, shares)

    def without_optimizer(self) -> StateBytes:
        """Return the bytes on the device if the optimizer state is offloaded."""
        return replace(self, optimizer=0)

    def rank_bytes(self, counts: ParameterCounts, split: ZeroSplit, ranks_per_node: int) -> float:
        """Return the bytes of parameters, gradients and optimizer state of a rank.

        Args:
            counts: Numbers of parameters of its stage.
            split: Split by ZeRO.
            ranks_per_node: Largest number of ranks of a group that share a node.
        """
        size = self._split_bytes(counts.others, split, split.group_size, ranks_per_node)
        size += self._split_bytes(counts.experts, split, split.expert_group_size, ranks_per_node)
        if split.zero > 2 and split.group_size > 1:
            gradients = self.gradient * counts.blocks if split.complete_gradients == "blocks" else 0.0
            size += max(self.gathered * counts.gathered, gradients)
        return size + self.gradient * counts.second_gradients

    def _split_bytes(self, count: float, split: ZeroSplit, group_size: int, ranks_per_node: int) -> float:
        """Return the bytes of `count` parameters that ZeRO splits over a group."""
        gradient = self.gradient / (group_size if split.zero > 1 else 1)
        if split.zero > 1 and group_size > 1 and split.complete_gradients == "all":
            gradient += self.gradient  # complete gradients exist beside the sums of this rank's share
        parameter = self.parameter / (group_size if split.zero > 2 else 1)
        if self.shares_parameters and split.zero:
            parameter /= min(group_size, ranks_per_node)
        return count * (parameter + gradient + self.optimizer / (group_size if split.zero else 1))
