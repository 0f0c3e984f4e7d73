"""Rates of the machine that a deck names."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.time.machine_rates import MachineRates, read_machine


def deck_rates(deck: Deck) -> MachineRates | None:
    """Return the rates of `machine.rates`; None if the deck has none.

    Raises:
        HpctrainError: They cannot be read, are wrong, or lack the format of the deck.
    """
    name = deck.machine.rates
    if name is None:
        return None
    try:
        machine = read_machine(name)
        machine.products_of(deck.precision.compute)
    except HpctrainError as error:
        problems = (problem.removeprefix(f"{name}: ") for problem in error.problems)
        raise HpctrainError([deck.problem("machine.rates", each) for each in problems]) from None
    return machine
