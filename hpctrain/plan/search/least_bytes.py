"""What a rank of a layout holds at the least, in closed form: what spares planning what cannot fit.

States of parameters by ZeRO's formulas (arXiv 1910.02054), with what whole gradients and gathered blocks take
meanwhile; activations of the micro-batches under way as layers tell them. Not what buckets are padded by.
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
from hpctrain.plan.activations import segment_bytes
from hpctrain.plan.search.form import ParameterCounts, PartForm
from hpctrain.plan.search.moments import Moment, Opened
from hpctrain.plan.time.layers import LayerSizes


@dataclass(frozen=True)
class MicroBatchBytes:
    """Bytes of one micro-batch in one layer: of what is `saved` of it, those that are `staying` until its
    backward if it is not computed again, and those that are `present` besides while it computes; what of its
    `input` it saves; what its weight gradients hold where they come later, and what is there `besides` while
    these come; what it computes in.
    """

    saved: int
    staying: int
    present: int
    input: int
    deferred: int
    besides: int
    workspace: int


@dataclass(frozen=True)
class PartKept:
    """Bytes of one micro-batch in a part of the model: what waits for backward, `head` of it behind the
    blocks; besides, those of a block that is there, of what is computed again, and of what comes where weight
    gradients come later, which hold what is `deferred`.
    """

    waiting: float
    head: float
    present: float
    again: float
    coming: float
    deferred: float


@dataclass(frozen=True)
class MicroBytes:
    """What layers keep of a micro-batch, by kind. `hidden` are the states between them, of which so many
    bytes stay where only they are kept of a segment, and so many are there besides; all blocks of a part
    share the `shared`. Of a model with `frozen` parameters autograd may save nothing.
    """

    of_kinds: Mapping[LayerKind, MicroBatchBytes]
    hidden: int
    input_stays: int
    input_present: int
    shared: int
    recompute: Recomputed
    device: torch.device
    frozen: bool

    def spread(self, layers: Mapping[LayerSizes, int]) -> float:
        """Bytes that a micro-batch has wait in so many of these layers, however they are split."""
        if self.frozen:
            return 0.0
        size = segment_size(self.recompute, sum(many for layer, many in layers.items() if layer.is_block))
        found = 0.0
        for layer, many in layers.items():
            kept = self.of_kinds[layer.kind]
            found += many * (self.input_stays / size if layer.is_block and size else kept.staying)
        return found

    def part(self, form: PartForm) -> PartKept:
        """Of a part of the model."""
        if self.frozen:
            return PartKept(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        many, alike = len(form.blocks), [(self.of_kinds[layer.kind], count) for layer, count in form.alike]
        waiting = head = self.of_kinds[form.last.kind].saved if form.last else 0
        waiting += self.of_kinds[form.first.kind].saved if form.first else 0
        if not alike:
            return PartKept(waiting, head, 0.0, 0.0, 0.0, 0.0)
        waiting += self.shared
        deferred = sum(count * kept.deferred for kept, count in alike)
        besides = max(kept.besides for kept, _ in alike)
        size = segment_size(self.recompute, many)
        if not size:
            waiting += sum(count * kept.staying for kept, count in alike)
            present = max(kept.present for kept, _ in alike)
            return PartKept(waiting, head, present, 0.0, besides, deferred)
        again = self._again([self.of_kinds[layer.kind] for layer in form.blocks], size, len(alike) == 1)
        waiting += self.input_stays * ceil(many / size)
        return PartKept(waiting, head, self.input_present, again, again + besides, deferred)

    def _again(self, blocks: Sequence[MicroBatchBytes], size: int, alike: bool) -> float:
        """What is there while the segment is computed again that then has most."""
        most, pieces = 0, ceil(len(blocks) / size)
        # Of segments that are alike a later one has more: fewer are behind it.
        for number in range(max(0, pieces - 2) if alike else 0, pieces):
            segment = blocks[number * size : (number + 1) * size]
            there = sum(each.saved for each in segment) - segment[0].input
            most = max(most, there - (pieces - 1 - number) * self.input_stays)
        return most

    def most(self, parts: Sequence[PartKept], moments: Iterable[Moment]) -> float:
        """Of a stage that has these parts, in some moments of its schedule."""
        most = 0.0
        for moment in moments:
            alive = sum(many * part.waiting for many, part in zip(moment.waiting, parts, strict=True))
            alive += sum(many * part.deferred for many, part in zip(moment.deferred, parts, strict=True))
            part = parts[moment.chunk]
            besides = {True: part.coming, False: part.again, None: min(part.coming, part.again)}
            most = max(most, alive, alive - part.head + part.present + besides[moment.split])
            if moment.split:
                most = max(most, alive - part.waiting + part.deferred)
        return most

    def around(self, alike: Iterable[tuple[LayerSizes, int]], neighbours: int) -> float:
        """What a stage of these layers has besides, that sends to so many and receives from them."""
        kept = [(layer, self.of_kinds[layer.kind]) for layer, _ in alike]
        gone = sum(each.saved for layer, each in kept if layer.is_last)
        passing = max(each.workspace - (gone if layer.is_block else 0) for layer, each in kept)
        ways = (receives_ahead(self.device) + 1) * neighbours
        return ways * self.hidden + max(0, passing) + matmul_workspace_bytes(self.device)


class LayerBytes:
    """What layers of a model keep, however they are split; found once for each way."""

    def __init__(self, shape: ModelShape, layers: Sequence[LayerSizes], ranks_per_node: int) -> None:
        self._few = replace(shape, layers=_few(layers))
        self._ranks_per_node = ranks_per_node
        self._parts: dict[object, ModelPart] = {}
        self._found: dict[object, MicroBytes] = {}
        self._of_kinds: dict[object, dict[LayerKind, MicroBatchBytes]] = {}

    def of(self, deck: Deck) -> MicroBytes:
        """Of a micro-batch of a deck that says how layers are split and what is computed again."""
        memory = deck.memory
        key = *_split_of(deck), deck.batch.micro_size, memory.recompute, memory.activations
        if key not in self._found:
            self._found[key] = self._micro_bytes(deck)
        return self._found[key]

    def _micro_bytes(self, deck: Deck) -> MicroBytes:
        part, memory = self._part(deck), deck.memory
        device = device_kind(deck.run.device)
        (told,) = part_bytes(deck, [part], not on_host(device), memory.recompute)
        sizes, elsewhere = told.sizes, memory.activations != "keep"
        # What else is computed again changes nothing that a layer saves.
        key = *_split_of(deck), sizes.micro_size, sizes.recomputes_core, memory.activations
        if key not in self._of_kinds:
            layers = {layer.kind: layer for layer in reversed(part.layers)}
            self._of_kinds[key] = {kind: _kept(deck, layer, told) for kind, layer in layers.items()}
        stays, packed, computed = segment_bytes(deck, [told.hidden])
        kept = 0 if elsewhere else packed
        return MicroBytes(
            self._of_kinds[key],
            told.hidden.bytes,
            stays + kept,
            computed - kept,
            byte_functions.shared_bytes(part, sizes),
            memory.recompute,
            device,
            deck.model.has_frozen_parameters,
        )

    def _part(self, deck: Deck) -> ModelPart:
        layout = deck.layout
        sizes = {"pipeline": 1, "data": 1, "context": layout.context, "tensor": layout.tensor}
        if deck.model.experts:
            sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
            of_data = layout.context * layout.tensor
            sizes["data"] = lcm(of_data, layout.expert * layout.expert_tensor) // of_data
        key = _split_of(deck)
        if key not in self._parts:
            device = device_kind(deck.run.device)
            mesh = PlannedMesh(sizes, 0, self._ranks_per_node, device=device)
            recompute = Recompute(deck.memory.recompute)
            with META:
                layer_context = make_layer_context(with_planned_functions(deck), mesh, recompute, device)
                (self._parts[key],) = build_parts(
                    self._few, layer_context, [LayerRange.all_of(self._few.layers)]
                )
        return self._parts[key]


def _kept(deck: Deck, layer: Layer, part: PartBytes) -> MicroBatchBytes:
    """Of a layer of a part."""
    sizes, saved = part.sizes, byte_functions.saved_storages(layer, part.sizes)
    whole = staying = total(saved)
    present = first = 0
    later = DeferredBytes(0, 0)
    if layer.is_block:
        stays, packed, computed = segment_bytes(deck, saved)
        kept = packed if deck.memory.activations == "keep" else 0
        staying, present, later = stays + kept, computed - kept, byte_functions.deferred_bytes(layer, sizes)
        first = saved[0].bytes if saved[0] == part.hidden else 0
    workspace = byte_functions.workspace_bytes(layer, sizes)
    return MicroBatchBytes(whole, staying, present, first, *later, workspace)


def _few(layers: Sequence[LayerSizes]) -> int:
    """Blocks of a model that has all kinds of blocks that this one has."""
    kinds = [layer.kind for layer in layers if layer.is_block]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _split_of(deck: Deck) -> tuple[object, ...]:
    """How layers of a deck are split."""
    layout = deck.layout
    axes = layout.tensor, layout.context, layout.expert, layout.expert_tensor
    return *axes, layout.sequence_parallel, layout.context_form


@dataclass(frozen=True)
class Cut:
    """A stage of ZeRO: over how many ranks, experts over how many; whose whole gradients come together."""

    zero: int
    group: int
    of_experts: int
    opened: Opened


@dataclass(frozen=True)
class StateBytes:
    """Bytes of an element: stored, of its gradient, and what the optimizer keeps of it; of gathered ones."""

    stored: float
    gradient: float
    optimizer: float
    gathered: float
    in_common: bool
    """Whether ranks of a node may have what is stored in common."""

    @staticmethod
    def of(deck: Deck) -> StateBytes:
        """Of the elements that a deck trains; none of its optimizer counts what is kept by block."""
        # What is frozen has none of the rest.
        formats, rule = Precision.of(deck), RULES[deck.optimizer.name](deck)
        kept = 0 if isinstance(rule, MatrixRules) else 4 * len(rule.names)
        itemsize = formats.storage.itemsize
        masters = 4 if itemsize < 4 and not isinstance(rule, MatrixRules) else 0
        host = on_host(device_kind(deck.run.device))
        common = host and deck.communication.requested_transport in {"auto", "shared"}
        stored = itemsize if deck.memory.parameters == "device" else 0
        # What is gathered may be of 8 bits, and what ranks have in common needs no memory to be gathered in.
        gathered = 0 if common or deck.precision.fp8_gather else itemsize
        if deck.model.has_frozen_parameters:
            return StateBytes(stored, 0, 0, gathered, common)
        return StateBytes(stored, formats.gradient.itemsize, masters + kept, gathered, common)

    def elsewhere(self) -> StateBytes:
        """Where what the optimizer keeps does not live on the device."""
        return replace(self, optimizer=0)

    def held(self, elements: ParameterCounts, cut: Cut, ranks_per_node: int) -> float:
        """Of a stage's rank."""
        held = self._held(elements.others, cut, cut.group, ranks_per_node)
        held += self._held(elements.experts, cut, cut.of_experts, ranks_per_node)
        if cut.zero > 2 and cut.group > 1:
            opened = self.gradient * elements.blocks if cut.opened == "blocks" else 0.0
            held += max(self.gathered * elements.gathered, opened)
        return held + self.gradient * elements.apart

    def _held(self, elements: float, cut: Cut, group: int, ranks_per_node: int) -> float:
        gradient = self.gradient / (group if cut.zero > 1 else 1)
        if cut.zero > 1 and group > 1 and cut.opened == "all":
            gradient += self.gradient  # beside the sums of the own slice
        stored = self.stored / (group if cut.zero > 2 else 1)
        if self.in_common and cut.zero:
            stored /= min(group, ranks_per_node)
        return elements * (stored + gradient + self.optimizer / (group if cut.zero else 1))
