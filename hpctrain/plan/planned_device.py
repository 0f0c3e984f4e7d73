"""Device that a plan assumes if the deck leaves the choice to the run."""

from __future__ import annotations

from hpctrain.deck.schema import Deck


def assume_planned_device(deck: Deck, gpus_per_node: int | None = None) -> Deck:
    """Return the deck with run.device = "cuda" if the nodes of its run have GPUs.

    With run.device = "auto" a run chooses its device when it starts. Plans and batch scripts are often made
    on a login node without GPUs. So GPUs are assumed if machine.gpus_per_node, machine.gpu_memory or
    `gpus_per_node` is positive. Machine files of GPUs set the device themselves (`MachineRates.fill_deck`).

    Args:
        deck: The deck as it was read.
        gpus_per_node: Number of GPUs per node from the command line; None to use the deck's.
    """
    machine = deck.machine
    count = machine.gpus_per_node if gpus_per_node is None else gpus_per_node
    has_gpus = count if count is not None else machine.gpu_memory
    if deck.run.device != "auto" or not has_gpus:
        return deck
    return deck.with_keys(run={"device": "cuda"})
