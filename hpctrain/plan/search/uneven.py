"""Layouts that were found, their blocks split by seconds where the run's own split by FLOPs is slower."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.deck.check import check_deck
from hpctrain.plan.search.choices import with_values
from hpctrain.plan.search.tree import Layout, Tree
from hpctrain.plan.time.ground import Ground
from hpctrain.plan.time.step import split_by_seconds

LEAST_GAIN = 0.005
"""Of a step: for less no split is written."""


def split_unevenly(tree: Tree, layout: Layout) -> Layout | None:
    """A layout whose longest stage is as short as can be by seconds, and its own; None where the deck gives a
    split, or its step is not that much shorter.
    """
    form = tree.schedule(layout)
    if form.parts == 1 or tree.choices.given("layout.split"):
        return None
    split = split_by_seconds(tree.layers, Ground(tree.machine, layout.at), form)
    if split == layout.split:
        return None
    deck = with_values(layout.deck, {"layout.split": split})
    if check_deck(deck, tree.choices.ranks):
        return None
    other = replace(layout, deck=deck, split=split)
    causes, before = tree.seconds(other), layout.causes or tree.seconds(layout)
    seconds = sum(causes.values())
    if seconds > (1 - LEAST_GAIN) * sum(before.values()):
        return None
    return replace(other, bound=seconds, causes=causes)
