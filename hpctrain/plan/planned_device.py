"""Device that a plan assumes where the deck leaves the choice to the run."""

from __future__ import annotations

from hpctrain.deck.schema import Deck


def on_planned_device(deck: Deck, gpus_per_node: int | None = None) -> Deck:
    """Return the deck with run.device = "cuda" if its run will find GPUs, whatever this machine has.

    A run chooses its device when it starts (run.device = "auto"). Plans and batch scripts are often made on
    a login node without GPUs, so GPUs are assumed where something says that nodes have them:
    machine.gpus_per_node, machine.gpu_memory, or `gpus_per_node`. A machine file of GPUs says so itself
    (`Machine.of_deck`).

    Args:
        deck: The deck as it was read.
        gpus_per_node: GPUs of a node as an option gives them; None: the deck's.
    """
    machine = deck.machine
    count = machine.gpus_per_node if gpus_per_node is None else gpus_per_node
    has_gpus = count if count is not None else machine.gpu_memory
    if deck.run.device != "auto" or not has_gpus:
        return deck
    return deck.with_keys(run={"device": "cuda"})
