"""Seconds of an update, from what the rule of a deck's optimizer reads, writes and multiplies.

Where state lies elsewhere a piece is read and one is written while one is updated (`optim/offload.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from hpctrain.costs.update_bytes import state_per_element
from hpctrain.deck.schema import Deck
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.muon import Muon
from hpctrain.parallel.shards import Shard, UpdateSettings
from hpctrain.plan.time.machine_rates import MachineRates, Sharing, collective_seconds

if TYPE_CHECKING:
    from hpctrain.plan.time.layer_seconds import LayerSizes
    from hpctrain.plan.time.layout_sizes import LayoutSizes

_BLOCK, _OTHER = "blocks.0.weight", "other.weight"


@dataclass(frozen=True)
class UpdateNumbers:
    """Numbers that belong to an element beside its master weight: of one that is updated in a block, as all
    are whose layers have their matrices `in_blocks`, and of any other. `muon` multiplies these matrices.
    """

    of_elements: int = 2
    of_blocks: int = 2
    in_blocks: tuple[bool, bool] = (False, False)
    muon: Muon | None = None

    @staticmethod
    def of(deck: Deck) -> UpdateNumbers:
        """That of the deck's optimizer."""
        rule = RULES[deck.optimizer.name](deck)
        if not isinstance(rule, MatrixRules):
            return UpdateNumbers(len(rule.names), len(rule.names))
        named = tuple(any(fnmatchcase(n, each) for each in rule.patterns) for n in (_BLOCK, _OTHER))
        others, own = (state_per_element(rule, UpdateSettings(in_blocks=each)) for each in (False, True))
        muon = rule.matrix_rule if isinstance(rule.matrix_rule, Muon) else None
        return UpdateNumbers(others, own, (named[0], named[1]), muon)

    def numbers(self, layer: LayerSizes) -> int:
        """Of an element of a layer's matrices."""
        return self.of_blocks if self.in_blocks[not layer.is_block] else self.of_elements

    def moved(self, numbers: int, itemsize: int) -> int:
        """Bytes of an element that are read, with its gradient, and written, with what is computed with."""
        return 4 * (2 + numbers) + 4 * (1 + numbers) + (itemsize if itemsize < 4 else 0)


ADAMW = UpdateNumbers()


def update_seconds(
    held: Sequence[LayerSizes], cuts: tuple[int, int], at: LayoutSizes, machine: MachineRates
) -> dict[str, float]:
    """Seconds of the update of a rank's share of these layers, of which so many ranks have one each: of
    experts, and of all else; and beside it of what is not on the device, on its way.
    """
    update = at.update
    elements = moved = state = 0.0
    for layer in held:
        own = sum(each / cut for each, cut in zip(layer.updated(at), cuts, strict=True))
        numbers = update.numbers(layer)
        elements += own
        moved += own * update.moved(numbers, at.itemsize)
        state += own * (4 * (1 + numbers) + (at.itemsize if at.parameters_home == "disk" else 0))
    multiplying, handing = _muon(held, cuts, at, machine)
    if at.optimizer_home == "device":
        rate = machine.memory_bandwidth
        measured = machine.optimizer_of(at.form)
        if measured is not None:
            rate = measured * ADAMW.moved(ADAMW.of_elements, at.itemsize)
        return {"optimizer": moved / rate + multiplying, "parameters": handing}
    rate, travelled = machine.memory_bandwidth, 0.0
    if at.optimizer_home == "host" or machine.host is not None:
        host = machine.host_for("memory.optimizer")
        rate, travelled = (
            host.memory_bandwidth,
            elements * (at.gradient_itemsize + at.itemsize) / host.bandwidth,
        )
    seconds = moved / rate
    if at.optimizer_home == "disk":
        travelled += max(0.0, state / machine.disk_for("memory.optimizer") - seconds)
    return {"optimizer": seconds, "offload": travelled}


def _muon(
    held: Sequence[LayerSizes], cuts: tuple[int, int], at: LayoutSizes, machine: MachineRates
) -> tuple[float, float]:
    """Seconds of the products of Newton and Schulz, where each rank that sums gradients has its share of the
    matrices; and of their pieces, which tensor ranks join and cut, and what is handed on where all ranks have
    all parameters.
    """
    muon = at.update.muon
    if muon is None:
        return 0.0, 0.0
    form = "bf16" if muon.format.itemsize == 2 else "fp32"
    rates = machine.products.get(form) or machine.products_of(at.form)
    products = sent = 0.0
    for layer in held:
        if not at.update.in_blocks[not layer.is_block]:
            continue
        for of_experts, shape in layer.shapes:
            block = muon.update_block(Shard.replicated("", shape))
            assert block is not None
            rows, columns = sorted(shape[-2:])
            of_one = rates.seconds(rows, rows, columns) / (2.0 * rows * rows * columns) * block.work
            group = at.expert_data_ranks if of_experts else at.data_ranks
            pieces = at.expert * at.expert_tensor if of_experts else at.tensor
            share = cuts[not of_experts] if at.zero else group.size
            products += prod(shape[:-2]) * of_one / (share * pieces)
            size = prod(shape) / pieces * muon.format.itemsize
            split: Sharing = at.expert_tensor_ranks if of_experts else at.tensor_ranks
            sent += 2 * collective_seconds(machine, "all_to_all", size / share, split)
            if not at.zero:
                sent += collective_seconds(machine, "all_gather", size, group)
    return products, sent
