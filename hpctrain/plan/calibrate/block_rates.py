"""Times of complete blocks, compared with their separately measured parts.

A block takes longer: the caches do not have what the next part needs, memory is allocated and freed, and
Python runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpctrain.comm.mesh import Mesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.layer_times import measure_layers
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.operations import ElementwiseKind
from hpctrain.plan.calibrate.calibration_decks import on_data_ranks
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.time.layer_seconds import Causes, LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import AttentionRates, Efficiency, MachineRates, Pair, ProductRates

_BYTES = 16
"""Approximate bytes per parameter of a layer that is measured."""


@dataclass(frozen=True)
class TimedBlocks:
    """Decks whose blocks are timed on data ranks."""

    decks: tuple[Deck, ...]

    @staticmethod
    def of(decks: Iterable[Deck], ranks: int, memory: float) -> TimedBlocks:
        """Return those decks whose blocks fit into `memory` bytes and have no experts."""
        plain = (on_data_ranks(deck, ranks) for deck in decks if not deck.model.experts)
        return TimedBlocks(
            tuple(d for d in plain if _BYTES * sum(map(_elements_of, _blocks(d))) < memory / 2)
        )

    def seconds(self, clock: Clock) -> list[float]:
        """Return the seconds of all passes of one block of each kind, for each deck. Collective."""
        world, results = clock.world, []
        for untuned_deck in self.decks:
            mesh = Mesh(world, axis_sizes(untuned_deck, world.size))
            deck = choose_kernels(untuned_deck, world, mesh)
            layer_context = make_layer_context(deck, mesh, SavedPolicy(), world.device)
            times = measure_layers(deck, _shape(deck), layer_context, mesh, has_ends=False).of_kind
            results.append(sum(each.total for each in times.values()))
        return results

    def planned(self, machine: MachineRates) -> list[float]:
        """Return the predicted seconds of these blocks on a machine."""
        return [_planned(deck, machine) for deck in self.decks]


def launch_seconds(tiny: TimedBlocks, measured: Sequence[float], machine: MachineRates) -> float:
    """Return the minimum seconds of an operation.

    They are what tiny blocks take longer than predicted, per operation.
    """
    without_launch, with_launch = (
        tiny.planned(machine.model_copy(update={"launch": each})) for each in (0.0, 1.0)
    )
    return max(0.0, sum(measured) - sum(without_launch)) / max(1.0, sum(with_launch) - sum(without_launch))


def block_factor(blocks: TimedBlocks, measured: Sequence[Sequence[float]], machine: MachineRates) -> float:
    """Return the mean ratio of measured to predicted seconds of blocks.

    Of several measurements, the shortest counts, since others may have been disturbed.
    """
    least = [min(times) for times in zip(*measured, strict=True)]
    ratios = [one / other for one, other in zip(least, blocks.planned(machine), strict=True)]
    return fmean(ratios) if ratios else 1.0


def _planned(deck: Deck, machine: MachineRates) -> float:
    at = LayoutSizes.of(deck, deck.batch.global_size // deck.batch.micro_size, machine.ranks_per_node)
    of_layers = (layer_seconds(layer, at, machine) for layer in _blocks(deck))
    return sum(
        _total(each.forward) + _total(each.input_gradient) + _total(each.weight_gradient)
        for each in of_layers
    )


def _shape(deck: Deck) -> ModelShape:
    assert deck.model.vocabulary is not None
    return ModelShape.of(deck, deck.model.vocabulary)


def _blocks(deck: Deck) -> list[LayerSizes]:
    """Return one block of each kind."""
    layers = {layer.kind: layer for layer in layer_sizes(_shape(deck)) if layer.is_block}
    return list(layers.values())


def _elements_of(layer: LayerSizes) -> int:
    return layer.replicated_elements + layer.split_elements


def _total(causes: Causes) -> float:
    return sum(causes.values())


def scale_block_rates(machine: MachineRates, form: str, factor: float) -> MachineRates:
    """Return a machine whose products, attention and elementwise operations of a format take longer.

    Args:
        machine: The machine.
        form: The format, such as "bf16".
        factor: Factor of their times.
    """
    products = machine.products[form]
    slower = ProductRates(
        peak=products.peak,
        efficiency=products.efficiency / factor,
        saturation=products.saturation,
        passes={kind: _slower(each, factor) for kind, each in products.passes.items()},
    )
    changed: dict[str, object] = {"products": {**machine.products, form: slower}}
    if form in machine.formats:
        rates = machine.formats[form]
        slower_rates = {
            "attention": None if rates.attention is None else _attention(rates.attention, factor),
            "elementwise": _elements(rates.elementwise, factor),
        }
        changed["formats"] = {**machine.formats, form: rates.model_copy(update=slower_rates)}
    else:
        changed["attention"] = _attention(machine.attention, factor)
        changed["elementwise"] = _elements(machine.elementwise, factor)
    return machine.model_copy(update=changed)


def _slower(each: Efficiency, factor: float) -> Efficiency:
    return Efficiency(efficiency=each.efficiency / factor, saturation=each.saturation)


def _attention(each: AttentionRates, factor: float) -> AttentionRates:
    forward, backward = each.forward, each.backward
    return AttentionRates(
        forward=None if forward is None else forward / factor,
        backward=None if backward is None else backward / factor,
        passes=each.passes,
        features=(each.features[0] * factor, each.features[1] * factor),
    )


def _elements(figures: Mapping[ElementwiseKind, Pair], factor: float) -> dict[ElementwiseKind, Pair]:
    return {kind: (forward * factor, backward * factor) for kind, (forward, backward) in figures.items()}
