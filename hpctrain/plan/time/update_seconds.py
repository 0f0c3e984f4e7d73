"""Seconds of an update: memory that the optimizer reads and writes, and its matrix products.

If the state is offloaded, one piece is read and another one is written while a third one is updated
(`optim/offload.py`).
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
from hpctrain.plan.time.machine_rates import GroupPlacement, MachineRates, collective_seconds

if TYPE_CHECKING:
    from hpctrain.plan.time.layer_seconds import LayerSizes
    from hpctrain.plan.time.layout_sizes import LayoutSizes

_BLOCK, _OTHER = "blocks.0.weight", "other.weight"


@dataclass(frozen=True)
class UpdateNumbers:
    """Sizes of the optimizer's state.

    Attributes:
        of_elements: Numbers of state per element, without the master weight.
        of_blocks: Numbers of state per element of matrices that are updated as a whole.
        in_blocks: True if the matrices of blocks, and those of other layers, are updated as a whole.
        muon: Rule of Muon; None for other optimizers.
    """

    of_elements: int = 2
    of_blocks: int = 2
    in_blocks: tuple[bool, bool] = (False, False)
    muon: Muon | None = None

    @staticmethod
    def of(deck: Deck) -> UpdateNumbers:
        """Return the sizes of the deck's optimizer."""
        rule = RULES[deck.optimizer.name](deck)
        if not isinstance(rule, MatrixRules):
            return UpdateNumbers(len(rule.names), len(rule.names))
        is_matrix = tuple(any(fnmatchcase(n, each) for each in rule.patterns) for n in (_BLOCK, _OTHER))
        other_numbers, block_numbers = (
            state_per_element(rule, UpdateSettings(in_blocks=each)) for each in (False, True)
        )
        muon = rule.matrix_rule if isinstance(rule.matrix_rule, Muon) else None
        return UpdateNumbers(other_numbers, block_numbers, (is_matrix[0], is_matrix[1]), muon)

    def numbers(self, layer: LayerSizes) -> int:
        """Return the numbers of state per element of a layer's matrices."""
        return self.of_blocks if self.in_blocks[not layer.is_block] else self.of_elements

    def traffic(self, numbers: int, itemsize: int) -> int:
        """Return the bytes per element that an update reads and writes.

        It reads the state, the master weight and the gradient. It writes the state, the master weight, and
        the parameter if it has 16 bits.
        """
        return 4 * (2 + numbers) + 4 * (1 + numbers) + (itemsize if itemsize < 4 else 0)


ADAMW = UpdateNumbers()


def update_seconds(
    stage_layers: Sequence[LayerSizes], cuts: tuple[int, int], at: LayoutSizes, machine: MachineRates
) -> dict[str, float]:
    """Return the seconds of the update of a rank's share of layers, by cause.

    Args:
        stage_layers: Layers of the stage.
        cuts: Number of ranks that share the update of experts, and of all other parameters.
        at: Sizes of the layout.
        machine: Rates of the machine.
    """
    update = at.update
    elements = traffic = state = 0.0
    for layer in stage_layers:
        updated = sum(each / cut for each, cut in zip(layer.trained_elements(at), cuts, strict=True))
        numbers = update.numbers(layer)
        elements += updated
        traffic += updated * update.traffic(numbers, at.itemsize)
        state += updated * (4 * (1 + numbers) + (at.itemsize if at.parameters_location == "disk" else 0))
    multiplying, sending = _muon(stage_layers, cuts, at, machine)
    if at.optimizer_location == "device":
        rate = machine.memory_bandwidth
        measured = machine.optimizer_of(at.form)
        if measured is not None:
            rate = measured * ADAMW.traffic(ADAMW.of_elements, at.itemsize)
        return {"optimizer": traffic / rate + multiplying, "parameters": sending}
    rate, transfer = machine.memory_bandwidth, 0.0
    if at.optimizer_location == "host" or machine.host is not None:
        host = machine.host_for("memory.optimizer")
        rate, transfer = (
            host.memory_bandwidth,
            elements * (at.gradient_itemsize + at.itemsize) / host.bandwidth,
        )
    seconds = traffic / rate
    if at.optimizer_location == "disk":
        transfer += max(0.0, state / machine.disk_for("memory.optimizer") - seconds)
    return {"optimizer": seconds, "offload": transfer}


def _muon(
    stage_layers: Sequence[LayerSizes], cuts: tuple[int, int], at: LayoutSizes, machine: MachineRates
) -> tuple[float, float]:
    """Return the seconds of Muon's products and of its messages.

    Each rank that reduces gradients has a share of the matrices. Tensor ranks join and split their pieces.
    Without ZeRO, the results are gathered.
    """
    muon = at.update.muon
    if muon is None:
        return 0.0, 0.0
    form = "bf16" if muon.dtype.itemsize == 2 else "fp32"
    rates = machine.products.get(form) or machine.products_of(at.form)
    products = sending = 0.0
    for layer in stage_layers:
        if not at.update.in_blocks[not layer.is_block]:
            continue
        for of_experts, shape in layer.shapes:
            block = muon.update_block(Shard.replicated("", shape))
            assert block is not None
            rows, columns = sorted(shape[-2:])
            seconds_per_matrix = (
                rates.seconds(rows, rows, columns) / (2.0 * rows * rows * columns) * block.work
            )
            group = at.expert_data_ranks if of_experts else at.data_ranks
            pieces = at.expert * at.expert_tensor if of_experts else at.tensor
            share = cuts[not of_experts] if at.zero else group.size
            products += prod(shape[:-2]) * seconds_per_matrix / (share * pieces)
            size = prod(shape) / pieces * muon.dtype.itemsize
            split: GroupPlacement = at.expert_tensor_ranks if of_experts else at.tensor_ranks
            sending += 2 * collective_seconds(machine, "all_to_all", size / share, split)
            if not at.zero:
                sending += collective_seconds(machine, "all_gather", size, group)
    return products, sending
