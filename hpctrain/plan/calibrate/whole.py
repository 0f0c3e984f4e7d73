"""How much longer a whole block takes than its parts do by themselves, and rates as they are within one.

What one part leaves in caches is not what the next one needs, memory comes and goes, and Python runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from hpctrain.comm.mesh import Mesh
from hpctrain.deck.schema import Deck
from hpctrain.engine.kernels import choose_kernels
from hpctrain.engine.layer_times import measure_layers
from hpctrain.engine.sizes import axis_sizes
from hpctrain.engine.stage import make_groups
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.operations import ElementwiseKind
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.decks import on_data_ranks
from hpctrain.plan.time.arrangement import Arrangement
from hpctrain.plan.time.layers import layer_seconds, layer_sizes
from hpctrain.plan.time.machine import Attention, Efficiency, Machine, Pair, Products

_BYTES = 16
"""Of an element of a layer's parameters that is measured, about."""


def measure_whole(decks: Sequence[Deck], machine: Machine, clock: Clock) -> float:
    """The mean ratio of what blocks of decks of one format take to what is planned of them, all passes
    together: at least 1, as where no block fits into memory. Collective.
    """
    world, ratios = clock.world, []
    for each in decks:
        deck = on_data_ranks(each, world.size)
        assert deck.model.vocabulary is not None
        shape = ModelShape.of(deck, deck.model.vocabulary)
        layers = dict.fromkeys(layer_sizes(shape))
        elements = sum(layer.whole_elements + layer.split_elements for layer in layers)
        if deck.model.experts or elements * _BYTES > machine.memory / 2:
            continue
        mesh = Mesh(world, axis_sizes(deck, world.size))
        deck = choose_kernels(deck, world, mesh)
        groups = make_groups(deck, mesh, SavedPolicy(), world.device)
        measured = measure_layers(deck, shape, groups, mesh).of_kind
        at = Arrangement.of(deck, world.size, machine.ranks_per_node)
        for layer in layers:
            if layer.is_block:
                planned = layer_seconds(layer, at, machine)
                passes = (planned.forward, planned.input_gradient, planned.weight_gradient)
                ratios.append(measured[layer.kind].total / sum(sum(each.values()) for each in passes))
    return max(1.0, fmean(ratios)) if ratios else 1.0


def as_in_blocks(machine: Machine, form: str, factor: float) -> Machine:
    """The machine whose products, attention and elements of a format take so many times as long."""
    products = machine.products[form]
    slower = Products(
        peak=products.peak,
        efficiency=products.efficiency / factor,
        saturation=products.saturation,
        passes={kind: _slower(each, factor) for kind, each in products.passes.items()},
    )
    changed: dict[str, object] = {"products": {**machine.products, form: slower}}
    if form in machine.formats:
        of_form = machine.formats[form]
        figures = {
            "attention": None if of_form.attention is None else _attention(of_form.attention, factor),
            "elementwise": _elements(of_form.elementwise, factor),
        }
        changed["formats"] = {**machine.formats, form: of_form.model_copy(update=figures)}
    else:
        changed["attention"] = _attention(machine.attention, factor)
        changed["elementwise"] = _elements(machine.elementwise, factor)
    return machine.model_copy(update=changed)


def _slower(each: Efficiency, factor: float) -> Efficiency:
    return Efficiency(efficiency=each.efficiency / factor, saturation=each.saturation)


def _attention(each: Attention, factor: float) -> Attention:
    forward, backward = each.forward, each.backward
    return Attention(
        forward=None if forward is None else forward / factor,
        backward=None if backward is None else backward / factor,
        passes=each.passes,
    )


def _elements(figures: Mapping[ElementwiseKind, Pair], factor: float) -> dict[ElementwiseKind, Pair]:
    return {kind: (forward * factor, backward * factor) for kind, (forward, backward) in figures.items()}
