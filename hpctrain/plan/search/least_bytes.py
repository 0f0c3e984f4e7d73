"""What a rank of a layout holds at the least, in closed form: what spares planning what cannot fit.

States of parameters by ZeRO's formulas (arXiv 1910.02054), activations of the micro-batches under way as
layers tell them; not what buckets are padded by, nor what computing takes in passing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.comm.device import device_named, on_host
from hpctrain.comm.planned import META, PlannedMesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.functions import planned_functions
from hpctrain.engine.rules import RULES
from hpctrain.engine.stage import make_groups
from hpctrain.memory.recompute import Recompute, segment_size
from hpctrain.memory.saved import PartBytes, part_bytes
from hpctrain.model.build import build_parts
from hpctrain.model.part import Part, Span
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.optim.block_rule import BlockRules
from hpctrain.parallel.saved import total
from hpctrain.plan.time.arrangement import Arrangement
from hpctrain.plan.time.layers import LayerSizes


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch in one layer: those that wait for its backward, and those that are there
    besides while it is computed again.
    """

    waiting: float
    again: float
    passing: float = 0.0
    """What its backward, or its loss, needs in passing."""


class LayerBytes:
    """What layers of a model keep, however they are split; found once for each way."""

    def __init__(self, shape: ModelShape, layers: Sequence[LayerSizes], ranks_per_node: int) -> None:
        self._few = replace(shape, layers=_few(layers))
        self._ranks_per_node = ranks_per_node
        self._parts: dict[object, Part] = {}

    def of(self, deck: Deck) -> Mapping[str, Kept]:
        """By kind of layer, of a deck that says how layers are split and what is computed again, for one
        sequence of its micro-batches.
        """
        deck = deck.with_keys(batch={"micro_size": 1})
        part = self._part(deck)
        gpu = not on_host(device_named(deck.run.device))
        (saved,) = part_bytes(deck, [part], gpu, deck.memory.recompute)
        return {
            layer.kind: replace(
                self._kept(saved, deck, total(layer.saved(saved.at)), layer.is_block),
                passing=layer.workspace(saved.at),
            )
            for layer in part.layers
        }

    def _kept(self, part: PartBytes, deck: Deck, saved: float, is_block: bool) -> Kept:
        if deck.model.frozen:
            return Kept(0.0, 0.0)  # autograd may save nothing
        if is_block and deck.memory.activations != "keep":
            return Kept(0.0, saved)
        if not is_block or deck.memory.recompute in {"none", "selective"}:
            return Kept(saved, 0.0)
        # Of segments that are as long as they get.
        longest = segment_size(deck.memory.recompute, deck.model.layers)
        return Kept(part.hidden.bytes / longest, saved - part.hidden.bytes)

    def _part(self, deck: Deck) -> Part:
        layout = deck.layout
        sizes = {"pipeline": 1, "data": 1, "context": layout.context, "tensor": layout.tensor}
        if deck.model.experts:
            sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
            sizes["data"] = max(
                1, -(-layout.expert * layout.expert_tensor // (layout.context * layout.tensor))
            )
        key = (*sizes.values(), layout.sequence_parallel, layout.context_form)
        if key not in self._parts:
            device = device_named(deck.run.device)
            mesh = PlannedMesh(sizes, 0, self._ranks_per_node, device=device)
            recompute = Recompute(deck.memory.recompute)
            with META:
                groups = make_groups(planned_functions(deck), mesh, recompute, device)
                (self._parts[key],) = build_parts(self._few, groups, [Span.all_of(self._few.layers)])
        return self._parts[key]


def _few(layers: Sequence[LayerSizes]) -> int:
    """Blocks of a model that has all kinds of blocks that this one has."""
    kinds = [layer.kind for layer in layers if layer.is_block]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


@dataclass(frozen=True)
class StateBytes:
    """Bytes of an element: stored, of its gradient, and what the optimizer keeps of it."""

    stored: float
    gradient: float
    optimizer: float
    in_common: bool
    """Whether ranks of a node may have what is stored in common."""

    @staticmethod
    def of(deck: Deck) -> StateBytes:
        """Of the elements that a deck trains; none of its optimizer counts what is kept by block."""
        # What is frozen has none of the rest.
        formats, rule = Precision.of(deck), RULES[deck.optimizer.name](deck)
        kept = 0 if isinstance(rule, BlockRules) else 4 * len(rule.names)
        masters = 4 if formats.storage.itemsize < 4 and not isinstance(rule, BlockRules) else 0
        host = on_host(device_named(deck.run.device))
        common = host and deck.communication.wished_transport != "mpi"
        stored = formats.storage.itemsize if deck.memory.parameters == "device" else 0
        if deck.model.frozen:
            return StateBytes(stored, 0, 0, common)
        return StateBytes(stored, formats.gradient.itemsize, masters + kept, common)

    def held(self, elements: float, zero: int, group: int, ranks_per_node: int) -> float:
        """Of so many elements of a stage's rank, those of some stage of ZeRO cut over a group."""
        gradient = self.gradient / (group if zero > 1 else 1)
        stored = self.stored / (group if zero > 2 else 1)
        if self.in_common and zero:
            stored /= min(group, ranks_per_node)
        return elements * (stored + gradient + self.optimizer / (group if zero else 1))


def stage_elements(layers: Sequence[LayerSizes], at: Arrangement) -> tuple[float, float]:
    """Elements of parameters of some layers on a rank: of experts, and of all else."""
    sizes = [layer.elements(at) for layer in layers]
    return sum(each[0] for each in sizes), sum(each[1] for each in sizes)
